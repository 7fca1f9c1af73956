"""The closest fit: figures by hand, and that nothing the form could say would have been faster."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, random_trace, random_tree, trace_of

from entmtp_calib.costs import Costs
from entmtp_calib.errors import DataError
from entmtp_calib.formats.chains import AdaptiveRule, SglangNumbers
from entmtp_calib.formats.fit import (
    adaptive,
    best_chain,
    closest_numbers,
    fixed,
    held_by,
    numbers_ms,
    reached_nodes,
    schedule,
)
from entmtp_calib.replay import accepted, walk
from entmtp_calib.tree import EMPTY, Tree, chain

BUSHY = Tree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
ALWAYS = [[0, 0, 0]] * 40  # a text whose greedy chain is always right, but at its end
ALWAYS[-3:] = [[0, 0, -1], [0, -1, -1], [-1, -1, -1]]
NEVER = [[-1, -1, -1]] * 40


def test_the_figures_of_a_fixed_tree_follow_by_hand() -> None:
    figures = fixed(trace_of([[[0], [-1], [-1]]]), chain(1), 20.0)
    assert figures.mean_emitted == 3 / 2  # two tokens in a pass, then the last one without
    assert figures.tokens_per_second == 1000 * 3 / 20


def test_every_level_but_the_first_is_drafted_under_all_expanded_nodes() -> None:
    costs = linear_costs(first=10, row=1, level=2, parent=0.5)
    assert numbers_ms(SglangNumbers(3, 1, 4), costs) == costs.step_ms([chain(3)])[0]
    assert numbers_ms(SglangNumbers(3, 2, 5), costs) == pytest.approx(14 + 2 + 2 * 2.5)
    assert numbers_ms(SglangNumbers(3, 2, 5), linear_costs(10, 1, depth=2)) == np.inf


def test_numbers_hold_the_most_reached_nodes_of_their_depth_ranks_and_rows() -> None:
    reach = dict.fromkeys(BUSHY.paths, 1) | {(0,): 5, (1,): 4, (1, 0): 3, (0, 0): 2}
    assert held_by(SglangNumbers(2, 2, 5), BUSHY, reach).paths == ((0,), (1,), (0, 0), (1, 0))
    assert held_by(SglangNumbers(3, 3, 9), BUSHY, reach) == BUSHY
    assert held_by(SglangNumbers(2, 1, 3), BUSHY, reach) == chain(2)
    deep = held_by(SglangNumbers(3, 2, 7), BUSHY, reach)  # (0, 1) is not expanded, both others are
    assert deep == Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@given(st.integers(0, 10_000))
def test_reached_nodes_are_those_that_the_trees_own_steps_accept(seed: int) -> None:
    trace, tree = random_trace(seed, max_length=9), random_tree(seed)
    lengths = accepted(tree, trace.ranks)
    visited = walk(trace, lengths)
    counted = dict.fromkeys(tree.paths, 0)
    for row in np.flatnonzero(visited):
        for depth in range(1, lengths[row] + 1):
            counted[tuple(trace.ranks[row, :depth].tolist())] += 1
    assert reached_nodes(tree, trace) == counted


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 5), st.floats(0, 5))
def test_no_numbers_within_the_tree_are_faster_on_the_texts_it_is_fitted_to(
    seed: int, row: float, level: float
) -> None:
    trace, tree = random_trace(seed, n_texts=3, max_length=9), random_tree(seed)
    if not tree.n_nodes:
        return
    costs = linear_costs(10, row, level, 0.3)
    fit = closest_numbers(tree, trace, costs)
    numbers = fit.numbers
    assert numbers.steps <= tree.depth
    assert fit.tree.n_nodes == numbers.draft_tokens - 1 <= max(tree.n_nodes, tree.depth)
    reach = reached_nodes(tree, trace)
    for steps in range(1, tree.depth + 1):
        other = SglangNumbers(steps, 1, steps + 1)
        held = held_by(other, tree, reach)
        assert fit.on(trace).ms <= fixed(trace, held, numbers_ms(other, costs)).ms + 1e-9


def test_where_rows_cost_nothing_the_whole_tree_is_held() -> None:
    no = [-1, -1]
    trace = trace_of([[[1, 0], no, no, [0, 1], no, no, no]])
    tree = Tree.of([[0], [1], [0, 1], [1, 0]])
    fit = closest_numbers(tree, trace, linear_costs(10, 0))
    assert (fit.numbers, fit.tree) == (SglangNumbers(2, 2, 5), tree)


def test_where_branches_do_not_pay_the_fit_is_a_chain() -> None:
    fit = closest_numbers(BUSHY, trace_of([ALWAYS]), linear_costs(10, 1))
    assert (fit.numbers, fit.tree) == (SglangNumbers(3, 1, 4), chain(3))


def test_the_best_chain_is_deep_where_all_is_accepted_and_short_where_nothing_is() -> None:
    costs = linear_costs(10, 1, 1)
    assert best_chain(trace_of([ALWAYS]), costs, [1, 2, 3]) == 3
    assert best_chain(trace_of([NEVER]), costs, [1, 2, 3]) == 1
    assert best_chain(trace_of([ALWAYS]), linear_costs(10, 1, 1, depth=2), [1, 2, 3]) == 2


def test_chains_are_shorter_in_larger_batches_and_the_ranges_end_with_the_costs() -> None:
    texts = trace_of([[[0, -1], [-1, -1]] * 20, ALWAYS_TWO])
    costs = Costs(((1, 10.0), (8, 10.0), (24, 58.0)), (((1, 1.0), (32, 1.0)),) * 2)
    ranges = schedule(texts, costs, 2)
    depths = [depth for _, _, depth in ranges]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 8  # 24 rows are 8 texts of 3 rows
    assert depths[0] == 2
    assert depths == sorted(depths, reverse=True)
    assert all(b[0] == a[1] + 1 for a, b in pairwise(ranges))


ALWAYS_TWO = [row[:2] for row in ALWAYS]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 3))
def test_each_batch_size_has_the_fastest_of_all_chains(seed: int, row: float) -> None:
    trace = random_trace(seed, n_texts=3, max_length=9)
    costs = linear_costs(10, row, 0.5, 0.1)
    for first, last, depth in schedule(trace, costs, 2):
        for batch in {first, last}:
            ms = []
            for other in range(3):
                step = costs.verify(batch * (other + 1))
                step += sum(costs.level(level, batch) for level in range(1, other + 1))
                ms.append(fixed(trace, chain(other), step).ms)
            assert ms[depth] == min(ms)


@pytest.mark.parametrize("costs", [Costs(((1, 10.0),), ()), Costs(((1, 1.0), (8, 2.0)), ())])
def test_costs_that_reach_no_chain_are_one_error(costs: Costs) -> None:
    trace = trace_of([ALWAYS])
    with pytest.raises(DataError, match="the costs reach no chain"):
        closest_numbers(BUSHY, trace, costs)
    with pytest.raises(DataError, match="the costs reach no chain"):
        best_chain(trace, costs, [1, 2])
    with pytest.raises(DataError, match="the costs reach no chain"):
        schedule(trace, costs, 2)


def test_adaptive_mode_goes_to_the_longest_chain_where_all_is_accepted() -> None:
    rule = AdaptiveRule(ema_alpha=1.0, update_interval=1, warmup_batches=0)
    trace, costs = trace_of([ALWAYS]), linear_costs(10, 1)
    # One pass with the chain of 1 accepts 1 token, above 1 - 0.5; every later one accepts 3.
    figures = adaptive(trace, costs, [1, 3], first=1, rule=rule)
    assert figures.counts.passes == 1 + 10
    assert figures.ms == (10 + 1) + 10 * (10 + 3)
    assert figures.counts.emitted_tokens == 40


def test_adaptive_mode_goes_down_where_nothing_is_accepted_and_not_before_the_warm_up() -> None:
    rule = AdaptiveRule(ema_alpha=1.0, update_interval=5, warmup_batches=10)
    trace, costs = trace_of([NEVER]), linear_costs(10, 1)
    figures = adaptive(trace, costs, [1, 3], first=3, rule=rule)
    assert figures.counts.passes == 39
    assert figures.ms == 15 * (10 + 3) + 24 * (10 + 1)  # decided after the 15th pass


def test_adaptive_mode_remembers_from_text_to_text_and_with_one_chain_is_that_chain() -> None:
    trace, costs = trace_of([ALWAYS[-4:]] * 30), linear_costs(10, 1)
    rule = AdaptiveRule(ema_alpha=1.0, update_interval=1, warmup_batches=0)
    assert adaptive(trace, costs, [1, 3], 1, rule).counts.passes == 30 + 1
    only = adaptive(trace, costs, [2], 2, AdaptiveRule())
    assert only == fixed(trace, chain(2), 12.0)


def test_plain_decoding_is_a_fixed_tree_too() -> None:
    assert fixed(trace_of([NEVER]), EMPTY, 10.0).mean_emitted == 1.0
