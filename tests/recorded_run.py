"""A finished run folder made by hand: a random trace, chosen trees, costs and policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from traces import random_trace

from entmtp_calib import records
from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import FILE_NAME, Bank, BankEntry
from entmtp_calib.files import write_table
from entmtp_calib.policy import Policy
from entmtp_calib.timing import Interval
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree

PROMPTS = {"search": range(6), "select": range(6, 9), "report": range(9, 12)}


def text_trace(seed: int = 5, **options: Any) -> Trace:
    """Twelve random texts, those of `PROMPTS`."""
    return random_trace(seed, n_texts=12, max_length=30, **options)


def timing_rows(
    row_ms: float, plain_ms: float = 10.0, level_ms: float = 1.0, most_rows: int = 64
) -> list[dict[str, Any]]:
    """Timed steps that cost `row_ms` per row behind the first, and four depths of levels."""
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most_rows]
    steps = [
        {
            "kind": "step",
            "tree": "any",
            "context_length": 16,
            "rows": n,
            "round": 1,
            "step_ms": plain_ms + row_ms * (n - 1) + 0.5,
            "draft_ms": 0.5,
        }
        for n in counts
    ]
    levels = [
        {"kind": "level", "depth": d, "context_length": 16, "rows": n, "round": 1}
        | {"draft_ms": level_ms}
        for d in range(1, 5)
        for n in (1, 32)
    ]
    return [*steps, *levels]


def timing_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """The rows as a timing table."""
    return records.table(rows, records.TIMING_SCHEMA)


def save_costs(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Another machine's cost table."""
    write_table(file, timing_table(rows))
    return file


def save_run(
    folder: Path,
    trace: Trace,
    trees: Sequence[Tree],
    policies: dict[str, Policy],
    timing: Sequence[Mapping[str, Any]],
    given: bool = False,
    user_trees: Mapping[Tree, str] | None = None,
) -> Path:
    """The folder of a run whose bank has these trees, the empty one first.

    Args:
        given: whether the trees were given, and so stand in run.json; else they were grown.
        user_trees: what stands beside them in run.json.
    """
    drafting = [tree for tree in trees if tree != EMPTY]
    config = {
        "settings": {"signal": "auto"},
        "trees": [tree.to_list() for tree in drafting] if given else None,
        "data": {"description": "twelve texts"},
    }
    if user_trees:
        named = [{"name": name, "paths": tree.to_list()} for tree, name in user_trees.items()]
        config["user_trees"] = named
    one = Interval(1.0, 1.0, 1.0)
    entries = [BankEntry(tree, one, 1.0, one, one) for tree in trees]
    with RunFolder.create(folder, config) as run:
        parts = [trace.select(list(prompts)).to_table(name) for name, prompts in PROMPTS.items()]
        run.write_table("trace.parquet", pa.concat_tables(parts))
        run.write_table("timing.parquet", timing_table(timing))
        if not given:
            rows = [
                {"tree": t.id, "paths": t.to_list(), "n_nodes": t.n_nodes, "depth": t.depth}
                for t in drafting
            ]
            rows = [{**row, "on_frontier": True} for row in rows]
            table = records.table(rows, records.CANDIDATES_SCHEMA)
            run.write_table("grown.parquet", table)
        bank = Bank(
            task="custom",
            model={"name": "toy"},
            heads={"kind": "hydra"},
            entries=tuple(entries[:1]),
            extras=tuple(entries[1:]),
            policies=policies,
            best=policies["static"].indices[0],
            hardware={"cpu": "a processor", "usable_cores": 2},
        )
        run.write_bytes(FILE_NAME, bank.to_bytes())
    return folder
