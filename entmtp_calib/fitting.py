"""Fitting: the trees and thresholds of a policy that replay fastest on a trace.

Every policy emits the same tokens, so the least replayed time is the most tokens per second. A
search over thresholds always finds some gain, if only in noise; so a fit is kept only where it also
beats the best fixed tree on texts it was not fitted on. Otherwise the policy that comes back *is*
that fixed tree and needs no signal. What the same search finds on the very texts it is scored on is
an upper bound of what any function of its signal could do. This module knows no models and no
clocks: costs are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, combinations_with_replacement

import numpy as np

from entmtp_calib.policy import Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.staging import cuts, induced, useful
from entmtp_calib.task import Task
from entmtp_calib.trace import Floats, Ints
from entmtp_calib.walks import NOT_CHOSEN, PolicyWalk

LADDER_BINS = 16  # signal quantiles that a ladder may put thresholds between
ROUNDS = 8  # iterations of the rate that tree costs are weighed by
HYSTERESIS_LEVELS = 7  # signal quantiles that a pair's thresholds are taken from
HYSTERESIS_PAIRS = 3  # pairs of trees that are worth the whole grid of thresholds
WORTHWHILE = 0.003  # relative gain below which one level less is the better policy
MIN_ERRORS = 2.0  # standard errors below which a gain on unseen texts is a tie


@dataclass(frozen=True)
class Fit:
    """A fitted policy and what replay says of it.

    Attributes:
        policy: the policy; the best fixed tree in its dress where no gain was confirmed.
        tokens_per_second: of the policy on the trace it was fitted on.
        static_tokens_per_second: of the best fixed tree there.
        held_out_gain: relative gain over that tree where each half of the texts was decoded with
            the fit of the other half, confirmed or not; 0 for a static policy.
    """

    policy: Policy
    tokens_per_second: float
    static_tokens_per_second: float
    held_out_gain: float = 0.0

    @property
    def is_static(self) -> bool:
        """Whether it is a fixed tree, under whatever name."""
        return len(self.policy.indices) == 1


Search = Callable[[Task], Policy]


def fit_static(task: Task) -> Fit:
    """The fixed tree with the most tokens per second on the trace; the first one on a tie."""
    policy = Static(task.best_static)
    speed = task.tokens_per_second(policy)
    return Fit(policy, speed, speed)


def fit_ladder(task: Task, signal: SignalSpec) -> Fit:
    """A ladder: in each range of the signal the tree that is worth its time, never falling."""
    return _fit(task, partial(search_ladder, signal=signal), lambda k: Ladder(None, (), (k,)))


def fit_hysteresis(task: Task, signal: SignalSpec) -> Fit:
    """The best two trees and thresholds by replay over a grid, the effect of staying included."""
    return _fit(task, partial(search_hysteresis, signal=signal), lambda k: Hysteresis(None, k, k))


def fit_staged(task: Task) -> Fit:
    """Stop or draft on at every level, by backward induction."""
    return _fit(task, search_staged, _fixed_staged)


def shortlist(task: Task) -> list[int]:
    """The trees worth a scheduler's while: the best in some range of some level's chain value.

    The empty tree and the best fixed one are always among them.
    """
    static = task.best_static
    rate = len(task.trace) / task.ms(Static(static)).sum()
    found = useful(task, _rows(task, static), rate)
    empty = [k for k, tree in enumerate(task.trees) if not tree.n_nodes]
    return sorted({static, *empty, *found})


def _fit(task: Task, search: Search, fixed: Callable[[int], Policy]) -> Fit:
    """What the search finds, if it gains here and on texts it has not seen; else the fixed tree."""
    static = Static(task.best_static)
    static_speed = task.tokens_per_second(static)
    gain, is_confirmed = _held_out(task, search)
    if is_confirmed:
        found = search(task)
        speed = task.tokens_per_second(found)
        if speed > static_speed:
            return Fit(found, speed, static_speed, gain)
    return Fit(fixed(static.index), static_speed, static_speed, gain)


def _held_out(task: Task, search: Search) -> tuple[float, bool]:
    """Relative gain over the fixed tree on texts not fitted on, and whether it is one.

    Each half of the texts is replayed with the policy found on the other half. Both must gain, and
    the gain per text must stand out from its own spread.
    """
    halves = [list(range(parity, task.trace.n_prompts, 2)) for parity in (0, 1)]
    parts = [task.part(half) for half in halves if half]
    if len(parts) < 2 or any(part.trace.terminal.all() for part in parts):
        return 0.0, False
    static_ms = [part.ms(Static(task.best_static)) for part in parts]
    policy_ms = [part.ms(search(other)) for part, other in zip(parts, reversed(parts), strict=True)]
    saved = [before - after for before, after in zip(static_ms, policy_ms, strict=True)]
    each = np.concatenate(saved)
    error = each.std(ddof=1) / np.sqrt(len(each))
    is_confirmed = all(half.sum() > 0 for half in saved) and each.mean() > MIN_ERRORS * error
    return float(each.sum() / np.concatenate(policy_ms).sum()), bool(is_confirmed)


def search_ladder(task: Task, signal: SignalSpec) -> Policy:
    """From every fixed tree: choose per signal bin, replay, weigh again by the rate achieved."""
    best: Policy = Ladder(None, (), (task.best_static,))
    best_ms = task.ms(Static(task.best_static)).sum()
    costs = task.costs.ahead_ms(task.trees, signal.depth)[-1]

    @cache  # ways from different trees soon meet
    def tried(policy: Ladder) -> tuple[float, Ladder]:
        steps = task.walk(policy)
        total_ms = float(task.steps_ms(policy, steps).sum())
        if not np.isfinite(total_ms):  # levels of so many parents were never timed
            return total_ms, policy
        return total_ms, _improved_ladder(task, signal, steps, total_ms, costs)

    for index in range(len(task.trees)):
        policy = Ladder(signal, (), (index,))
        for _ in range(ROUNDS):
            total_ms, improved = tried(policy)
            if total_ms < best_ms:
                best, best_ms = policy, total_ms
            if improved == policy:
                break
            policy = improved
    return best


def _improved_ladder(
    task: Task, signal: SignalSpec, steps: PolicyWalk, total_ms: float, costs: Floats
) -> Ladder:
    """The ladder that is worth the most tokens when a millisecond is worth what `steps` got."""
    rows = np.flatnonzero(steps.chosen != NOT_CHOSEN)
    emitted = task.accepted[:, rows] + 1
    edges = cuts(steps.values[rows], LADDER_BINS - 1)
    bins = np.searchsorted(edges, steps.values[rows], side="left")  # as `Ladder.choose` does
    count = np.bincount(bins, minlength=len(edges) + 1)
    tokens = np.stack([np.bincount(bins, tree, minlength=len(count)) for tree in emitted])
    rate = (steps.accepted[rows] + 1).sum() / total_ms
    indices = _best_rising(tokens.T - rate * count[:, None] * costs)
    changes = np.flatnonzero(np.diff(indices))
    return Ladder(
        signal,
        tuple(edges[changes].tolist()),
        (int(indices[0]), *indices[changes + 1].tolist()),
    )


def _best_rising(worth: Floats) -> Ints:
    """[B], the never falling column per row of worth [B, K] with the greatest sum."""
    n_rows, n_columns = worth.shape
    sums = np.zeros(n_columns)
    came_from = np.zeros((n_rows, n_columns), dtype=np.int64)
    for row in range(n_rows):
        greatest = np.maximum.accumulate(sums)
        is_greater = np.append(True, greatest[1:] > greatest[:-1])  # than all before it
        came_from[row] = np.maximum.accumulate(np.where(is_greater, np.arange(n_columns), 0))
        sums = greatest + worth[row]
    chosen = np.zeros(n_rows, dtype=np.int64)
    column = int(np.argmax(sums))
    for row in range(n_rows - 1, -1, -1):
        chosen[row] = column
        column = came_from[row, column]
    return chosen


def search_hysteresis(task: Task, signal: SignalSpec) -> Policy:
    """Every pair of trees with one threshold; then the best pairs with every two thresholds."""
    single = Hysteresis(None, task.best_static, task.best_static)
    levels = [_levels(task, signal, index) for index in range(len(task.trees))]

    @cache  # the grid of two thresholds has the single ones in it
    def total_ms(policy: Hysteresis) -> float:
        return float(task.ms(policy).sum())

    def cheapest(policies: Iterable[Hysteresis]) -> tuple[float, Hysteresis]:
        return min(((total_ms(policy), policy) for policy in policies), key=lambda entry: entry[0])

    pairs = [
        cheapest(Hysteresis(signal, small, large, level, level) for level in levels[large])
        for small, large in combinations(range(len(task.trees)), 2)
        if levels[large]
    ]
    promising = sorted(pairs, key=lambda entry: entry[0])[:HYSTERESIS_PAIRS]
    full = [
        replace(policy, tau_on=on, tau_off=off)
        for _, policy in promising
        for off, on in combinations_with_replacement(levels[policy.large], 2)
    ]
    return cheapest([single, *full])[1]


def _levels(task: Task, signal: SignalSpec, index: int) -> list[float]:
    """Quantiles of the signal on the steps of one fixed tree."""
    steps = task.walk(Ladder(signal, (), (index,)))
    values = steps.values[steps.chosen != NOT_CHOSEN]
    return [float(level) for level in cuts(values, HYSTERESIS_LEVELS)]


def search_staged(task: Task) -> Policy:
    """For every number of levels: induce and replay, then leave out trees while that gains.

    A deeper look must be worth `WORTHWHILE` more than a shallower one.
    """
    tried = cache(partial(_tried, task))  # all ways start from the same tree
    best = _fixed_staged(task.best_static)
    best_ms, _ = tried(best)
    for seen in range(1, max(tree.depth for tree in task.trees) + 1):
        ms, policy = _settled(task, tried, range(len(task.trees)), seen)
        while True:
            options = [[k for k in policy.indices if k != out] for out in policy.indices]
            found = [_settled(task, tried, option, seen) for option in options if option]
            less_ms, less = min(found, key=lambda entry: entry[0], default=(np.inf, policy))
            if less_ms >= ms:
                break
            ms, policy = less_ms, less
        if ms * (1 + WORTHWHILE) < best_ms:
            best_ms, best = ms, policy
    return best


def _tried(task: Task, policy: Staged) -> tuple[float, Ints]:
    """Replayed time, and the rows where steps start that are not terminal."""
    steps = task.walk(policy)
    return float(task.steps_ms(policy, steps).sum()), np.flatnonzero(steps.chosen != NOT_CHOSEN)


def _settled(
    task: Task, tried: Callable[[Staged], tuple[float, Ints]], among: Sequence[int], seen: int
) -> tuple[float, Staged]:
    """The best of the policies that induction goes through from the best fixed tree on."""
    policy, entries = _fixed_staged(task.best_static), []
    for _ in range(ROUNDS):
        ms, rows = tried(policy)
        entries.append((ms, policy))
        improved = induced(task, rows, len(task.trace) / ms, among, seen)
        if improved == policy:
            break
        policy, among = improved, improved.indices
    return min(entries, key=lambda entry: entry[0])


def _fixed_staged(index: int) -> Staged:
    return Staged(((),), ((index,),))


def _rows(task: Task, index: int) -> Ints:
    """Rows where one fixed tree's steps start that are not terminal."""
    return np.flatnonzero(task.walk(Static(index)).chosen != NOT_CHOSEN)
