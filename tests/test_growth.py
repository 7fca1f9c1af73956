"""Growth against the rule written out in plain loops, and each tie-break by hand."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_trace, trace_of

from entmtp_calib.errors import TreeError
from entmtp_calib.growth import acceptance_frontier, grow, grow_all
from entmtp_calib.replay import accepted, step_counts, walk
from entmtp_calib.trace import Trace
from entmtp_calib.tree import Tree, chain

Path = tuple[int, ...]


def longest(paths: set[Path], ranks: list[int]) -> int:
    return max((d for d in range(1, len(ranks) + 1) if tuple(ranks[:d]) in paths), default=0)


def joint_score(trace: Trace, tree: set[Path], candidate: Path) -> Fraction:
    """Mean acceptance length of tree + candidate on the steps that the tree takes."""
    steps = emitted = 0
    rows = trace.ranks.tolist()
    for start, length in zip(trace.starts.tolist(), trace.lengths.tolist(), strict=True):
        offset = 0
        while offset < length:
            ranks = rows[start + offset]
            steps += 1
            emitted += longest(tree | {candidate}, ranks) + 1
            offset += longest(tree, ranks) + 1
    return Fraction(emitted, steps)


def grow_by_the_rule(
    trace: Trace, max_depth: int, max_nodes: int, n_ranks: int
) -> list[tuple[Path, Fraction]]:
    tree: set[Path] = {(0,)}
    added = [((0,), joint_score(trace, tree, (0,)))]
    while len(tree) < max_nodes:
        candidates = []
        for parent in [(), *tree]:
            rank = min(r for r in range(n_ranks + 1) if (*parent, r) not in tree)
            if len(parent) < max_depth and rank < n_ranks:
                candidates.append((*parent, rank))
        if not candidates:
            break
        scores = {path: joint_score(trace, tree, path) for path in candidates}
        best = min(candidates, key=lambda path: (-scores[path], len(path), sum(path), path))
        tree.add(best)
        added.append((best, scores[best]))
    return added


@given(st.integers(0, 10**6), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_growth_is_the_rule_written_out(seed: int, max_depth: int) -> None:
    trace = random_trace(seed, n_texts=3, max_length=8)  # short texts: many ties
    grown = grow(trace, max_depth, max_nodes=10, n_ranks=3)
    expected = grow_by_the_rule(trace, max_depth, max_nodes=10, n_ranks=3)
    assert [entry.tree.n_nodes for entry in grown] == list(range(1, len(expected) + 1))
    for size, entry in enumerate(grown, start=1):
        assert entry.tree == Tree.of([path for path, _ in expected[:size]])
        assert Fraction(entry.joint.emitted_tokens, entry.joint.steps) == expected[size - 1][1]


def first_steps(*ranks: list[int]) -> Trace:
    """Texts whose first row has these ranks and whose other rows match nothing."""
    n_heads = len(ranks[0])
    return trace_of([[row] + [[-1] * n_heads] * n_heads for row in ranks])


def added_node(trace: Trace, size: int, max_depth: int, n_ranks: int) -> Path:
    grown = grow(trace, max_depth, size, n_ranks)
    (node,) = set(grown[size - 1].tree.paths) - set(grown[size - 2].tree.paths)
    return node


def test_the_node_that_gains_most_is_added_even_if_it_is_deeper() -> None:
    trace = first_steps([0, 0], [0, 0], [1, -1])
    assert added_node(trace, 2, max_depth=2, n_ranks=9) == (0, 0)


def test_a_tie_goes_to_the_shallower_node() -> None:
    trace = first_steps([0, 0], [1, -1])
    assert added_node(trace, 2, max_depth=2, n_ranks=9) == (1,)


def test_then_to_the_smaller_sum_of_ranks_even_if_its_path_is_larger() -> None:
    # (0), (1), (0, 0), (0, 1) come first; then (0, 2) and (1, 0) gain one step each.
    trace = first_steps(*[[0, 0]] * 5, *[[0, 1]] * 4, *[[1, -1]] * 3, [0, 2], [1, 0])
    grown = grow(trace, 2, 5, 2 + 1)
    assert set(grown[3].tree.paths) == {(0,), (1,), (0, 0), (0, 1)}
    assert added_node(trace, 5, max_depth=2, n_ranks=3) == (1, 0)


def test_then_to_the_smaller_path() -> None:
    # (0), (1), (0, 0) come first; then (0, 1) and (1, 0) gain one step each, rank sum 1 both.
    trace = first_steps(*[[0, 0]] * 5, *[[1, -1]] * 3, [0, 1], [1, 0])
    assert added_node(trace, 4, max_depth=2, n_ranks=2) == (0, 1)


def test_a_candidate_counts_only_where_the_current_tree_steps() -> None:
    # Rank 1 would gain at every second token, but there the chain's steps never start.
    text = [[0], [1]] * 4 + [[2], [0], [2], [0], [-1]]
    grown = grow(trace_of([text]), 1, 2, n_ranks=3)
    assert grown[1].tree == Tree.of([(0,), (1,)])  # the rule adds contiguous ranks
    assert grown[1].joint == grown[0].joint  # and this one gained nothing


def test_the_joint_figure_is_on_the_previous_trees_steps() -> None:
    trace = random_trace(5, n_texts=6, max_length=20)
    before, after = grow(trace, 2, 2, 3)
    own = accepted(before.tree, trace.ranks)
    visited = walk(trace, own)
    assert before.joint == step_counts(trace, own, visited)
    assert after.joint == step_counts(trace, accepted(after.tree, trace.ranks), visited)


def test_growth_ends_when_nothing_can_be_added() -> None:
    grown = grow(random_trace(0), 2, 100, n_ranks=2)
    assert len(grown) == 2 + 4
    assert grown[-1].tree.max_rank == 1


@pytest.mark.parametrize("max_depth", [0, 4])
def test_a_depth_that_the_trace_did_not_record_is_refused(max_depth: int) -> None:
    with pytest.raises(TreeError, match="1 to 3, the heads that the trace recorded"):
        grow(random_trace(0, n_heads=3), max_depth, 5, 3)


def test_all_depths_together_hold_no_tree_twice() -> None:
    trace = random_trace(7, n_texts=8, max_length=20)
    grown = grow_all(trace, 3, 12, 4)
    trees = [entry.tree for entry in grown]
    assert len(set(trees)) == len(trees)
    for depth in (1, 2, 3):
        assert {entry.tree for entry in grow(trace, depth, 12, 4)} <= set(trees)
    assert trees[0] == chain(1)


def test_the_acceptance_frontier_rises_with_the_nodes() -> None:
    grown = grow_all(random_trace(8, n_texts=8, max_length=20), 3, 12, 4)
    kept = acceptance_frontier(grown)
    for smaller, larger in pairwise(kept):
        assert smaller.tree.n_nodes < larger.tree.n_nodes
        assert smaller.joint_emitted < larger.joint_emitted
    for entry in grown:
        assert any(
            other.tree.n_nodes <= entry.tree.n_nodes and other.joint_emitted >= entry.joint_emitted
            for other in kept
        )
