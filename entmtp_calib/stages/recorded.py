"""What a finished run's folder says: its bank, its trace, its costs. Loads no model and no torch.

A trace taken once can be combined with the costs of any machine, so what is asked of a run after it
is done needs nothing but these files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entmtp_calib import files, records
from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import FILE_NAME, Bank
from entmtp_calib.costs import LEVEL, STEP, Costs
from entmtp_calib.errors import ArtifactError, UsageError
from entmtp_calib.stages.schedule import AUTO
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree

if TYPE_CHECKING:
    import pyarrow as pa

TRACE, GROWN, TIMING = "trace.parquet", "grown.parquet", "timing.parquet"
SPLITS = ("search", "select", "report")
USER_TREES = "user_trees"

_COSTS = "the timed steps and levels of a run"
_TIME_AGAIN = "name the timing.parquet or costs.parquet that entmtp time wrote on that machine"
_FACTS = ("name", "fingerprint", "dtype", "device", "engine", "kind", "n_heads")


@dataclass(frozen=True)
class Recorded:
    """A run that has a bank, opened for reading."""

    folder: RunFolder
    bank: Bank

    @classmethod
    def open(cls, path: Path) -> Recorded:
        """A run folder, or the bank's file in it; `ArtifactError` where anything is missing."""
        folder = RunFolder.open(path.parent if path.is_file() else path)
        return cls(folder, Bank.load(path if path.is_file() else folder.file(FILE_NAME)))

    @cached_property
    def _traces(self) -> pa.Table:
        return self.folder.read_table(TRACE, records.TRACE_SCHEMA)

    def trace(self, split: str) -> Trace:
        """What was recorded of one split; `UsageError` where there is no such split."""
        if split not in SPLITS:
            raise UsageError(f"--split {split}", f"one of {', '.join(SPLITS)}")
        return Trace.from_table(self._traces, split)

    @cached_property
    def context(self) -> float:
        """Tokens that a step finds on average, at which costs are taken: as the bank's were."""
        return float(self.trace("search").context.mean())

    @property
    def signal(self) -> str:
        """What ladder and hysteresis were fitted with."""
        return str(self.folder.config.get("settings", {}).get("signal", AUTO))

    def costs(self, file: Path | None = None) -> Costs:
        """The run's own costs, or those in another machine's table.

        Args:
            file: a Parquet file of `records.TIMING_SCHEMA`; raises `ArtifactError` unless it has
                timed steps and levels.
        """
        if file is None:
            table = self.folder.read_table(TIMING, records.TIMING_SCHEMA)
            return Costs.of(table.to_pylist(), self.context)
        try:
            rows = files.read_table(file, records.TIMING_SCHEMA).to_pylist()
        except ArtifactError as error:
            raise ArtifactError(f"--costs: {error.found}", _COSTS, _TIME_AGAIN) from None
        _check_costs(file, rows)
        return Costs.of(rows, self.context)

    def conditions(self, split: str, costs: Path | None = None) -> dict[str, Any]:
        """What must stand beside figures of a split, as JSON values."""
        bank, trace = self.bank, self.trace(split)
        return {
            "bank": self.folder.path,
            "task": bank.task,
            "data": self.folder.config.get("data", {}).get("description", ""),
            "model": {key: bank.model[key] for key in _FACTS if key in bank.model},
            "heads": {key: bank.heads[key] for key in _FACTS if key in bank.heads},
            "sampling": _sampling(self.folder),
            "split": split,
            "prompts": trace.n_prompts,
            "positions": len(trace),
            "context_tokens": self.context,
            "costs": TIMING if costs is None else costs,
            "hardware": bank.hardware if costs is None else None,
        }


def candidate_trees(folder: RunFolder) -> list[Tree]:
    """The trees that a policy may be made of: all grown or given, the user's, and none at all."""
    paths = folder.config.get("trees")
    if paths is None:
        grown = folder.read_table(GROWN, records.CANDIDATES_SCHEMA).to_pylist()
        paths = [row["paths"] for row in grown]
    trees = [EMPTY, *map(Tree.of, paths)]
    return [*trees, *(tree for tree in user_trees_of(folder) if tree not in trees)]


def user_trees_of(folder: RunFolder) -> dict[Tree, str]:
    """The trees that were measured at the user's wish, with what the user calls them."""
    named = folder.config.get(USER_TREES, [])
    return {Tree.of(entry["paths"]): entry["name"] for entry in named}


def _sampling(folder: RunFolder) -> dict[str, Any]:
    settings = folder.config.get("settings", {})
    names = ("temperature", "top_p", "top_k", "seed", "max_new_tokens")
    return {name: settings[name] for name in names if name in settings}


def _check_costs(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a table that lacks a kind of rows, or has rows without usable figures."""
    needed = {STEP: ("rows", "context_length", "step_ms", "draft_ms"), LEVEL: ("depth", "draft_ms")}
    found = dict.fromkeys(needed, 0)
    for row in rows:
        kind = row["kind"]
        if kind in needed:
            found[kind] += 1
            complete = all(row[name] is not None and row[name] >= 0 for name in needed[kind])
            if not complete or (kind == STEP and row["step_ms"] <= row["draft_ms"]):
                problem = f"--costs: {file} has a timed {kind} without its times"
                raise ArtifactError(problem, _COSTS, _TIME_AGAIN)
    if not all(found.values()):
        counts = " and ".join(f"{n} timed {kind}s" for kind, n in found.items())
        raise ArtifactError(f"--costs: {file} has {counts}", _COSTS, _TIME_AGAIN)
