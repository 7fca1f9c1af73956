"""Replay: the exact steps that any tree takes on a recorded trace.

A tree accepts the longest prefix of a row's ranks that it contains, so one trace gives the exact
steps of every tree without a model; the steps of policies are in `walks`. The last row of a prompt
is a terminal step: it emits its root and needs no target pass, for every method alike, so plain
decoding emits exactly 1.00 tokens a step. Functions return counts and milliseconds, which add up;
ratios are formed last. This module knows no models, no clocks and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entmtp_calib.trace import Bools, Floats, Ints, Trace
from entmtp_calib.tree import Tree


@dataclass(frozen=True)
class StepCounts:
    """What some steps did, in numbers that add up across prompts.

    Attributes:
        steps: steps taken, the terminal ones included.
        emitted_tokens: roots and accepted drafts.
        accepted_draft_tokens: accepted drafts alone.
        passes: target passes, one per step that is not terminal.
    """

    steps: int
    emitted_tokens: int
    accepted_draft_tokens: int
    passes: int

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.steps + other.steps,
            self.emitted_tokens + other.emitted_tokens,
            self.accepted_draft_tokens + other.accepted_draft_tokens,
            self.passes + other.passes,
        )

    @property
    def mean_emitted(self) -> float:
        """Mean acceptance length: emitted tokens per step, 1.00 for plain decoding."""
        return self.emitted_tokens / self.steps

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per step, 0.00 for plain decoding."""
        return self.accepted_draft_tokens / self.steps


def accepted(tree: Tree, ranks: NDArray[np.integer]) -> Ints:
    """Accepted draft tokens of a tree at each position.

    Args:
        tree: any tree, also one deeper than the heads.
        ranks: [N, D], as in a trace.

    Returns:
        int64 [N], the length of the longest prefix of the ranks that is a path of the tree.
    """
    children = _child_table(tree)
    no_child = children.shape[1] - 1
    row = np.zeros(len(ranks), dtype=np.int64)
    length = np.zeros(len(ranks), dtype=np.int64)
    for level in range(min(tree.depth, ranks.shape[1])):
        row = children[row, np.minimum(ranks[:, level], no_child)]
        length += row >= 0
    return length


def _child_table(tree: Tree) -> Ints:
    """[n_nodes + 2, max_rank + 2]: the child row under each rank, -1 for none.

    The last column stands for larger ranks and, as index -1, for missing ones; the last row, as
    index -1, for no node.
    """
    table = np.full((tree.n_nodes + 2, tree.max_rank + 2), -1, dtype=np.int64)
    for row, (path, parent) in enumerate(zip(tree.paths, tree.parents[1:], strict=True), start=1):
        table[parent, path[-1]] = row
    return table


def walk(trace: Trace, accepted: Ints) -> Bools:
    """The steps of one tree: from each text's first row, t to t + accepted[t] + 1.

    Args:
        accepted: int64 [N], the tree's accepted draft tokens at each row.

    Returns:
        bool [N], rows where a step starts.
    """
    following = (np.arange(len(trace)) + np.minimum(accepted + 1, trace.remaining)).tolist()
    steps = []
    row, n_rows = 0, len(trace)
    while row < n_rows:  # the end of a text is the first row of the next one
        steps.append(row)
        row = following[row]
    visited = np.zeros(n_rows, dtype=np.bool_)
    visited[steps] = True
    return visited


def counts_by_prompt(trace: Trace, accepted: Ints, visited: Bools) -> list[StepCounts]:
    """[P], the counts of each text's steps.

    Args:
        accepted: int64 [N], accepted draft tokens of the step that starts at each row.
        visited: bool [N], rows where a step starts.
    """
    steps = np.add.reduceat(visited.astype(np.int64), trace.starts)
    drafts = np.add.reduceat(np.where(visited, accepted, 0), trace.starts)
    passes = np.add.reduceat((visited & ~trace.terminal).astype(np.int64), trace.starts)
    return [
        StepCounts(step, step + draft, draft, target_pass)
        for step, draft, target_pass in zip(
            steps.tolist(), drafts.tolist(), passes.tolist(), strict=True
        )
    ]


def step_counts(trace: Trace, accepted: Ints, visited: Bools) -> StepCounts:
    """The counts of all steps."""
    return sum(counts_by_prompt(trace, accepted, visited), StepCounts(0, 0, 0, 0))


def reached(accepted: Ints, visited: Bools, depth: int) -> Ints:
    """[depth + 1], how many steps accepted at least 0, 1, ..., `depth` draft tokens."""
    exactly = np.bincount(accepted[visited], minlength=depth + 1)
    return np.cumsum(exactly[::-1])[::-1][: depth + 1]


def oracle_ms(trace: Trace, accepted: Ints, step_ms: Floats) -> Floats:
    """[P], the least time in which any scheduler could emit each text, by dynamic programming.

    Args:
        accepted: int64 [K, N], accepted draft tokens of each tree at each row.
        step_ms: float64 [K], cost of a step with each tree.
    """
    n_rows = len(trace)
    cheapest = _cheapest(accepted, step_ms)
    cheapest[trace.terminal] = np.inf
    cheapest[trace.terminal, 0] = 0.0
    rest = [0.0] * (n_rows + cheapest.shape[1])  # ms from each row to the end of the trace
    for row, costs in zip(range(n_rows - 1, -1, -1), reversed(cheapest.tolist()), strict=True):
        rest[row] = min(
            cost + after
            for cost, after in zip(costs, rest[row + 1 : row + 1 + len(costs)], strict=True)
        )
    from_start = np.array(rest)[np.append(trace.starts, n_rows)]
    return np.asarray(from_start[:-1] - from_start[1:])


def _cheapest(accepted: Ints, step_ms: Floats) -> Floats:
    """[N, D + 1], cost of the cheapest tree that accepts exactly d at each row; inf for none."""
    n_rows = accepted.shape[1]
    cheapest = np.full((n_rows, int(accepted.max(initial=0)) + 1), np.inf)
    for counts, cost in zip(accepted, step_ms, strict=True):
        at = np.arange(n_rows), counts
        cheapest[at] = np.minimum(cheapest[at], cost)
    return cheapest
