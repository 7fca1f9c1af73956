"""Compiled trees against what their paths say."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain


def test_a_chain_is_a_causal_step() -> None:
    topology = compile_tree(chain(3))
    assert topology.parents.tolist() == [-1, 0, 1, 2]
    assert topology.depths.tolist() == [0, 1, 2, 3]
    assert (topology.ancestor_mask == np.tri(4, dtype=bool)).all()
    assert topology.leaf_paths == ((1, 2, 3),)


def test_the_empty_tree_is_one_row_and_drafts_nothing() -> None:
    topology = compile_tree(EMPTY)
    assert topology.n_rows == 1
    assert topology.ancestor_mask.tolist() == [[True]]
    assert (topology.levels, topology.leaf_paths) == ((), ())


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_row_sees_exactly_the_prefixes_of_its_path(seed: int) -> None:
    tree = random_tree(seed)
    paths = [(), *tree.paths]
    expected = [[row[: len(other)] == other for other in paths] for row in paths]
    topology = compile_tree(tree)
    assert topology.ancestor_mask.tolist() == expected
    assert topology.ancestor_mask.sum(axis=1).tolist() == (topology.depths + 1).tolist()


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_levels_draft_every_node_from_its_own_parent(seed: int) -> None:
    tree = random_tree(seed)
    paths = [(), *tree.paths]
    drafted = []
    for level in compile_tree(tree).levels:
        assert level.node_rows.tolist() == list(range(level.node_rows[0], level.node_rows[-1] + 1))
        assert (np.diff(level.parent_rows) > 0).all()
        for row, parent, rank in zip(
            level.node_rows, level.node_parent, level.node_rank, strict=True
        ):
            assert paths[row] == (*paths[level.parent_rows[parent]], rank)
            drafted.append(row)
    assert drafted == list(range(1, len(paths)))


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_leaf_paths_lead_to_every_leaf(seed: int) -> None:
    tree = random_tree(seed)
    paths = [(), *tree.paths]
    leaves = [path for path in tree.paths if not any(path == other[:-1] for other in tree.paths)]
    led_to = [[paths[row] for row in rows] for rows in compile_tree(tree).leaf_paths]
    assert led_to == [[leaf[: i + 1] for i in range(len(leaf))] for leaf in leaves]


def test_the_hydra_default_tree_runs_its_heads_on_1_10_10_1_rows() -> None:
    topology = compile_tree(HYDRA_DEFAULT)
    assert [len(level.parent_rows) for level in topology.levels] == [1, 10, 10, 1]
    assert [len(level.node_rows) for level in topology.levels] == [10, 28, 23, 2]
    assert len(topology.leaf_paths) == 42


def test_rows_are_explicit_where_only_a_high_rank_is_expanded() -> None:
    level = compile_tree(Tree.of([(0,), (1,), (2,), (2, 1)])).levels[1]
    assert level.parent_rows.tolist() == [3]
    assert (level.node_parent.tolist(), level.node_rank.tolist()) == ([0], [1])


def test_a_tree_is_compiled_once() -> None:
    assert compile_tree(Tree.of([(1,), (0,)])) is compile_tree(Tree.of([(0,), (1,)]))
