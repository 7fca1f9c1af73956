"""Fitting: the trees and thresholds of a policy that replay fastest on a trace.

Every policy emits the same tokens, so the least replayed time is the most tokens per second. A
search over thresholds always finds some gain, if only in noise; so a fit is kept only where it also
beats the best fixed tree on texts it was not fitted on. Otherwise the policy that comes back *is*
that fixed tree and needs no signal. This module knows no models, no clocks (costs are given) and no
trees' paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement

import numpy as np

from entmtp_calib.errors import DataError
from entmtp_calib.policy import Hysteresis, Ladder, Policy, Static
from entmtp_calib.replay import NOT_CHOSEN, PolicyWalk, prompt_ms, walk_policy
from entmtp_calib.signals import SignalSpec
from entmtp_calib.trace import Bools, Floats, Ints, Trace

LADDER_BINS = 16  # signal quantiles that a ladder may put thresholds between
LADDER_ROUNDS = 8  # iterations of the rate that tree costs are weighed by
HYSTERESIS_LEVELS = 7  # signal quantiles that a pair's thresholds are taken from
HYSTERESIS_PAIRS = 3  # pairs of trees that are worth the whole grid of thresholds
MIN_ERRORS = 2.0  # standard errors below which a gain on unseen texts is a tie


@dataclass(frozen=True)
class Fit:
    """A fitted policy and what replay says of it.

    Attributes:
        policy: the policy; the best fixed tree in its dress where no gain was confirmed.
        tokens_per_second: of the policy on the trace it was fitted on.
        static_tokens_per_second: of the best fixed tree there.
        held_out_gain: relative gain over that tree where each half of the texts was decoded with
            the fit of the other half; 0 for a static policy.
    """

    policy: Policy
    tokens_per_second: float
    static_tokens_per_second: float
    held_out_gain: float = 0.0


def fit_static(trace: Trace, accepted: Ints, step_ms: Floats) -> Fit:
    """The fixed tree with the most tokens per second on the trace; the first one on a tie.

    Args:
        accepted: int64 [K, N], accepted draft tokens of each tree at each row, smallest tree first.
        step_ms: float64 [K], cost of a step with each tree.
    """
    task = _Task.of(trace, accepted, step_ms)
    speed = task.tokens_per_second(Static(task.best_static))
    return Fit(Static(task.best_static), speed, speed)


def fit_ladder(
    trace: Trace,
    accepted: Ints,
    step_ms: Floats,
    signal: SignalSpec,
    signal_ms: Floats | float = 0.0,
    speculates: Bools | None = None,
) -> Fit:
    """A ladder over all trees: in each signal bin the tree that is worth its time, never falling.

    Args:
        accepted: int64 [K, N], accepted draft tokens of each tree at each row, smallest tree first.
        step_ms: float64 [K], cost of a step with each tree and no signal.
        signal_ms: float64 [K] or one for all, what having the signal adds to a step of each tree
            (a chain's levels that the tree reuses add nothing).
        speculates: bool [K], which trees have nodes; for the acceptance average only.
    """
    task = _Task.of(trace, accepted, step_ms, signal, signal_ms, speculates)
    return _fit(task, _search_ladder, lambda index: Ladder(None, (), (index,)))


def fit_hysteresis(
    trace: Trace,
    accepted: Ints,
    step_ms: Floats,
    signal: SignalSpec,
    signal_ms: Floats | float = 0.0,
    speculates: Bools | None = None,
) -> Fit:
    """The best two trees and thresholds by replay over a grid; arguments as for `fit_ladder`."""
    task = _Task.of(trace, accepted, step_ms, signal, signal_ms, speculates)
    return _fit(task, _search_hysteresis, lambda index: Hysteresis(None, index, index))


@dataclass(frozen=True, eq=False)
class _Task:
    """What a fit is given: texts, trees and the price of each choice."""

    trace: Trace
    accepted: Ints  # [K, N]
    step_ms: Floats  # [K]
    signal: SignalSpec | None
    signal_ms: Floats  # [K]
    speculates: Bools | None

    @classmethod
    def of(
        cls,
        trace: Trace,
        accepted: Ints,
        step_ms: Floats,
        signal: SignalSpec | None = None,
        signal_ms: Floats | float = 0.0,
        speculates: Bools | None = None,
    ) -> _Task:
        if trace.terminal.all():
            raise DataError("no text of two or more tokens", action="generate longer texts")
        costs = np.asarray(step_ms, dtype=np.float64)
        extra = np.broadcast_to(np.asarray(signal_ms, dtype=np.float64), costs.shape)
        return cls(trace, np.asarray(accepted), costs, signal, extra, speculates)

    @property
    def n_trees(self) -> int:
        return len(self.step_ms)

    @cached_property
    def best_static(self) -> int:
        totals = [self.ms(Static(index)).sum() for index in range(self.n_trees)]
        return int(np.argmin(totals))

    def costs(self, policy: Policy) -> Floats:
        """[K], ms of a step with each tree under a policy, which may need its signal."""
        return self.step_ms if policy.signal is None else self.step_ms + self.signal_ms

    def walk(self, policy: Policy) -> PolicyWalk:
        return walk_policy(self.trace, self.accepted, policy, self.speculates)

    def ms(self, policy: Policy) -> Floats:
        """[P], replayed time of each text."""
        return prompt_ms(self.trace, self.walk(policy).chosen, self.costs(policy))

    def tokens_per_second(self, policy: Policy) -> float:
        return 1000.0 * len(self.trace) / float(self.ms(policy).sum())

    def part(self, prompts: Sequence[int]) -> _Task:
        """The same task on some of the texts."""
        rows = self.trace.rows_of(prompts)
        return replace(self, trace=self.trace.select(prompts), accepted=self.accepted[:, rows])


def _fit(task: _Task, search: Callable[[_Task], Policy], fixed: Callable[[int], Policy]) -> Fit:
    """What the search finds, if it gains here and on texts it has not seen; else the fixed tree."""
    static = Static(task.best_static)
    static_speed = task.tokens_per_second(static)
    gain, is_confirmed = _held_out(task, search)
    if is_confirmed:
        found = search(task)
        speed = task.tokens_per_second(found)
        if speed > static_speed:
            return Fit(found, speed, static_speed, gain)
    return Fit(fixed(static.index), static_speed, static_speed)


def _held_out(task: _Task, search: Callable[[_Task], Policy]) -> tuple[float, bool]:
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


def _search_ladder(task: _Task) -> Policy:
    """From every fixed tree: choose per signal bin, replay, weigh again by the rate achieved."""
    best: Policy = Ladder(task.signal, (), (task.best_static,))
    best_ms = task.ms(best).sum()
    for index in range(task.n_trees):
        policy = Ladder(task.signal, (), (index,))
        for _ in range(LADDER_ROUNDS):
            steps = task.walk(policy)
            total_ms = prompt_ms(task.trace, steps.chosen, task.costs(policy)).sum()
            if total_ms < best_ms:
                best, best_ms = policy, total_ms
            improved = _improved_ladder(task, steps, total_ms)
            if improved == policy:
                break
            policy = improved
    return best


def _improved_ladder(task: _Task, steps: PolicyWalk, total_ms: float) -> Ladder:
    """The ladder that is worth the most tokens when a millisecond is worth what `steps` got."""
    rows = np.flatnonzero(steps.chosen != NOT_CHOSEN)
    emitted = task.accepted[:, rows] + 1
    edges = _quantiles(steps.values[rows], LADDER_BINS - 1)
    bins = np.searchsorted(edges, steps.values[rows], side="left")  # as `Ladder.choose` does
    count = np.bincount(bins, minlength=len(edges) + 1)
    tokens = np.stack([np.bincount(bins, tree, minlength=len(count)) for tree in emitted])
    rate = (steps.accepted[rows] + 1).sum() / total_ms
    costs = task.step_ms + task.signal_ms
    indices = _best_rising(tokens.T - rate * count[:, None] * costs)
    changes = np.flatnonzero(np.diff(indices))
    return Ladder(
        task.signal,
        tuple(edges[changes].tolist()),
        (int(indices[0]), *indices[changes + 1].tolist()),
    )


def _best_rising(worth: Floats) -> Ints:
    """[B], the never falling column per row of worth [B, K] with the greatest sum."""
    n_rows, n_columns = worth.shape
    sums = np.zeros(n_columns)
    came_from = np.zeros((n_rows, n_columns), dtype=np.int64)
    for row in range(n_rows):
        for column in range(n_columns):
            came_from[row, column] = np.argmax(sums[: column + 1])
        sums = sums[came_from[row]] + worth[row]
    chosen = np.zeros(n_rows, dtype=np.int64)
    column = int(np.argmax(sums))
    for row in range(n_rows - 1, -1, -1):
        chosen[row] = column
        column = came_from[row, column]
    return chosen


def _search_hysteresis(task: _Task) -> Policy:
    """Every pair of trees with one threshold; then the best pairs with every two thresholds."""
    single = Hysteresis(task.signal, task.best_static, task.best_static)
    levels = [_levels(task, index) for index in range(task.n_trees)]

    def cheapest(policies: Iterable[Hysteresis]) -> tuple[float, Hysteresis]:
        timed = ((float(task.ms(policy).sum()), policy) for policy in policies)
        return min(timed, key=lambda entry: entry[0])

    pairs = [
        cheapest(Hysteresis(task.signal, small, large, level, level) for level in levels[large])
        for small, large in combinations(range(task.n_trees), 2)
    ]
    promising = sorted(pairs, key=lambda entry: entry[0])[:HYSTERESIS_PAIRS]
    full = [
        replace(policy, tau_on=on, tau_off=off)
        for _, policy in promising
        for off, on in combinations_with_replacement(levels[policy.large], 2)
    ]
    return cheapest([single, *full])[1]


def _levels(task: _Task, index: int) -> list[float]:
    """Quantiles of the signal on the steps of one fixed tree."""
    steps = task.walk(Ladder(task.signal, (), (index,)))
    values = steps.values[steps.chosen != NOT_CHOSEN]
    return [float(level) for level in _quantiles(values, HYSTERESIS_LEVELS)]


def _quantiles(values: Floats, n_quantiles: int) -> Floats:
    """At most n inner quantiles, strictly rising."""
    return np.unique(np.quantile(values, np.linspace(0, 1, n_quantiles + 2)[1:-1]))
