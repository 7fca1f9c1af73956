"""Lists of rank paths: exactly the documented text, and what a list or its engine cannot take."""

from __future__ import annotations

import ast
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.errors import TreeError
from entmtp_calib.formats.lists import (
    MAX_NODES,
    dense_paths,
    eagle_config,
    leaf_flag,
    leaves,
    node_list,
    node_yaml,
    rank_gaps,
    skipped_siblings,
    token_tree,
    uneven_level,
    with_prefixes,
)
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

SMALL = Tree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
TREES = st.builds(random_tree, st.integers(0, 10_000))


def test_medusa_gets_every_node_as_a_json_list() -> None:
    assert node_list(SMALL) == "[[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]\n"


def test_tensorrt_llm_gets_the_leaves_as_a_flag() -> None:
    assert leaf_flag(SMALL) == '--medusa_choices="[[0, 1], [1, 0], [0, 0, 0]]"\n'


def test_the_leaves_in_tensorrt_llms_own_example_are_a_tree_of_nine_tokens() -> None:
    paths = with_prefixes([(0, 0, 0, 0), (0, 1, 0), (1, 0), (1, 1)])
    assert len(paths) == 9
    assert leaves(Tree(tuple(paths))) == [(1, 0), (1, 1), (0, 1, 0), (0, 0, 0, 0)]


def test_trtllm_bench_gets_a_yaml_item_a_line_behind_comments() -> None:
    text = node_yaml(chain(2), ["read by", "a tree"])
    assert text == "# read by\n# a tree\n- [0]\n- [0, 0]\n"
    assert yaml.safe_load(text) == [[0], [0, 0]]


def test_vllm_gets_a_string_of_tuples_level_by_level() -> None:
    config = json.loads(token_tree(Tree.of([[0, 1], [0], [0, 0]])))
    assert config == {
        "num_speculative_tokens": 3,
        "speculative_token_tree": "[(0,), (0, 0), (0, 1)]",
    }
    assert ast.literal_eval(config["speculative_token_tree"]) == [(0,), (0, 0), (0, 1)]


def test_a_rank_that_medusas_buffers_do_not_hold_is_refused() -> None:
    node_list(HYDRA_DEFAULT)
    with pytest.raises(TreeError, match="child rank 10; expected ranks 0 to 9"):
        node_list(Tree.of([[10]]))


def test_tensorrt_llms_api_gets_all_nodes_and_sizes_that_hold_them() -> None:
    assert eagle_config(Tree.of([[0], [1], [0, 0]])) == (
        "EagleDecodingConfig(eagle_choices=[[0], [1], [0, 0]], max_draft_len=3, "
        "num_eagle_layers=2, max_non_leaves_per_layer=10)"
    )
    many = Tree.of([path for n in range(12) for path in ([n], [n, 0])])
    assert "num_eagle_layers=2, max_non_leaves_per_layer=12)" in eagle_config(many)


@given(TREES)
def test_leaves_imply_the_whole_tree(tree: Tree) -> None:
    assert with_prefixes(leaves(tree)) == list(tree.paths)
    assert with_prefixes(tree.paths) == list(tree.paths)


def test_dense_counts_are_all_nodes_of_every_level() -> None:
    assert dense_paths([1, 2, 1]) == [(0,), (1,), (0, 0), (1, 0)]
    assert len(dense_paths([1, 7, 6])) == 7 + 42


@pytest.mark.parametrize("counts", [[], [1], [7, 6], [1, 0], [1, -2], [0, 3]])
def test_counts_without_a_root_or_a_level_are_refused(counts: list[int]) -> None:
    with pytest.raises(TreeError, match=r"such as \[1, 7, 6\]"):
        dense_paths(counts)


def test_counts_that_would_make_a_huge_tree_are_refused_before_it_is_made() -> None:
    with pytest.raises(TreeError, match=f"at most {MAX_NODES} nodes"):
        dense_paths([1] + [10] * 30)


@pytest.mark.parametrize(
    ("paths", "skipped", "gaps"),
    [
        ([[0], [1], [0, 0]], [], []),
        ([[0], [1], [1, 0]], [(1,)], []),
        ([[1], [1, 0]], [(1,)], [(1,)]),
        ([[0], [2], [0, 0], [0, 2]], [], [(2,), (0, 2)]),
    ],
)
def test_what_engines_that_count_children_cannot_draft_is_found(
    paths: list[list[int]], skipped: list[tuple[int, ...]], gaps: list[tuple[int, ...]]
) -> None:
    assert skipped_siblings(Tree.of(paths)) == skipped
    assert rank_gaps(Tree.of(paths)) == gaps


@pytest.mark.parametrize(
    ("tree", "depth"),
    [
        (EMPTY, None),
        (chain(3), None),
        (Tree.of([[0], [0, 0], [0, 1]]), None),
        (Tree.of([[0], [1], [0, 0], [1, 0]]), None),
        (Tree.of([[0], [1], [0, 0]]), 2),
        (SMALL, 2),
        (Tree.of([[0], [1], [0, 0], [1, 0], [1, 0, 0]]), 3),
    ],
)
def test_the_first_level_with_unequal_numbers_of_children_is_found(
    tree: Tree, depth: int | None
) -> None:
    assert uneven_level(tree) == depth
