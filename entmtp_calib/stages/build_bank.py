"""The main job: rollout, grow, cost, recalibrate, time, select; then policies and manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.bank import FILE_NAME, Bank, BankEntry
from entmtp_calib.config import BuildConfig
from entmtp_calib.costs import Costs
from entmtp_calib.errors import UsageError
from entmtp_calib.frontier import strict_pareto
from entmtp_calib.progress import Progress
from entmtp_calib.provenance import hardware, provenance
from entmtp_calib.replay import accepted, counts_by_prompt, walk
from entmtp_calib.stages.cost import measure_costs, run_costs
from entmtp_calib.stages.grow import grow
from entmtp_calib.stages.policies import report
from entmtp_calib.stages.recalibrate import CANDIDATES, live_trees, recalibrate
from entmtp_calib.stages.recorded import TIMING, candidate_trees
from entmtp_calib.stages.rollout import read_trace, rollout
from entmtp_calib.stages.schedule import fit_schedule, signals_to_try
from entmtp_calib.stages.setup import Inputs, Run, open_run, read_settings, reopen_run
from entmtp_calib.stages.time import time_trees
from entmtp_calib.timing import Interval, mean_interval, paired_bootstrap
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

NOT_USED = -1
STAGES = ("rollout", "grow", "cost", "recalibrate", "time", "select")


@dataclass(frozen=True)
class Outcome:
    """What a command shows at its end."""

    folder: Path
    data: str
    reached: str
    """The last stage that is done."""
    bank: Bank | None = None
    timed: Sequence[dict[str, Any]] = ()
    """A record per tree that ran end to end, see `timed_trees`."""
    policies: Sequence[dict[str, Any]] = ()
    """The rows of `policies.parquet`."""


def build_bank(
    config: BuildConfig,
    inputs: Inputs,
    out: Path | None = None,
    until: str = "select",
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Run the stages up to `until`, reusing those whose inputs have not changed."""
    run = open_run(config, inputs, out, command, progress)
    with run.folder:
        return _run_stages(run, until)


def resume(
    path: Path,
    until: str,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Continue an existing run folder up to a stage."""
    run = reopen_run(path, command, progress)
    with run.folder:
        return _run_stages(run, until)


def recalibrate_bank(
    path: Path,
    changes: dict[str, Any],
    out: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Measure a bank's trees again, on new heads, data or hardware, in a run folder of its own.

    Args:
        path: the bank's run folder or file; it is not changed.
        changes: fields of `Inputs` or `BuildConfig` to replace; None keeps the bank's. Another
            task without data has its usual set.
    """
    folder = path.parent if path.is_file() else path
    bank = Bank.load(path)
    if out and out.resolve() == folder.resolve():
        raise UsageError(f"--out {out}, the bank's own folder", "another folder")
    config, inputs = read_settings(folder)
    if changes.get("task") not in (None, config.task):
        inputs = replace(inputs, data=None)
    settings, sources = config.to_dict(), vars(inputs).copy()
    for name, value in changes.items():
        if value is not None:
            known = settings if name in settings else sources
            known[name] = value
    run = open_run(
        BuildConfig.from_dict(settings),
        Inputs(**sources),
        out or _beside(folder),
        command,
        progress,
        [tree for tree in bank.trees if tree.n_nodes],
    )
    with run.folder:
        return _run_stages(run, "select")


def _beside(folder: Path) -> Path:
    """A folder next to the bank's: NAME-recalibrated, -2, ...; an unfinished one is resumed."""
    number = 1
    while True:
        suffix = "-recalibrated" if number == 1 else f"-recalibrated-{number}"
        place = folder.resolve().with_name(folder.resolve().name + suffix)
        if not (place / "manifest.json").exists():
            return place
        number += 1


def _run_stages(run: Run, until: str) -> Outcome:
    if until not in STAGES:
        raise UsageError(f"stage {until}", f"one of {', '.join(STAGES)}")
    signals_to_try(run.config.signal, run.heads.n_heads)
    data = run.data_facts["description"]
    rollout(run)
    if until == "rollout":
        return Outcome(run.folder.path, data, until)
    if run.trees is None:
        grow(run)
    if until == "grow":
        return Outcome(run.folder.path, data, until)
    measure_costs(run)
    if until == "cost":
        return Outcome(run.folder.path, data, until)
    recalibrate(run)
    if until == "recalibrate":
        return Outcome(run.folder.path, data, until)
    time_trees(run)
    timed = timed_trees(run, run.folder.read_table(TIMING, records.TIMING_SCHEMA))
    if until == "time":
        return Outcome(run.folder.path, data, until, timed=timed)
    bank, candidates = select(run, timed)
    policies = report(run, bank, candidates)
    run.folder.finish(_provenance(run))
    return Outcome(run.folder.path, data, until, bank, timed, policies)


def timed_trees(run: Run, timing: pa.Table) -> list[dict[str, Any]]:
    """A record per tree that ran end to end, smallest first: the tree and its measured figures."""
    candidates = run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA)
    rows = {row["tree"]: row for row in candidates.to_pylist()}
    totals = _totals(timing)
    trees = [tree for tree in live_trees(candidates) if tree.id in totals]
    records_ = []
    for tree, step_ms in zip(trees, run_costs(run).step_ms(trees), strict=True):
        row, (tokens, seconds) = rows[tree.id], totals[tree.id]
        records_.append(
            {
                "tree": tree,
                "mean_emitted_tokens": Interval(
                    row["recalibrated_low"], row["recalibrated_emitted"], row["recalibrated_high"]
                ),
                "step_ms": float(step_ms),
                "tokens_per_second": mean_interval(tokens, seconds),
                "speedup_over_plain": paired_bootstrap(tokens, seconds, *totals[EMPTY.id]),
                "tokens": tokens,
                "seconds": seconds,
            }
        )
    return records_


