"""Where a run's time went, and its memory: a table and a fact, the same wherever they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cli import console
from cli.figures import number

COLUMNS, REUSED = ("stage", "seconds"), "done before"


def print_usage(usage: Mapping[str, Any], mark_reused: bool) -> None:
    """The seconds of each stage.

    Args:
        usage: see `Usage.to_dict`.
        mark_reused: say which stages an earlier command had done.
    """
    rows = [[stage["stage"], number(stage["seconds"], 1)] for stage in usage["stages"]]
    rows.append(["total", number(usage["seconds"], 1)])
    marks = [REUSED if stage["reused"] else "" for stage in usage["stages"]]
    if mark_reused and any(marks):
        marked = zip(rows, [*marks, ""], strict=True)
        console.show_table((*COLUMNS, ""), ([*row, mark] for row, mark in marked))
    else:
        console.show_table(COLUMNS, rows)


def memory_fact(usage: Mapping[str, Any]) -> tuple[str, str]:
    """The most memory, beside the size of the target."""
    peak, target = (f"{usage[key] / 1e6:.1f} MB" for key in ("peak_bytes", "target_bytes"))
    return "memory", f"{peak} resident at most; the target's weights in float32 are {target}"
