"""Trees as values: what they refuse, their order, their names, how they grow and print."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.errors import TreeError
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree, chain, draw, stems, union


def test_a_tree_must_contain_every_prefix() -> None:
    with pytest.raises(TreeError, match=r"parent missing of \[0, 1, 2\], \[1, 0\]"):
        Tree.of([(0,), (1, 0), (0, 1, 2)])


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        ([(0,), (0,)], r"repeated: \[0\]"),
        ([()], "an empty path"),
        ([(-1,)], r"child ranks outside 0..32767 in \[-1\]"),
        ([(2**15,)], "child ranks outside"),
        ([(0.0,)], "is not a path"),
        ([(True,)], "is not a path"),
        (["0"], "is not a path"),
        ([0], "is not a path"),
    ],
)
def test_a_malformed_path_is_refused(paths: list, problem: str) -> None:
    with pytest.raises(TreeError, match=problem):
        Tree.of(paths)


def test_all_problems_of_a_tree_are_reported_together() -> None:
    with pytest.raises(TreeError) as refused:
        Tree.of([(), (-1,), (3, 3), (0,), (0,)])
    for problem in ("an empty path", "outside", "repeated", "parent missing"):
        assert problem in str(refused.value)


def test_nodes_stand_in_depth_then_path_order_whatever_the_input_order() -> None:
    tree = Tree.of([(1, 0), (0, 0, 0), (1,), (0,), (0, 0)])
    assert tree.paths == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
    assert tree.parents == (-1, 0, 0, 1, 2, 3)
    assert tree.depths == (0, 1, 1, 2, 2, 3)


def test_any_integer_type_gives_the_same_tree() -> None:
    tree = Tree.of(np.array([[0], [1]], dtype=np.int16))
    assert tree == Tree.of([[0], [1]])
    assert hash(tree) == hash(Tree.of([(1,), (0,)]))
    assert all(type(rank) is int for path in tree.paths for rank in path)


@pytest.mark.parametrize("text", ["[[0], [1], [0, 0]]", "[(0,), (1,), (0, 0)]", "((0,0),(0,),[1])"])
def test_a_tree_is_read_from_json_or_python(text: str) -> None:
    assert Tree.parse(text) == Tree.of([(0,), (1,), (0, 0)])


def test_an_empty_list_is_the_empty_tree() -> None:
    assert Tree.parse(" [] ") == EMPTY
    assert (EMPTY.n_nodes, EMPTY.depth, EMPTY.max_rank) == (0, 0, -1)
    assert (EMPTY.parents, EMPTY.depths) == ((-1,), (0,))


@pytest.mark.parametrize("text", ["", "[[0]", "5", "{}", "[0]", "open('x')", "[[0], [None]]"])
def test_text_that_is_no_tree_gets_one_line_that_says_how_to_write_one(text: str) -> None:
    with pytest.raises(TreeError, match="write a tree as") as refused:
        Tree.parse(text)
    assert "\n" not in str(refused.value)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_lists_and_text_bring_a_tree_back(seed: int) -> None:
    tree = random_tree(seed)
    assert Tree.of(tree.to_list()) == tree
    assert Tree.parse(str(tree.to_list())) == tree


def test_ids_tell_trees_apart() -> None:
    tree = Tree.of([(0,), (1,)])
    assert [EMPTY.id, chain(3).id, HYDRA_DEFAULT.id] == ["plain", "chain-3", "hydra-default"]
    assert tree.id == Tree.of([(1,), (0,)]).id
    assert tree.id.startswith("t2d1-")
    assert tree.id != Tree.of([(0,), (2,)]).id


def test_the_hydra_default_tree_has_its_published_figures() -> None:
    assert (HYDRA_DEFAULT.n_nodes, HYDRA_DEFAULT.depth, HYDRA_DEFAULT.max_rank) == (63, 4, 9)
    assert Counter(map(len, HYDRA_DEFAULT.paths)) == {1: 10, 2: 28, 3: 23, 4: 2}
    parents = {path[:-1] for path in HYDRA_DEFAULT.paths}
    leaves = Counter(len(path) for path in HYDRA_DEFAULT.paths if path not in parents)
    assert leaves == {2: 18, 3: 22, 4: 2}


def test_the_medusa2_default_tree_has_its_published_figures() -> None:
    assert (MEDUSA2_DEFAULT.id, MEDUSA2_DEFAULT.n_nodes) == ("medusa2-default", 63)
    assert Counter(map(len, MEDUSA2_DEFAULT.paths)) == {1: 10, 2: 23, 3: 23, 4: 7}


def test_every_parent_offers_its_next_free_rank() -> None:
    assert EMPTY.growth_candidates(4, 10) == [(0,)]
    assert chain(1).growth_candidates(2, 10) == [(1,), (0, 0)]
    assert Tree.of([(0,), (2,)]).growth_candidates(2, 10) == [(1,), (0, 0), (2, 0)]


def test_growth_stops_at_the_depth_and_at_the_ranks() -> None:
    assert chain(2).growth_candidates(2, 10) == [(1,), (0, 1)]
    assert chain(2).growth_candidates(3, 1) == [(0, 0, 0)]
    assert Tree.of([(0,), (1,)]).growth_candidates(1, 2) == []


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_every_growth_candidate_makes_a_tree_of_one_more_node(seed: int) -> None:
    tree = random_tree(seed)
    for path in tree.growth_candidates(4, 6):
        grown = tree.with_node(path)
        assert grown.n_nodes == tree.n_nodes + 1
        assert path in grown.paths


def test_a_node_cannot_be_added_without_its_parent() -> None:
    with pytest.raises(TreeError, match="parent missing"):
        chain(1).with_node((1, 0))


@given(st.lists(st.integers(0, 10**6), max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_union_has_every_path_of_its_trees_and_no_other(seeds: list[int]) -> None:
    trees = [random_tree(seed) for seed in seeds]
    together = union(trees)
    assert set(together.paths) == {path for tree in trees for path in tree.paths}
    assert union([together, *trees, EMPTY]) == together


def test_a_drawing_leads_to_each_node_after_its_parent() -> None:
    drawn = list(stems(Tree.of([(0,), (1,), (0, 0)])))
    assert drawn == [((0,), "├─ "), ((0, 0), "│  └─ "), ((1,), "└─ ")]


def test_a_tree_prints_one_node_a_line() -> None:
    assert draw(EMPTY) == "root"
    assert draw(Tree.of([(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0)])).splitlines() == [
        "root",
        "├─ 0",
        "│  ├─ 0",
        "│  │  └─ 0",
        "│  └─ 2",
        "└─ 1",
        "   └─ 0",
    ]
