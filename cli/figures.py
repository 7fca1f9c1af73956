"""How measured figures are written: numbers, intervals, and the columns of a table of trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entmtp_calib.timing import Interval
    from entmtp_calib.tree import Tree

TREE_COLUMNS = (
    "tree",
    "nodes",
    "depth",
    "emitted/step [95 %]",
    "accepted/step",
    "step ms",
    "tokens/s [95 %]",
    "speed-up [95 %]",
)
UNDEFINED = "-"


def number(value: float | None, digits: int) -> str:
    """The number with so many decimals; a dash for one that is undefined."""
    if value is None or math.isnan(value):
        return UNDEFINED
    return f"{value:.{digits}f}"


def bounds(value: float | None, low: float | None, high: float | None, digits: int) -> str:
    """A figure with its interval, as 1.25 [1.20, 1.30]."""
    if value is None or math.isnan(value):
        return UNDEFINED
    return f"{number(value, digits)} [{number(low, digits)}, {number(high, digits)}]"


def row_bounds(row: Mapping[str, Any], value: str, low: str, high: str, digits: int) -> str:
    """The same from a table's row, by the names of its columns; a table holds no infinity."""
    unbounded = math.inf if row[high] is None else row[high]
    return bounds(row[value], row[low], unbounded, digits)


def interval(figure: Interval, digits: int) -> str:
    """The same of an `Interval`."""
    return bounds(figure.value, figure.low, figure.high, digits)


def percent(share: float) -> str:
    """A share as 12 %; what is there but below 1 % is not written as nothing."""
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 or share == 0 else "<1 %"


def tree_cells(
    tree: Tree,
    mean_emitted_tokens: Interval,
    step_ms: float,
    tokens_per_second: Interval,
    speedup_over_plain: Interval,
) -> list[str]:
    """A tree's row under `TREE_COLUMNS`."""
    return [
        tree.id,
        str(tree.n_nodes),
        str(tree.depth),
        interval(mean_emitted_tokens, 3),
        number(mean_emitted_tokens.value - 1, 3),
        number(step_ms, 3),
        interval(tokens_per_second, 2),
        interval(speedup_over_plain, 3),
    ]
