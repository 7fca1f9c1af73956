"""Fits find a planted gain and never invent one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, random_trace, shuffled, telling_trace, trace_of

from entmtp_calib.costs import Costs
from entmtp_calib.errors import DataError
from entmtp_calib.fitting import (
    WORTHWHILE,
    Fit,
    fit_hysteresis,
    fit_ladder,
    fit_staged,
    fit_static,
    search_hysteresis,
    search_ladder,
    search_staged,
    shortlist,
)
from entmtp_calib.policy import Ladder, Policy, Staged, Static
from entmtp_calib.replay import oracle_ms
from entmtp_calib.signals import SignalSpec
from entmtp_calib.task import Task
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain

SEEDS = st.integers(0, 10**6)
TOP1 = SignalSpec("base_top1")
TREES = [EMPTY, chain(1), chain(3)]
COSTS = linear_costs(10, 4)  # 10, 14 and 22 ms a step
BRANCHED = Tree.of([(0,), (1,), (0, 0)])

FitTo = Callable[[Task, SignalSpec], Fit]
FITS: list[FitTo] = [fit_ladder, fit_hysteresis]


def told_by(easy: list[np.ndarray], signal: list[np.ndarray], costs: Costs = COSTS) -> Task:
    """Texts of easy positions (the chain is right up to the next hard token) and hard ones.

    The top-1 probability and the chain's are 0.9 where the signal says easy, 0.1 where it says
    hard.
    """
    texts = []
    for mask in easy:
        ahead = np.append(mask, [False] * 3)
        rows = [
            [all(ahead[row : row + depth + 2]) for depth in range(3)] for row in range(len(mask))
        ]
        texts.append(np.where(rows, 0, -1).tolist())
    base = np.where(np.concatenate(signal), 0.9, 0.1)
    trace = trace_of(texts, base.tolist(), base[:, None] * np.ones((1, 3)))
    return Task.of(trace, TREES, costs)


def easy_and_hard(
    n_texts: int = 12, length: int = 61, seed: int = 0, told: float = 1.0, costs: Costs = COSTS
) -> Task:
    """Random runs of both; with probability 1 - `told` the signal is drawn without looking."""
    random = np.random.default_rng(seed)
    easy, signal = [], []
    for _ in range(n_texts):
        runs = np.repeat(random.random(length) < 0.5, random.integers(4, 12, length))
        easy.append(runs[:length])
        is_told = random.random(length) < told
        signal.append(np.where(is_told, easy[-1], random.random(length) < 0.5))
    return told_by(easy, signal, costs)


def total_ms(task: Task, policy: Policy) -> float:
    return float(task.ms(policy).sum())


def test_a_tasks_time_is_the_replayed_one() -> None:
    trace = trace_of([[[0], [0], [0], [-1]], [[1], [0], [-1]]])
    task = Task.of(trace, [EMPTY, chain(1)], linear_costs(10, 4, 0.5))
    assert task.accepted.tolist() == [[0] * 7, [1, 1, 1, 0, 0, 1, 0]]
    assert task.step_ms.tolist() == [10.0, 14.5]
    # The last token of a text takes no pass: 3 and 2 plain steps; 2 and 2 with the chain.
    assert task.ms(Static(0)).tolist() == [30.0, 20.0]
    assert task.ms(Static(1)).tolist() == [29.0, 29.0]
    assert task.tokens_per_second(Static(0)) == pytest.approx(1000 * 7 / 50)
    assert task.best_static == 0


def test_parts_of_a_task_add_up_and_keep_its_trees() -> None:
    task = easy_and_hard(n_texts=5)
    policy = Ladder(TOP1, (0.5,), (0, 2))
    whole = task.ms(policy)
    assert task.part([3, 1]).ms(policy).tolist() == whole[[3, 1]].tolist()
    fewer = task.among([0, 2])
    assert fewer.trees == (EMPTY, chain(3))
    assert fewer.ms(Ladder(TOP1, (0.5,), (0, 1))).tolist() == whole.tolist()
    assert fewer.step_ms.tolist() == task.step_ms[[0, 2]].tolist()


def test_the_static_fit_is_the_fastest_tree() -> None:
    task = easy_and_hard()
    times = [total_ms(task, Static(index)) for index in range(3)]
    fit = fit_static(task)
    assert fit.policy == Static(int(np.argmin(times)))
    assert fit.tokens_per_second == pytest.approx(1000 * len(task.trace) / min(times))
    assert fit.is_static


def test_a_static_tie_goes_to_the_smaller_tree() -> None:
    trace = trace_of([[[-1]] * 5])
    assert fit_static(Task.of(trace, [chain(1), BRANCHED], linear_costs(9, 0))).policy == Static(0)


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_signal_that_tells_is_found_and_its_speed_is_the_replayed_one(fit_policy: FitTo) -> None:
    task = easy_and_hard()
    fit = fit_policy(task, TOP1)
    assert fit.policy.signals == (TOP1,)
    assert not fit.is_static
    assert fit.tokens_per_second == pytest.approx(task.tokens_per_second(fit.policy))
    assert fit.tokens_per_second > 1.05 * fit.static_tokens_per_second
    assert fit.held_out_gain > 0.05
    best = 1000 * len(task.trace) / oracle_ms(task.trace, task.accepted, task.step_ms).sum()
    assert fit.static_tokens_per_second < fit.tokens_per_second <= best
    assert set(fit.policy.indices) == {0, 2}


@pytest.mark.parametrize("fit_policy", FITS)
@pytest.mark.parametrize("seed", [0, 6, 13, 16, 21])
def test_a_signal_of_pure_noise_leaves_the_static_tree(fit_policy: FitTo, seed: int) -> None:
    task = easy_and_hard(seed=seed, told=0.0)
    fit = fit_policy(task, TOP1)
    assert fit.is_static
    assert fit.policy.signals == ()
    assert fit.policy.indices == fit_static(task).policy.indices
    assert fit.tokens_per_second == fit.static_tokens_per_second


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_signal_whose_levels_cost_more_than_it_brings_is_not_used(fit_policy: FitTo) -> None:
    """The empty tree pays for a level too; at 6 ms that is more than all the signal saves."""
    signal = SignalSpec("chain_value", 1)
    cheap = easy_and_hard(costs=linear_costs(10, 4, 0.5))
    assert fit_policy(cheap, signal).policy.signals == (signal,)
    dear = easy_and_hard(costs=linear_costs(10, 4, 6.0))
    assert fit_policy(dear, signal).is_static


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_gain_on_half_of_the_texts_only_is_not_believed(fit_policy: FitTo) -> None:
    task = easy_and_hard()
    signal = task.trace.base_top1.copy()
    odd = task.trace.prompt % 2 == 1
    signal[odd] = 1.0 - signal[odd]  # in every second text the signal points the wrong way
    contrary = replace(task, trace=replace(task.trace, base_top1=signal))
    assert fit_policy(contrary, TOP1).is_static


@pytest.mark.parametrize("fit_policy", FITS)
def test_each_half_of_the_texts_must_gain_from_the_other(fit_policy: FitTo) -> None:
    # Twelve hard tokens in every second text, one in the others: too rare there to be learned
    # from, so one half gains nothing while the other gains in every text.
    easy = [~np.isin(np.arange(120), range(40, 41 if odd else 52)) for odd in [False, True] * 6]
    assert fit_policy(told_by(easy, easy), TOP1).is_static


def test_one_text_is_too_little_to_believe_a_gain() -> None:
    task = easy_and_hard(n_texts=1)
    for fit in (fit_ladder(task, TOP1), fit_hysteresis(task, TOP1), fit_staged(task)):
        assert fit.is_static
        assert fit.held_out_gain == 0.0


def test_one_tree_alone_is_a_static_policy() -> None:
    task = easy_and_hard().among([0])
    for fit in (fit_ladder(task, TOP1), fit_hysteresis(task, TOP1), fit_staged(task)):
        assert fit.policy.indices == (0,)
        assert fit.policy.signals == ()


@pytest.mark.parametrize("fit_policy", FITS)
def test_past_acceptance_tells_where_easy_and_hard_stretches_are_long(fit_policy: FitTo) -> None:
    random = np.random.default_rng(1)
    texts = []
    for _ in range(12):
        easy = np.repeat(random.random(4) < 0.5, 60)
        easy[-3:] = False
        rows = np.where(easy[:, None], 0, -1) * np.ones((1, 3), dtype=int)
        texts.append(rows.tolist())
    task = Task.of(trace_of(texts), TREES, COSTS)
    fit = fit_policy(task, SignalSpec("acceptance_average"))
    assert not fit.is_static
    assert fit.tokens_per_second > fit.static_tokens_per_second


def test_a_running_signal_gains_where_single_values_are_noisy() -> None:
    """Long easy and hard stretches that each position tells only a little of."""
    random = np.random.default_rng(3)
    easy = [np.repeat(random.random(6) < 0.5, 40) for _ in range(12)]
    told = [np.where(random.random(240) < 0.3, mask, random.random(240) < 0.5) for mask in easy]
    task = told_by(easy, told)
    now, running = (fit_ladder(task, SignalSpec("base_top1", running=r)) for r in (False, True))
    assert not running.is_static
    assert running.tokens_per_second > 1.02 * now.tokens_per_second


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("spec", "level_ms"), [(TOP1, 0.0), (SignalSpec("chain_value", 1), 3.0)], ids=str
)
def test_a_ladder_reaches_the_bound_of_its_signal_where_all_thresholds_are_known(
    seed: int, spec: SignalSpec, level_ms: float
) -> None:
    """The signal has three values, so that every function of it can be tried.

    A level that was drafted to decide is paid for, whatever is decided, so it speaks for no tree.
    """
    random = np.random.default_rng(seed)
    levels = random.choice([0.1, 0.5, 0.9], 1200, p=[0.3, 0.4, 0.3])
    chance = np.select([levels == 0.1, levels == 0.5], [0.05, 0.36], 0.97)
    right = np.logical_and.accumulate(random.random((1200, 3)) < chance[:, None], axis=1)
    ranks = np.where(right, 0, -1).reshape(12, 100, 3)
    for depth in range(3):
        ranks[:, 99 - depth :, depth] = -1
    trees = [EMPTY, chain(1), BRANCHED, chain(3)]
    trace = trace_of(ranks.tolist(), levels.tolist(), levels[:, None] * np.ones((1, 3)))
    task = Task.of(trace, trees, linear_costs(10, 2.5, level_ms))
    ladders = [
        Ladder(spec, (0.3, 0.7), indices) for indices in itertools.product(range(4), repeat=3)
    ]
    bound = min(total_ms(task, policy) for policy in ladders)
    found = search_ladder(task, spec)
    assert total_ms(task, found) == pytest.approx(bound)
    assert fit_ladder(task, spec).policy == found
    assert len(found.indices) == 3
    # Hysteresis has two trees, and a memory, which here tells nothing; one threshold is its best.
    pairs = [
        Ladder(spec, (level,), pair)
        for level in (0.3, 0.7)
        for pair in itertools.combinations(range(4), 2)
    ]
    assert total_ms(task, search_hysteresis(task, spec)) <= min(
        total_ms(task, policy) for policy in pairs
    ) * (1 + 1e-12)


def test_a_ladder_is_as_good_as_the_best_single_threshold() -> None:
    trace = telling_trace(2, n_texts=12, length=100)
    spec = SignalSpec("chain_value", 1)
    task = Task.of(trace, [EMPTY, chain(1), BRANCHED, chain(3)], linear_costs(10, 2, 0.2))
    single = min(
        total_ms(task, Ladder(spec, (level,), pair))
        for pair in itertools.combinations(range(4), 2)
        for level in np.linspace(0.1, 0.9, 9)
    )
    fit = fit_ladder(task, spec)
    assert list(fit.policy.indices) == sorted(set(fit.policy.indices))
    assert total_ms(task, fit.policy) <= 1.01 * single


def staged_costs(*level_ms: float) -> Costs:
    return Costs(((1, 10.0), (4, 22.0)), tuple(((1, ms), (9, ms)) for ms in level_ms))


@pytest.mark.parametrize("deepest", [1, 2, 3])
def test_staged_drafts_on_exactly_where_that_pays(deepest: int) -> None:
    """The chain tells exactly; levels below `deepest` cost more than their tokens save."""
    trace = telling_trace(deepest, n_texts=10, exactly=True)
    price = staged_costs(*[0.5 if depth <= deepest else 60.0 for depth in (1, 2, 3)])
    task = Task.of(trace, [EMPTY, chain(1), chain(2), chain(3)], price)
    fit = fit_staged(task)
    steps = task.walk(fit.policy)
    asked = steps.chosen != -1
    right = np.minimum(task.accepted[3][asked], deepest)
    assert steps.chosen[asked].tolist() == right.tolist()
    assert steps.levels[asked].tolist() == np.minimum(right + 1, deepest).tolist()
    assert fit.held_out_gain > 0.05


def test_a_deeper_look_must_be_worth_more_than_its_trouble() -> None:
    """The third level saves the last row, a twentieth of a ms, in every fourth step."""
    trees = [EMPTY, chain(1), chain(2), chain(3)]
    levels = staged_costs(0.5, 0.5, 0.5).level_ms
    costs = Costs(((1, 10.0), (2, 14.0), (3, 18.0), (4, 18.05)), levels)
    task = Task.of(telling_trace(3, n_texts=10, exactly=True), trees, costs)
    found = search_staged(task)
    assert found.signals == (SignalSpec("chain_value", 1), SignalSpec("chain_value", 2))
    assert found.indices == (0, 1, 3)
    deeper = Staged(((), (0.5,), (0.5,), (0.5,)), ((-1,), (0, -1), (1, -1), (2, 3)))
    gain = total_ms(task, found) / total_ms(task, deeper) - 1
    assert 0 < gain < WORTHWHILE


def test_staged_stays_with_the_static_tree_where_levels_are_dear_or_tell_nothing() -> None:
    trace = telling_trace(1, n_texts=10, exactly=True)
    trees = [EMPTY, chain(1), chain(2), chain(3)]
    dear = Task.of(trace, trees, staged_costs(60.0, 60.0, 60.0))
    assert fit_staged(dear).policy == Staged(((),), ((0,),))
    blind = Task.of(shuffled(trace, 0), trees, staged_costs(0.5, 0.5, 0.5))
    assert fit_staged(blind).policy == Staged(((),), ((blind.best_static,),))


def free(costs: Costs) -> Costs:
    """The same machine if drafting took no time."""
    return Costs(costs.verify_ms, tuple(((1, 0.0), (128, 0.0)) for _ in costs.level_ms))


@pytest.mark.parametrize("seed", range(5))
def test_without_the_levels_cost_staged_is_at_least_as_good_as_with_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    trace = telling_trace(seed, n_texts=8, exactly=True)
    costs = linear_costs(10, float(random.uniform(0.2, 6)), float(random.uniform(0.2, 2)), 0.1)
    with_cost, without = Task.of(trace, TREES, costs), Task.of(trace, TREES, free(costs))
    found = search_staged(with_cost)
    best = total_ms(without, search_staged(without))
    assert best <= total_ms(without, found) * (1 + 1e-12)
    assert best <= total_ms(with_cost, found) * (1 + 1e-12)


@given(SEEDS)
@settings(max_examples=8, deadline=None)
def test_no_search_and_no_fit_replays_slower_than_the_best_static_tree(seed: int) -> None:
    trace = random_trace(seed, n_texts=4, max_length=15)
    if trace.terminal.all():
        return
    first, row, level, parent = np.random.default_rng(seed).random(4).tolist()
    task = Task.of(trace, [*TREES, BRANCHED], linear_costs(first, row, level, parent))
    best = total_ms(task, Static(task.best_static)) * (1 + 1e-12)
    spec = SignalSpec("chain_value", 2)
    for search in (search_ladder, search_hysteresis):
        assert total_ms(task, search(task, spec)) <= best
    assert total_ms(task, search_staged(task)) <= best
    for fit in (fit_ladder(task, spec), fit_hysteresis(task, spec), fit_staged(task)):
        assert fit.tokens_per_second >= fit.static_tokens_per_second * (1 - 1e-12)
        assert fit.static_tokens_per_second == task.tokens_per_second(Static(task.best_static))


@pytest.mark.parametrize("seed", [2])
def test_shuffled_signals_gain_nothing_and_the_true_ones_do(seed: int) -> None:
    """The least that is asked for. Of 60 other shufflings no fit believed one either."""
    trees = [EMPTY, BRANCHED, chain(3)]
    costs = linear_costs(10, 2, 0.5, 0.1)
    trace = telling_trace(seed)
    spec = SignalSpec("chain_value", 1)

    def fits(trace: Trace) -> list[Fit]:
        task = Task.of(trace, trees, costs)
        return [fit_ladder(task, spec), fit_hysteresis(task, spec), fit_staged(task)]

    for fit in fits(trace):
        assert not fit.is_static
        assert fit.held_out_gain > 0.01
    for fit in fits(shuffled(trace, seed)):
        assert fit.is_static
        assert fit.held_out_gain < 0.01
        assert fit.tokens_per_second == fit.static_tokens_per_second


def test_the_shortlist_has_what_can_pay_and_always_the_empty_and_the_best_tree() -> None:
    trace = telling_trace(0, n_texts=8, exactly=True)
    siblings = Tree.of([(5,), (6,)])
    trees = [EMPTY, chain(1), siblings, chain(2), chain(3)]
    task = Task.of(trace, trees, staged_costs(0.5, 0.5, 0.5))
    assert shortlist(task) == [0, 1, 3, 4]
    flat = Task.of(trace, trees, linear_costs(10, 0))
    assert shortlist(flat) == [0, 1, 3, 4]  # where all trees cost the same, ties go to the smaller
    assert {0, flat.best_static} <= set(shortlist(flat))
    assert shortlist(Task.of(trace, [chain(1), siblings], linear_costs(10, 1))) == [0]


def test_levels_that_cannot_be_priced_for_all_trees_at_once_are_not_looked_at() -> None:
    """Two parents under the root were never timed; each tree alone has one."""
    trace = telling_trace(0, n_texts=8, exactly=True)
    trees = [EMPTY, chain(2), Tree.of([(1,), (1, 0)])]
    task = Task.of(trace, trees, Costs(((1, 10.0), (3, 14.0)), (((1, 0.1),), ((1, 0.1),))))
    spec = SignalSpec("chain_value", 2)
    for fit in (fit_ladder(task, spec), fit_hysteresis(task, spec), fit_staged(task)):
        looked = max((signal.depth for signal in fit.policy.signals), default=0)
        assert looked < 2 or not {1, 2} <= set(fit.policy.indices)
        assert np.isfinite(fit.tokens_per_second)
    sideways = task.among([2])
    for search in (search_ladder, search_hysteresis):
        assert search(sideways, spec).signals == ()


def test_a_signal_that_never_changes_chooses_nothing() -> None:
    task = easy_and_hard()
    constant = replace(task, trace=replace(task.trace, base_top1=np.full(len(task.trace), 0.5)))
    for search in (search_ladder, search_hysteresis):
        assert search(constant, TOP1).indices == (task.best_static,)


def test_texts_without_a_step_cannot_be_fitted() -> None:
    trace = trace_of([[[-1]], [[-1]]])
    with pytest.raises(DataError, match="no text of two or more tokens"):
        Task.of(trace, TREES, COSTS)
