"""The closest thing to a tree that numbers can say, found by exact replay under some costs.

Decoding is lossless, so a trace and a cost table say what every chain would do. What SGLang's three
numbers do cannot be replayed when they branch, since it orders nodes by its drafter's confidence in
each step; the nodes of the exported tree that they can hold stand for it. This module knows no
files and no engine's syntax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np

from entmtp_calib.costs import Costs
from entmtp_calib.errors import DataError
from entmtp_calib.formats.chains import AdaptiveRule, Ranges, SglangNumbers
from entmtp_calib.replay import StepCounts, accepted, step_counts, walk
from entmtp_calib.trace import Ints, Trace
from entmtp_calib.tree import EMPTY, Path, Tree, chain


@dataclass(frozen=True)
class Figures:
    """What replay says of a way to decode.

    Attributes:
        counts: of its steps.
        ms: time of its steps.
    """

    counts: StepCounts
    ms: float

    @property
    def mean_emitted(self) -> float:
        """Emitted tokens per step."""
        return self.counts.mean_emitted

    @property
    def step_ms(self) -> float | None:
        """Of a step that has a target pass; None where the costs do not reach it."""
        return self.ms / self.counts.passes if np.isfinite(self.ms) else None

    @property
    def tokens_per_second(self) -> float:
        """Of the steps alone, without the prompt's own pass."""
        return 1000.0 * self.counts.emitted_tokens / self.ms if self.ms else np.inf


@dataclass(frozen=True)
class Fit:
    """SGLang's numbers, the nodes that stand for what it drafts, and the cost of a step."""

    numbers: SglangNumbers
    tree: Tree
    step_ms: float

    def on(self, trace: Trace) -> Figures:
        """What replay says of it."""
        return fixed(trace, self.tree, self.step_ms)


def fixed(trace: Trace, tree: Tree, step_ms: float) -> Figures:
    """What replay says of one tree for all steps."""
    counts = counts_of(tree, trace)
    return Figures(counts, counts.passes * step_ms)


def counts_of(tree: Tree, trace: Trace) -> StepCounts:
    """The counts of the tree's own steps."""
    lengths = accepted(tree, trace.ranks)
    return step_counts(trace, lengths, walk(trace, lengths))


def closest_numbers(tree: Tree, trace: Trace, costs: Costs) -> Fit:
    """The numbers within a tree's depth, ranks and nodes with the most replayed tokens per second.

    Args:
        tree: has nodes.
        trace: of texts to fit on.

    Raises:
        DataError: the costs reach none of them.
    """
    reach = reached_nodes(tree, trace)

    @cache
    def passes(held: Tree) -> int:
        return counts_of(held, trace).passes

    fits = []
    for numbers in _possible(tree):
        step_ms, held = numbers_ms(numbers, costs), held_by(numbers, tree, reach)
        if np.isfinite(step_ms) and held.n_nodes == numbers.draft_tokens - 1:
            fits.append((passes(held) * step_ms, numbers.draft_tokens, Fit(numbers, held, step_ms)))
    if not fits:
        raise _unpriced()
    return min(fits, key=lambda fit: fit[:2])[2]


def numbers_ms(numbers: SglangNumbers, costs: Costs) -> float:
    """ms of a step: all levels but the first are drafted under `topk` nodes."""
    drafted = sum(
        costs.level(depth, numbers.topk if depth > 1 else 1)
        for depth in range(1, numbers.steps + 1)
    )
    return costs.verify(numbers.draft_tokens) + drafted


def held_by(numbers: SglangNumbers, tree: Tree, reach: Mapping[Path, int]) -> Tree:
    """The nodes of a tree that the numbers can draft and verify, the most reached ones first.

    Args:
        reach: how often each node is reached; a child not more often than its parent.
    """
    if numbers.topk == 1:
        return chain(numbers.steps)

    def order(path: Path) -> tuple[int, int, Path]:
        return -reach[path], len(path), path

    parents: set[Path] = {()}
    drafted: list[Path] = []
    for depth in range(1, numbers.steps + 1):
        level = [
            path
            for path in tree.paths
            if len(path) == depth and path[:-1] in parents and path[-1] < numbers.topk
        ]
        drafted += level
        parents = set(sorted(level, key=order)[: numbers.topk])
    return Tree(tuple(sorted(drafted, key=order)[: numbers.draft_tokens - 1]))


def reached_nodes(tree: Tree, trace: Trace) -> dict[Path, int]:
    """How many of the tree's own steps accept each of its nodes."""
    lengths = accepted(tree, trace.ranks)
    visited = walk(trace, lengths)
    reach = dict.fromkeys(tree.paths, 0)
    for depth in range(1, min(tree.depth, trace.max_depth) + 1):
        ranks = trace.ranks[visited & (lengths >= depth), :depth]
        paths, counts = np.unique(ranks, axis=0, return_counts=True)
        reach |= {
            tuple(path): count for path, count in zip(paths.tolist(), counts.tolist(), strict=True)
        }
    return reach