def select(run: Run, timed: Sequence[dict[str, Any]]) -> tuple[Bank, list[Tree]]:
    """The bank, saved: the strict Pareto set of (nodes, tokens/s), and the fitted policies.

    Returns:
        The bank, and all trees that its policies were chosen from.
    """
    own = [record for record in timed if record["tree"] != HYDRA_DEFAULT]
    kept = strict_pareto(
        [record["tree"].n_nodes for record in own],
        [record["tokens_per_second"].value for record in own],
    )
    entries = [_entry(own[index]) for index in kept]
    candidates = candidate_trees(run.folder)
    search, chosen_on = read_trace(run, "search"), read_trace(run, "select")
    fitted_on = Trace.joined([search, chosen_on])
    costs = run_costs(run)
    schedule = fit_schedule(fitted_on, candidates, costs, run.config.signal, run.progress)
    trees = [entry.tree for entry in entries]
    used = sorted({k for fit in schedule.fits.values() for k in fit.policy.indices})
    extras = [tree for k in used if (tree := schedule.trees[k]) not in trees]
    order = [*trees, *extras]
    numbers = [order.index(t) if t in order else NOT_USED for t in schedule.trees]
    policies = {name: fit.policy.renumbered(numbers) for name, fit in schedule.fits.items()}
    bank = Bank(
        task=run.config.task,
        model=run.model_facts,
        heads=run.heads_facts,
        entries=tuple(entries),
        extras=tuple(_extra_entry(tree, timed, chosen_on, costs) for tree in extras),
        policies=policies,
        best=policies["static"].indices[0],
        auto=schedule.auto,
        hardware=hardware(str(run.target.device)),
        splits={
            "data": run.data_facts,
            **{name: [prompt.id for prompt in prompts] for name, prompts in run.splits.items()},
        },
        seeds={"splits": run.config.seed, "sampling": run.config.seed},
        notes=schedule.notes,
    )
    run.folder.write_bytes(FILE_NAME, bank.to_bytes())
    return bank, candidates


def _entry(record: dict[str, Any]) -> BankEntry:
    return BankEntry(
        record["tree"],
        record["mean_emitted_tokens"],
        record["step_ms"],
        record["tokens_per_second"],
        record["speedup_over_plain"],
    )


def _extra_entry(
    tree: Tree, timed: Sequence[dict[str, Any]], trace: Trace, costs: Costs
) -> BankEntry:
    """A tree off the frontier: as it was timed, or its replayed acceptance and no speed."""
    for record in timed:
        if record["tree"] == tree:
            return _entry(record)
    lengths = accepted(tree, trace.ranks)
    counts = counts_by_prompt(trace, lengths, walk(trace, lengths))
    emitted = mean_interval([c.emitted_tokens for c in counts], [c.steps for c in counts])
    unknown = Interval(math.nan, math.nan, math.nan)
    return BankEntry(tree, emitted, float(costs.step_ms([tree])[0]), unknown, unknown)


def _totals(timing: pa.Table) -> dict[str, tuple[list[float], list[float]]]:
    """Per tree run end to end: tokens and seconds per prompt, its rounds added up."""
    sums: dict[str, dict[int, list[float]]] = {}
    for row in timing.to_pylist():
        if row["kind"] == "end_to_end":
            of_prompt = sums.setdefault(row["tree"], {}).setdefault(row["prompt"], [0.0, 0.0])
            of_prompt[0] += row["tokens"]
            of_prompt[1] += row["seconds"]
    return {
        name: ([p[n][0] for n in sorted(p)], [p[n][1] for n in sorted(p)])
        for name, p in sums.items()
    }


def _provenance(run: Run) -> dict[str, Any]:
    return provenance(
        run.command,
        {"splits": run.config.seed, "sampling": run.config.seed},
        {"model": run.model_facts, "heads": run.heads_facts, "data": run.data_facts},
        str(run.target.device),
    )
