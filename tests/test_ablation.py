"""What nodes do: a trace worked out by hand, plain loops, and the trees without each node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, random_trace, random_tree, trace_of

from entmtp_calib.ablation import Ablation, NodeFigures, ablate, accepted_nodes, count_passes
from entmtp_calib.formats.fit import fixed
from entmtp_calib.replay import accepted, counts_by_prompt, walk
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Path, Tree, chain

SEEDS = st.integers(0, 10**6)
COSTS = linear_costs(first=10.0, row=2.0, level=1.0)
TREE = Tree.of([(0,), (1,), (0, 0)])
# The tree's passes start at the tokens 0, 3 and 5 and accept (0, 0), (1) and nothing; token 6 is
# the last one.
BY_HAND = trace_of([[[0, 0], [0, 1], [1, -1], [1, 0], [0, 1], [2, -1], [-1, -1]]])


def by_path(ablation: Ablation) -> dict[Path, NodeFigures]:
    return {node.path: node for node in ablation.nodes}


def minus(tree: Tree, *gone: Path) -> Tree:
    """The tree without some nodes and all below them."""
    return Tree.of(
        path for path in tree.paths if not any(path[: len(node)] == node for node in gone)
    )


def test_a_trace_by_hand_says_what_each_node_does() -> None:
    found = ablate(BY_HAND, TREE, COSTS)
    counts = found.whole.counts
    assert (counts.passes, counts.steps, counts.emitted_tokens) == (3, 4, 7)
    assert (found.whole.ms, found.whole.step_ms) == (3 * 18, 18)
    assert found.wasted_rows == 2
    nodes = by_path(found)
    assert {path: (node.reached, node.accepted) for path, node in nodes.items()} == {
        (0,): (3, 1),
        (1,): (3, 1),
        (0, 0): (1, 1),
    }
    assert [node.conditional for node in found.nodes] == [1 / 3, 1 / 3, 1]
    # Without (0) and what is below it passes start at 0, 1, 2, 4 and 5; without (1) at 0, 3 and 4;
    # without (0, 0) at 0, 2 and 4.
    passes_and_ms = {
        path: (node.without.counts.passes, node.without.ms) for path, node in nodes.items()
    }
    assert passes_and_ms == {(0,): (5, 5 * 13), (1,): (3, 3 * 16), (0, 0): (3, 3 * 15)}


def test_a_node_pays_where_tokens_per_second_fall_without_it() -> None:
    found = ablate(BY_HAND, TREE, COSTS)
    assert [node.path for node in found.never_pay] == [(1,), (0, 0)]
    first = by_path(found)[0,]
    assert first.within.ms == 3 * 15  # (0, 0) never pays, and (0) is not blamed for it
    assert first.adds_emitted == pytest.approx(7 / 4 - 7 / 6)
    assert first.adds_ms == pytest.approx(2)
    assert first.tokens_per_ms == pytest.approx((7 / 3 - 7 / 5) / 2)


def test_the_best_part_is_the_fastest_tree_of_the_most_accepted_nodes() -> None:
    found = ablate(BY_HAND, TREE, COSTS)
    # Plain decoding takes 60 ms, (0) alone 52, with (1) 45, with (0, 0) 54.
    assert [part.ms for part in found.parts] == [60, 52, 45, 54]
    assert found.best_part == Tree.of([(0,), (1,)])
    assert found.best == found.parts[2]
    dear = ablate(BY_HAND, TREE, linear_costs(first=10.0, row=20.0))
    assert (dear.best_part, dear.best.ms) == (EMPTY, 60)


def test_a_good_node_is_not_blamed_for_what_hangs_below_it() -> None:
    ranks = [[0, -1]] * 10 + [[-1, -1]]
    tree = Tree.of([(0,), *((0, rank) for rank in range(8))])
    found = ablate(trace_of([ranks]), tree, linear_costs(first=10.0, row=5.0))
    good = by_path(found)[0,]
    assert good.without.ms < found.whole.ms  # all nine rows cost more than they bring
    assert not good.never_pays
    assert {node.path for node in found.never_pay} == set(tree.paths) - {(0,)}
    assert found.best_part == chain(1)


def test_what_hangs_below_a_node_that_never_pays_never_pays() -> None:
    ranks = [[0, 0], [-1, -1], *([[-1, -1]] * 11)]
    found = ablate(trace_of([ranks]), chain(2), linear_costs(first=10.0, row=1.05))
    below = by_path(found)[0, 0]
    assert below.within.tokens_per_second > below.without.tokens_per_second
    assert [node.path for node in found.never_pay] == [(0,), (0, 0)]


def test_a_node_that_brings_and_costs_nothing_never_pays() -> None:
    found = ablate(BY_HAND, Tree.of([(0,), (5,)]), linear_costs(first=10.0, row=0.0))
    useless = by_path(found)[5,]
    assert (useless.adds_emitted, useless.adds_ms, useless.tokens_per_ms) == (0, 0, None)
    assert [node.path for node in found.never_pay] == [(5,)]


def test_nodes_behind_a_node_that_is_never_reached_have_no_conditional_rate() -> None:
    found = by_path(ablate(BY_HAND, Tree.of([(5,), (5, 0)]), COSTS))
    assert found[5,].conditional == 0
    assert found[5, 0].conditional is None


def test_a_tree_that_the_costs_do_not_reach_is_counted_and_not_judged() -> None:
    wide = Tree.of([(0,), (1,), *((0, rank) for rank in range(130))])
    found = ablate(BY_HAND, wide, COSTS)
    assert not found.is_priced
    assert found.whole.step_ms is None
    assert found.never_pay == []
    node = by_path(found)[1,]
    assert (node.adds_ms, node.tokens_per_ms) == (None, None)
    assert node.accepted == 1
    assert np.isfinite(found.best.ms)


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_each_node_is_judged_by_the_replay_of_two_smaller_trees(seed: int) -> None:
    trace = random_trace(seed, n_texts=6, max_length=20, n_heads=4)
    tree = random_tree(seed + 1)
    found = ablate(trace, tree, COSTS)
    assert found.whole == fixed(trace, tree, float(COSTS.step_ms([tree])[0]))
    gone = {node.path for node in found.never_pay}
    for node in found.nodes:
        below = [path for path in gone if path[: len(node.path)] == node.path and path != node.path]
        without = minus(tree, node.path)
        assert node.without == fixed(trace, without, float(COSTS.step_ms([without])[0]))
        if not node.never_pays:
            within = minus(tree, *below)
            assert node.within == fixed(trace, within, float(COSTS.step_ms([within])[0]))
            assert node.within.tokens_per_second > node.without.tokens_per_second


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_nodes_share_out_all_accepted_tokens(seed: int) -> None:
    trace, tree = random_trace(seed, n_heads=4), random_tree(seed + 1)
    found = ablate(trace, tree, COSTS)
    counts = found.whole.counts
    assert sum(node.accepted for node in found.nodes) == counts.accepted_draft_tokens
    accepts = {(): counts.passes} | {node.path: node.accepted for node in found.nodes}
    for node in found.nodes:
        assert node.reached == accepts[node.path[:-1]]
        assert node.accepted <= node.reached


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_passes_of_many_trees_are_those_of_their_walks(seed: int) -> None:
    trace = random_trace(seed, n_texts=5, n_heads=4)
    trees = [EMPTY, random_tree(seed + 1), random_tree(seed + 2), chain(4), HYDRA_DEFAULT]
    table = np.stack([accepted(tree, trace.ranks) for tree in trees])
    passes, steps = count_passes(trace, table)
    for row, lengths in enumerate(table):
        counts = counts_by_prompt(trace, lengths, walk(trace, lengths))
        assert passes[row].tolist() == [count.passes for count in counts]
        assert steps[row].tolist() == [count.steps for count in counts]


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_the_nodes_on_a_path_are_as_many_as_are_accepted(seed: int) -> None:
    trace, tree = random_trace(seed, n_heads=4), random_tree(seed + 1)
    table = accepted_nodes(tree, trace.ranks)
    assert table.sum(axis=0).tolist() == accepted(tree, trace.ranks).tolist()
