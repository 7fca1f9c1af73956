"""Replay: the exact steps that any tree or policy takes on a recorded trace.

A tree accepts the longest prefix of a row's ranks that it contains, so one trace gives the exact
steps of every tree and every policy without a model. The last row of a prompt is a terminal step:
it emits its root and needs no target pass, for every method alike, so plain decoding emits exactly
1.00 tokens a step. Functions return counts and milliseconds, which add up; ratios are formed last.
This module knows no models, no clocks and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entmtp_calib import signals
from entmtp_calib.policy import Policy
from entmtp_calib.signals import SignalSpec
from entmtp_calib.trace import Bools, Floats, Ints, Trace
from entmtp_calib.tree import Tree

NOT_CHOSEN = -1  # the policy was not asked at this row


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


@dataclass(frozen=True, eq=False)
class PolicyWalk:
    """The steps of a policy on a trace.

    Attributes:
        visited: bool [N], rows where a step starts.
        chosen: int64 [N], the tree of the step; -1 where no tree was chosen (terminal, unvisited).
        accepted: int64 [N], accepted draft tokens of the step; 0 where no tree was chosen.
        values: float64 [N], the signal that the policy read last; NaN where it read none.
        levels: int64 [N], levels of the greedy chain drafted for what it read.
    """

    visited: Bools
    chosen: Ints
    accepted: Ints
    values: Floats
    levels: Ints

    def switches(self, trace: Trace) -> int:
        """Steps that used another tree than the step before them in the same text."""
        asked = np.flatnonzero(self.chosen != NOT_CHOSEN)
        same_text = trace.prompt[asked][1:] == trace.prompt[asked][:-1]
        return int((same_text & (np.diff(self.chosen[asked]) != 0)).sum())

    def steps_per_tree(self, n_trees: int) -> Ints:
        """[K], the steps each tree was chosen for."""
        return np.bincount(self.chosen[self.chosen != NOT_CHOSEN], minlength=n_trees)


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


def signal_values(trace: Trace, spec: SignalSpec) -> Floats:
    """[N], the signal at each position; not for the acceptance average, which has a history."""
    return signals.signal_values(spec, trace.base_top1, trace.entropy, trace.chain_probs)


def walk_policy(
    trace: Trace, accepted: Ints, policy: Policy, speculates: Bools | None = None
) -> PolicyWalk:
    """The steps of a policy: its own `choose`, its own state for each text.

    Args:
        accepted: int64 [K, N], accepted draft tokens of each tree at each row.
        speculates: bool [K], which trees have nodes; all of them where not given. Only the
            acceptance average depends on it.
    """
    counts = {index: accepted[index].tolist() for index in policy.indices}
    drafts = [True] * len(accepted) if speculates is None else speculates.tolist()
    reader = _Reader(trace, policy)
    rows: list[int] = []
    steps: list[tuple[int, float, int]] = []
    for row, last in zip(trace.starts.tolist(), (trace.ends - 1).tolist(), strict=True):
        state = policy.start()
        reader.start_text()
        while row < last:
            reader.start_step(row)
            index, state = policy.choose(state, reader)
            rows.append(row)
            steps.append((index, reader.last, reader.levels))
            reader.memory.observe(counts[index][row], drafts[index])
            row += counts[index][row] + 1
    return _policy_walk(trace, accepted, rows, steps)


class _Reader:
    """Gives a policy the recorded signals of one row after the other, and notes what it read."""

    def __init__(self, trace: Trace, policy: Policy) -> None:
        self._values = {
            spec: signal_values(trace, spec).tolist()
            for spec in policy.signals
            if not spec.is_average
        }

    def start_text(self) -> None:
        self.memory = signals.Memory()

    def start_step(self, row: int) -> None:
        self._row, self.last, self.levels = row, np.nan, 0

    def __call__(self, spec: SignalSpec) -> float:
        if spec.is_average:
            self.last = self.memory.average
        else:
            self.last = self.memory.value(spec, self._values[spec][self._row])
            self.levels = max(self.levels, spec.depth)
        return self.last


def _policy_walk(
    trace: Trace, accepted: Ints, rows: list[int], steps: list[tuple[int, float, int]]
) -> PolicyWalk:
    """Spread the steps over all N rows and add the terminal ones, which end what is left over."""
    n_rows = len(trace)
    walked = PolicyWalk(
        visited=np.zeros(n_rows, dtype=np.bool_),
        chosen=np.full(n_rows, NOT_CHOSEN, dtype=np.int64),
        accepted=np.zeros(n_rows, dtype=np.int64),
        values=np.full(n_rows, np.nan),
        levels=np.zeros(n_rows, dtype=np.int64),
    )
    at = np.array(rows, dtype=np.int64)
    chosen, values, levels = zip(*steps, strict=True) if steps else ((), (), ())
    walked.visited[at] = True
    walked.chosen[at] = chosen
    walked.accepted[at] = accepted[walked.chosen[at], at]
    walked.values[at], walked.levels[at] = values, levels
    emitted = np.add.reduceat(walked.visited + walked.accepted, trace.starts)
    walked.visited[trace.ends - 1] |= emitted < trace.lengths
    return walked


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


def prompt_ms(trace: Trace, steps: PolicyWalk, ms: Floats) -> Floats:
    """[P], the time of each text's steps; terminal steps cost nothing.

    Args:
        steps: of a policy on this trace.
        ms: float64 [L + 1, K], see `Costs.policy_ms`.
    """
    asked = steps.chosen != NOT_CHOSEN
    each = np.zeros(len(trace))
    each[asked] = ms[steps.levels[asked], steps.chosen[asked]]
    return np.add.reduceat(each, trace.starts)


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
