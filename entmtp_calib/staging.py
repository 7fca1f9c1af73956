"""The staged policy by backward induction: at each level of the greedy chain, stop or draft on.

With lambda the tokens that a millisecond is worth, a step that stops with tree T is worth its
emitted tokens less lambda times its cost. Rows are put into ranges of their chain value at each
level; from the deepest level up, a range takes the best tree or, where that is worth more, what
drafting on is worth on average. Lambda is the caller's, who iterates it to its fixed point
(Dinkelbach 1967). Values near each other are treated alike, so the result is a policy of few
numbers. This module replays nothing and knows no held-out texts: `fitting` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entmtp_calib.policy import DRAFT_ON, Staged, level_signal
from entmtp_calib.task import Task
from entmtp_calib.trace import Floats, Ints, Trace
from entmtp_calib.walks import signal_values

BINS = 8  # ranges of the chain value per level


def induced(
    task: Task,
    rows: Ints,
    rate: float,
    among: Sequence[int],
    seen: int,
) -> Staged:
    """The policy that is worth the most on some rows.

    Args:
        task: texts, trees and costs.
        rows: [M], where steps start; the last row of a text is none.
        rate: lambda, tokens per ms.
        among: indices of the trees that it may choose; levels are drafted for all of them.
        seen: the most levels that may be drafted to decide.
    """
    few = task.among(among)
    ms = few.costs.ahead_ms(few.trees, seen)
    emitted = few.accepted[:, rows] + 1
    levels = []
    drafting_on: Floats | None = None
    for level in range(seen, -1, -1):
        values = _values(task.trace, rows, level)
        edges = cuts(values, BINS - 1)
        bins = np.searchsorted(edges, values, side="left")  # as `Staged.choose` does
        worth = _means(bins, len(edges) + 1, emitted) - rate * ms[level][:, None]
        actions = np.array(among)[worth.argmax(0)]
        best = worth.max(0)
        if drafting_on is not None:
            after = _means(bins, len(edges) + 1, drafting_on[None])[0]
            actions = np.where(after > best, DRAFT_ON, actions)
            best = np.maximum(after, best)
        levels.append(_merged(edges, actions))
        drafting_on = best[bins]
    levels.reverse()
    stops = next(n for n, (_, actions) in enumerate(levels, 1) if DRAFT_ON not in actions)
    thresholds, kept = zip(*levels[:stops], strict=True)
    return Staged(thresholds, kept)


def useful(task: Task, rows: Ints, rate: float) -> set[int]:
    """The trees that are the best of all in some range of some level; arguments as above.

    Each is priced as if it were the only one that levels are drafted for.
    """
    depth = max(tree.depth for tree in task.trees)
    ms = np.stack([task.costs.ahead_ms([tree], depth)[:, 0] for tree in task.trees], axis=1)
    emitted = task.accepted[:, rows] + 1
    found: set[int] = set()
    for level in range(depth + 1):
        values = _values(task.trace, rows, level)
        edges = cuts(values, BINS - 1)
        bins = np.searchsorted(edges, values, side="left")
        worth = _means(bins, len(edges) + 1, emitted) - rate * ms[level][:, None]
        found |= set(worth.argmax(0).tolist())
    return found


def cuts(values: Floats, most: int) -> Floats:
    """At most so many quantiles, strictly rising, that cut the values into ranges.

    No range is empty: it would have an action that no text has shown to be good.
    """
    levels = np.linspace(0, 1, most + 2)[1:-1]
    edges = np.unique(np.quantile(values, levels, method="inverted_cdf"))
    return edges[edges < values.max()]


def _values(trace: Trace, rows: Ints, level: int) -> Floats:
    """[M], what a staged policy sees at a level; nothing at level 0."""
    if level == 0:
        return np.zeros(len(rows))
    return signal_values(trace, level_signal(level))[rows]


def _means(bins: Ints, n_bins: int, numbers: Floats | Ints) -> Floats:
    """[K, n_bins], the mean of each row of numbers [K, M] in each bin."""
    count = np.bincount(bins, minlength=n_bins)
    return np.stack([np.bincount(bins, row, minlength=n_bins) for row in numbers]) / count


def _merged(edges: Floats, actions: Ints) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Thresholds and actions with neighbouring ranges of one action made one."""
    changes = np.flatnonzero(np.diff(actions))
    return tuple(edges[changes].tolist()), (int(actions[0]), *actions[changes + 1].tolist())