def best_chain(trace: Trace, costs: Costs, depths: Sequence[int]) -> int:
    """The depth of the chain with the most replayed tokens per second.

    Raises:
        DataError: the costs reach none of them.
    """
    total_ms = {
        depth: fixed(trace, chain(depth), float(costs.step_ms([chain(depth)])[0])).ms
        for depth in depths
    }
    best = min(depths, key=lambda depth: (total_ms[depth], depth))
    if not np.isfinite(total_ms[best]):
        raise _unpriced()
    return best


def schedule(trace: Trace, costs: Costs, max_depth: int) -> Ranges:
    """The depth of the best chain for each batch size that the costs reach, 0 for none.

    B texts of equal length are taken to cost what a pass of all their rows together costs, and a
    level's drafting what it costs under B parents.

    Args:
        max_depth: no chain is deeper.

    Raises:
        DataError: the costs reach no chain.
    """
    passes = [counts_of(chain(depth), trace).passes for depth in range(max_depth + 1)]
    depths = [d for d in range(max_depth + 1) if np.isfinite(_batch_ms(costs, 1, d))]
    if depths in ([], [0]):
        raise _unpriced()
    best: list[tuple[int, int]] = []  # (batch size, depth)
    batch = 1
    while all(np.isfinite(_batch_ms(costs, batch, depth)) for depth in depths):
        ms = {depth: passes[depth] * _batch_ms(costs, batch, depth) for depth in depths}
        best.append((batch, min(depths, key=lambda depth: (ms[depth], depth))))
        batch += 1
    ranges = []
    for depth, group in groupby(best, key=lambda entry: entry[1]):
        batches = [batch for batch, _ in group]
        ranges.append((batches[0], batches[-1], depth))
    return ranges


def adaptive(
    trace: Trace, costs: Costs, steps: Sequence[int], first: int, rule: AdaptiveRule
) -> Figures:
    """What SGLang's adaptive mode does at batch size 1, text after text.

    The average begins at one less than the first chain's depth; after the warm-up, at every
    interval, the chain goes down while the average is at most half a token (less the hysteresis)
    below the next smaller one's depth, else up while it is above the like of its own (SGLang,
    `AdaptiveStepSlot`).

    Args:
        steps: depths to choose from, rising.
        first: the one to begin with.
    """
    chains = [chain(depth) for depth in steps]
    step_ms = costs.step_ms(chains)
    table = [accepted(tree, trace.ranks).tolist() for tree in chains]
    at, average, n_passes, ms = steps.index(first), first - 1.0, 0, 0.0
    taken: Ints = np.zeros(len(trace), dtype=np.int64)
    visited = np.zeros(len(trace), dtype=np.bool_)
    for start, end in zip(trace.starts.tolist(), trace.ends.tolist(), strict=True):
        row = start
        while row < end:
            visited[row] = True
            if row == end - 1:  # the last token needs no pass
                break
            taken[row] = table[at][row]
            ms += step_ms[at]
            average += rule.ema_alpha * (table[at][row] - average)
            row += table[at][row] + 1
            n_passes += 1
            due = n_passes - rule.warmup_batches
            if due > 0 and due % rule.update_interval == 0:
                at = _moved(at, average, steps, rule)
    return Figures(step_counts(trace, taken, visited), float(ms))


def _moved(at: int, average: float, steps: Sequence[int], rule: AdaptiveRule) -> int:
    before = at
    while at > 0 and average <= steps[at - 1] - 0.5 + rule.down_hysteresis:
        at -= 1
    while at >= before and at < len(steps) - 1 and average > steps[at] - 0.5 + rule.up_hysteresis:
        at += 1
    return at


def _possible(tree: Tree) -> list[SglangNumbers]:
    """All numbers that are not larger than the tree in any way."""
    return [
        SglangNumbers(steps, topk, draft_tokens)
        for steps in range(1, tree.depth + 1)
        for topk in range(1, tree.max_rank + 2)
        for draft_tokens in range(2, min(steps * topk, tree.n_nodes) + 2)
        if topk > 1 or draft_tokens == steps + 1
    ]


def _batch_ms(costs: Costs, batch: int, depth: int) -> float:
    """ms in which `batch` texts take one step each with a chain."""
    if batch == 1 and depth == 0:
        return float(costs.step_ms([EMPTY])[0])
    drafted = sum(costs.level(level, batch) for level in range(1, depth + 1))
    return costs.verify(batch * (depth + 1)) + drafted


def _unpriced() -> DataError:
    return DataError(
        "the costs reach no chain, not even of one node",
        "timed steps of at least two rows",
        "time again with `entmtp time`",
    )
