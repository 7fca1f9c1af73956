"""Backward induction: it drafts on exactly where that pays, and keeps the trees worth having."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, random_trace, telling_trace, trace_of

from entmtp_calib.costs import Costs
from entmtp_calib.policy import DRAFT_ON, Staged, Static
from entmtp_calib.replay import accepted
from entmtp_calib.staging import BINS, induced, useful
from entmtp_calib.task import Task
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain
from entmtp_calib.walks import NOT_CHOSEN, prompt_ms, walk_policy

SEEDS = st.integers(0, 10**6)
CHAINS = [EMPTY, chain(1), chain(2), chain(3)]
VERIFY = ((1, 10.0), (4, 22.0))
RATE = 0.12  # tokens per ms, about what these costs allow


def costs(*level_ms: float) -> Costs:
    """A pass of n rows takes 6 + 4 n ms; drafting a level what is given."""
    return Costs(VERIFY, tuple(((1, ms), (9, ms)) for ms in level_ms))


def everywhere(trace: Trace) -> np.ndarray:
    return np.flatnonzero(~trace.terminal)


def policy_of(
    trace: Trace, price: Costs, among: list[int], seen: int, trees: list[Tree] = CHAINS
) -> Staged:
    table = np.stack([accepted(tree, trace.ranks) for tree in trees])
    return induced(Task(trace, tuple(trees), price, table), everywhere(trace), RATE, among, seen)


@pytest.mark.parametrize("deepest", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_where_the_chain_tells_exactly_each_step_drafts_what_will_be_accepted(
    deepest: int, seed: int
) -> None:
    """Drafting a level pays down to `deepest`: below, a level costs more than its token."""
    trace = telling_trace(seed, n_texts=8, exactly=True)
    price = costs(*[0.5 if depth <= deepest else 60.0 for depth in (1, 2, 3)])
    policy = policy_of(trace, price, [0, 1, 2, 3], seen=3)
    table = np.stack([accepted(tree, trace.ranks) for tree in CHAINS])
    steps = walk_policy(trace, table, policy)
    asked = steps.chosen != NOT_CHOSEN
    right = np.minimum(table[3][asked], deepest)
    assert steps.chosen[asked].tolist() == right.tolist()
    assert steps.accepted[asked].tolist() == right.tolist()
    # One level more is looked at than is right, to find that it is not.
    assert steps.levels[asked].tolist() == np.minimum(right + 1, deepest).tolist()


def test_where_no_level_pays_nothing_is_drafted() -> None:
    trace = telling_trace(0, n_texts=8, exactly=True)
    policy = policy_of(trace, costs(60.0, 60.0, 60.0), [0, 1, 2, 3], seen=3)
    assert policy == Staged(((),), ((0,),))


def test_where_the_chain_tells_nothing_the_best_tree_is_chosen_unseen() -> None:
    trace = telling_trace(0, n_texts=8)
    blind = Trace(**{**vars_of(trace), "chain_probs": np.full_like(trace.chain_probs, 0.5)})
    for level_ms in (0.0, 1.0, 20.0):
        policy = policy_of(blind, costs(level_ms, level_ms, level_ms), [0, 1, 3], seen=2)
        assert len(policy.indices) == 1


def vars_of(trace: Trace) -> dict[str, np.ndarray]:
    names = "prompt position context token ranks chain_probs base_top1 entropy".split()
    return {name: getattr(trace, name) for name in names}


def test_a_level_that_tells_nothing_is_drafted_through_to_one_that_tells() -> None:
    """Easy positions and hard ones, which only the second probability tells apart."""
    is_easy = np.tile([True, False, False], 80)
    ranks = np.where(is_easy[:, None], 0, 1) * np.ones((1, 3), dtype=int)
    ranks[-3:] = [[0, 0, -1], [0, -1, -1], [-1, -1, -1]]
    probs = np.where(is_easy, 0.9, 0.1)[:, None] * [0, 1, 1] + [0.5, 0, 0]
    trace = trace_of([ranks.tolist()], chain_probs=probs)
    policy = policy_of(trace, costs(0.5, 0.5, 0.5), [0, 3], seen=2)
    assert policy.actions == ((DRAFT_ON,), (DRAFT_ON,), (0, 3))


def test_no_more_levels_are_looked_at_than_asked_for() -> None:
    trace = telling_trace(1, n_texts=8, exactly=True)
    for seen in (1, 2, 3):
        policy = policy_of(trace, costs(0.5, 0.5, 0.5), [0, 1, 2, 3], seen)
        assert len(policy.actions) == seen + 1
        assert len(policy.signals) == seen


def test_only_trees_that_are_asked_for_are_chosen_and_only_they_are_paid_for() -> None:
    trace = telling_trace(2, n_texts=8, exactly=True)
    wide = Tree.of([(rank,) for rank in range(9)] + [(rank, 0) for rank in range(9)])
    dear = Costs(((1, 10.0), (30, 126.0)), (((1, 0.5),), ((1, 0.5), (9, 500.0)), ((1, 0.5),)))
    trees = [*CHAINS, wide]
    with_wide = policy_of(trace, dear, [0, 1, 2, 3, 4], 2, trees)
    without = policy_of(trace, dear, [0, 1, 2, 3], 2, trees)
    assert set(without.indices) <= {0, 1, 2, 3}
    assert len(without.actions) == 3
    # Drafting the second level for the wide tree too would cost half a second.
    assert len(with_wide.actions) == 2


def test_a_value_above_all_that_were_seen_is_treated_like_the_largest_one() -> None:
    for seed in range(4):
        trace = telling_trace(seed, n_texts=8, exactly=True)  # many rows share the top value
        policy = policy_of(trace, costs(0.5, 0.5, 0.5), [0, 1, 2, 3], seen=3)
        assert policy.choose(0, lambda spec: 0.9**spec.depth)[0] == 3
        assert policy.choose(0, lambda spec: 1.0)[0] == 3
        assert policy.choose(0, lambda spec: 0.0)[0] == 0


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_ranges_never_outnumber_the_bins_and_neighbours_differ(seed: int) -> None:
    trace = random_trace(seed, n_texts=6, max_length=30)
    if not len(everywhere(trace)):
        return
    policy = policy_of(trace, linear_costs(10, 2, 0.5, 0.1), [0, 1, 2, 3], seen=3)
    for thresholds, actions in zip(policy.thresholds, policy.actions, strict=True):
        assert len(actions) <= BINS
        assert all(before != after for before, after in itertools.pairwise(actions))
        assert all(0 < level < 1 for level in thresholds)
    assert all(DRAFT_ON in actions for actions in policy.actions[:-1])


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_one_look_is_as_good_as_the_best_of_all_pairs_of_trees_per_range(seed: int) -> None:
    """With one level, induction is a choice per range: brute force over two ranges finds no better.

    Worth is what induction maximises: tokens less lambda times ms, on the rows it was given.
    """
    random = np.random.default_rng(seed)
    trace = random_trace(seed, n_texts=6, max_length=20)
    rows = everywhere(trace)
    if not len(rows):
        return
    flags = random.random(len(trace)) < 0.5
    chain_probs = np.where(flags[:, None], 0.9, 0.2) * np.ones((1, 3))
    trace = Trace(**{**vars_of(trace), "chain_probs": chain_probs})
    price = linear_costs(10, float(random.uniform(0, 5)), float(random.uniform(0, 2)), 0.1)
    table = np.stack([accepted(tree, trace.ranks) for tree in CHAINS])
    ms = price.ahead_ms(CHAINS, 1)

    def worth(policy: Staged) -> float:
        total = 0.0
        for row in rows:
            level = len(policy.actions) - 1
            index, _ = policy.choose(0, lambda spec, row=row: float(trace.chain_probs[row, 0]))
            total += table[index, row] + 1 - RATE * ms[level, index]
        return total

    found = induced(Task(trace, tuple(CHAINS), price, table), rows, RATE, range(4), 1)
    stop = [Staged(((),), ((k,),)) for k in range(4)]
    look = [
        Staged(((), (0.5,)), ((DRAFT_ON,), (low, high)))
        for low, high in itertools.product(range(4), repeat=2)
    ]
    assert worth(found) == pytest.approx(max(map(worth, [*stop, *look])))


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_best_fixed_tree_is_useful_and_a_tree_that_costs_more_for_less_is_not(
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    trace = random_trace(seed, n_texts=6, max_length=20)
    rows = everywhere(trace)
    if not len(rows):
        return
    price = linear_costs(10, float(random.uniform(0.1, 5)), float(random.uniform(0, 2)), 0.1)
    siblings = Tree.of([(5,), (6,)])  # ranks that no text has
    trees = [*CHAINS, siblings]
    table = np.stack([accepted(tree, trace.ranks) for tree in trees])
    found = useful(Task(trace, tuple(trees), price, table), rows, RATE)
    worth = (table[:, rows] + 1).mean(1) - RATE * price.step_ms(trees)
    assert int(worth.argmax()) in found
    assert 4 not in found


def test_a_tree_is_useful_if_it_is_the_best_in_one_range_of_one_level() -> None:
    trace = telling_trace(3, n_texts=8, exactly=True)
    found = useful(Task.of(trace, CHAINS, costs(0.5, 0.5, 0.5)), everywhere(trace), RATE)
    assert found == {0, 1, 2, 3}
    steep = Costs(((1, 10.0), (4, 910.0)), costs(0.5, 0.5, 0.5).level_ms)
    assert useful(Task.of(trace, CHAINS, steep), everywhere(trace), RATE) == {0}


def test_the_rate_decides_how_much_a_token_is_worth() -> None:
    """Where time is worth all nothing is drafted; where it is worth nothing, no token is missed."""
    trace = telling_trace(4, n_texts=8)
    rows = everywhere(trace)
    task = Task.of(trace, CHAINS, costs(0.5, 0.5, 0.5))
    thrifty, lavish = (induced(task, rows, rate, range(4), 2) for rate in (100.0, 0.0))
    assert thrifty == Staged(((),), ((0,),))
    steps = walk_policy(trace, task.accepted, lavish)
    assert (steps.accepted == np.where(steps.visited, task.accepted[3], 0)).all()


def test_the_induced_policy_replays_faster_than_every_fixed_tree_where_the_chain_tells() -> None:
    trace = telling_trace(5, n_texts=12, exactly=True)
    task = Task.of(trace, CHAINS, costs(0.5, 0.5, 0.5))
    policy = policy_of(trace, task.costs, [0, 1, 2, 3], seen=3)
    ms = prompt_ms(trace, task.walk(policy), task.costs.policy_ms(policy, CHAINS))
    for k in range(4):
        assert (ms < task.ms(Static(k))).all()
