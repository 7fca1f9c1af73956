"""The main job: rollout, grow, cost, recalibrate, time, select; then policies and manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import Bank
from entmtp_calib.config import BuildConfig
from entmtp_calib.errors import UsageError
from entmtp_calib.progress import Progress
from entmtp_calib.provenance import provenance
from entmtp_calib.stages import cost, grow, policies, recalibrate, rollout, time
from entmtp_calib.stages.import_trees import import_trees
from entmtp_calib.stages.recorded import user_trees_of
from entmtp_calib.stages.select import STAGE as SELECT
from entmtp_calib.stages.select import select, timed_records
from entmtp_calib.stages.setup import (
    Inputs,
    Run,
    native_folder,
    open_run,
    read_settings,
    reopen_run,
)
from entmtp_calib.stages.usage import Usage, usage
from entmtp_calib.tree import Tree

MEASURING: dict[str, Callable[[Run], None]] = {
    rollout.STAGE: rollout.rollout,
    grow.STAGE: grow.grow,
    cost.STAGE: cost.measure_costs,
    recalibrate.STAGE: recalibrate.recalibrate,
    time.STAGE: time.time_trees,
}
"""The stages before the choice of the bank, in their order."""


@dataclass(frozen=True)
class Outcome:
    """What a command shows at its end."""

    folder: Path
    data: str
    reached: str
    """The last stage that is done."""
    bank: Bank | None = None
    timed: Sequence[dict[str, Any]] = ()
    """A record per tree that ran end to end, see `timed_records`."""
    policies: Sequence[dict[str, Any]] = ()
    """The rows of `policies.parquet`."""
    usage: Usage | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What the user calls the trees of these ids."""


def read_user_trees(paths: Iterable[Path], heads: str | None) -> dict[Tree, str]:
    """The trees of files in any form that `import_trees` reads, each once, with their names.

    They are checked against native heads from what these say of themselves, before anything is
    loaded; `open_run` checks them against any.

    Args:
        paths: the files.
        heads: as in `Inputs`.

    Raises:
        TreeError: naming the file and what is wrong with its trees.
    """
    folder = native_folder(heads)
    named: dict[Tree, str] = {}
    for path in paths:
        for name, tree in import_trees(path, heads=folder).trees:
            named.setdefault(tree, name)
    return named


def build_bank(
    config: BuildConfig,
    inputs: Inputs,
    out: Path | None = None,
    until: str = "select",
    command: Sequence[str] = (),
    progress: Progress | None = None,
    user_trees: Mapping[Tree, str] | None = None,
) -> Outcome:
    """Run the stages up to `until`, reusing those whose inputs have not changed.

    Args:
        user_trees: trees to measure beside the grown ones, with their names. They are candidates
            like those, and always run live.
    """
    run = open_run(config, inputs, out, command, progress, user_trees=user_trees)
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
        user_trees_of(RunFolder.open(folder)),
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
    known = (*MEASURING, SELECT)
    if until not in known:
        raise UsageError(f"stage {until}", f"one of {', '.join(known)}")
    done = []
    for name, measure in MEASURING.items():
        if name != grow.STAGE or run.trees is None:
            measure(run)
            done.append(name)
        if name == until:
            break
    timed = timed_records(run) if time.STAGE in done else []
    bank, rows = None, []
    if until == SELECT:
        bank, candidates = select(run, timed)
        rows = policies.report(run, bank, candidates)
        done += [SELECT, policies.STAGE]
    took = usage(run.folder, done, run.load_seconds, run.target.facts.n_weights)
    if bank:
        run.folder.finish({**_provenance(run), "usage": took.to_dict()})
    data = run.data_facts["description"]
    names = {tree.id: name for tree, name in run.user_trees.items()}
    return Outcome(run.folder.path, data, until, bank, timed, rows, took, names)


def _provenance(run: Run) -> dict[str, Any]:
    return provenance(
        run.command,
        {"splits": run.config.seed, "sampling": run.config.seed},
        {"model": run.model_facts, "heads": run.heads_facts, "data": run.data_facts},
        str(run.target.device),
    )
