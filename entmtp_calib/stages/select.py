"""Select: the trees of the bank, and the policies fitted to the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from entmtp_calib import records
from entmtp_calib.bank import FILE_NAME, Bank, BankEntry
from entmtp_calib.costs import Costs
from entmtp_calib.frontier import strict_pareto
from entmtp_calib.provenance import hardware
from entmtp_calib.racing import rate, ratio, runs_by_method
from entmtp_calib.replay import accepted, counts_by_prompt, walk
from entmtp_calib.stages.cost import COSTS, run_costs
from entmtp_calib.stages.recalibrate import CANDIDATES, live_trees
from entmtp_calib.stages.recorded import TIMING, TRACE, candidate_trees
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.schedule import fit_schedule
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import Interval, mean_interval
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE = "select"
NOT_USED = -1


def timed_records(run: Run) -> list[dict[str, Any]]:
    """A record per tree that ran end to end, smallest first: the tree and its measured figures.

    A tree that was beaten before the last run has fewer runs than plain decoding; its ratio is that
    of the runs it has.
    """
    candidates = run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA)
    rows = {row["tree"]: row for row in candidates.to_pylist()}
    runs = runs_by_method(run.folder.read_table(TIMING, records.TIMING_SCHEMA).to_pylist())
    plain = runs[EMPTY.id]
    trees = live_trees(candidates)
    records_ = []
    for tree, step_ms in zip(trees, run_costs(run).step_ms(trees), strict=True):
        row, mine = rows[tree.id], runs[tree.id]
        records_.append(
            {
                "tree": tree,
                "mean_emitted_tokens": Interval(
                    row["recalibrated_low"], row["recalibrated_emitted"], row["recalibrated_high"]
                ),
                "step_ms": float(step_ms),
                "tokens_per_second": rate(mine),
                "speedup_over_plain": ratio(mine, plain),
                "tokens": sum(tokens for tokens, _ in mine.values()),
                "seconds": sum(seconds for _, seconds in mine.values()),
                "runs": len(mine),
                "planned_runs": len(plain),
            }
        )
    return records_


def select(run: Run, timed: Sequence[Mapping[str, Any]]) -> tuple[Bank, list[Tree]]:
    """The bank, saved: the strict Pareto set of (nodes, tokens/s), and the fitted policies.

    Only trees that ran to the end are compared; one that was beaten before is not in the set.

    Args:
        timed: see `timed_records`.

    Returns:
        The bank, and all trees that its policies were chosen from.
    """
    candidates = candidate_trees(run.folder)
    inputs = {
        "tables": {name: run.folder.sha256(name) for name in (TRACE, CANDIDATES, COSTS, TIMING)},
        "candidates": [tree.id for tree in candidates],
        "signal": run.config.signal,
        "facts": [run.config.task, run.model_facts, run.heads_facts, run.data_facts],
        "seed": run.config.seed,
    }
    if run.folder.is_done(STAGE, inputs):
        return Bank.load(run.folder.file(FILE_NAME)), candidates
    started = perf_counter()
    bank = _bank(run, timed, candidates)
    run.folder.write_bytes(FILE_NAME, bank.to_bytes())
    run.folder.mark_done(STAGE, inputs, [FILE_NAME], perf_counter() - started)
    return bank, candidates


def _bank(run: Run, timed: Sequence[Mapping[str, Any]], candidates: Sequence[Tree]) -> Bank:
    only_beside = {HYDRA_DEFAULT} - set(candidates)
    own = [
        record
        for record in timed
        if record["tree"] not in only_beside and record["runs"] == record["planned_runs"]
    ]
    kept = strict_pareto(
        [record["tree"].n_nodes for record in own],
        [record["tokens_per_second"].value for record in own],
    )
    entries = [_entry(own[index]) for index in kept]
    search, chosen_on = read_trace(run, "search"), read_trace(run, "select")
    costs = run_costs(run)
    schedule = fit_schedule(
        Trace.joined([search, chosen_on]), candidates, costs, run.config.signal, run.progress
    )
    trees = [entry.tree for entry in entries]
    used = sorted({k for fit in schedule.fits.values() for k in fit.policy.indices})
    extras = [tree for k in used if (tree := schedule.trees[k]) not in trees]
    order = [*trees, *extras]
    numbers = [order.index(t) if t in order else NOT_USED for t in schedule.trees]
    policies = {name: fit.policy.renumbered(numbers) for name, fit in schedule.fits.items()}
    return Bank(
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


def _entry(record: Mapping[str, Any]) -> BankEntry:
    return BankEntry(
        record["tree"],
        record["mean_emitted_tokens"],
        record["step_ms"],
        record["tokens_per_second"],
        record["speedup_over_plain"],
    )


def _extra_entry(
    tree: Tree, timed: Sequence[Mapping[str, Any]], trace: Trace, costs: Costs
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
