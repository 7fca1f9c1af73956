"""Sequoia's grow map, from a worked example, and files that are none."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.errors import TreeError
from entmtp_calib.formats.growmap import from_grow_map, grow_map, read, write
from entmtp_calib.formats.lists import rank_gaps
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain

SMALL = Tree.of([[0], [1], [0, 0], [0, 1], [1, 0]])
TREES = st.builds(random_tree, st.integers(0, 10_000)).filter(lambda t: t.n_nodes)


def test_a_small_tree_is_written_level_by_level_with_the_root_as_node_0() -> None:
    values = grow_map(SMALL)
    assert values["roots"] == [[0], [1, 2], [3, 4, 5]]
    assert values["branches"] == [[2], [2, 1], [0, 0, 0]]
    assert values["Successors"] == [[1, 2], [3, 4], [5], [], [], []]
    assert values["depth"].tolist() == [0, 1, 1, 2, 2, 2]
    assert values["size"] == 6
    assert values["mask"].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_the_file_holds_lists_numbers_and_two_tensors_of_integers() -> None:
    values = torch.load(io.BytesIO(write(chain(2))), weights_only=True)
    assert list(values) == ["roots", "branches", "Successors", "mask", "depth", "size"]
    assert values["mask"].dtype == values["depth"].dtype == torch.int64
    assert (values["branches"], values["size"]) == ([[1], [1], [0]], 3)


@pytest.mark.parametrize("tree", [SMALL, chain(1), chain(5), HYDRA_DEFAULT])
def test_a_file_reads_back_as_the_same_tree(tree: Tree) -> None:
    assert read(write(tree)) == tree


@given(TREES)
def test_a_map_reads_back_unless_siblings_have_gaps(tree: Tree) -> None:
    if rank_gaps(tree):
        with pytest.raises(TreeError, match="without the sibling before it"):
            grow_map(tree)
    else:
        assert from_grow_map(grow_map(tree)) == tree


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("Successors", [[1, 2], [3, 4], [5], [], [], [1]], "no grow map"),
        ("Successors", [[1, 2], [3, 4], [], [], [], []], "no grow map"),
        ("Successors", [[1, 2], [3], [4, 5], [], [], []], "does not belong"),
        ("Successors", "all", "no grow map"),
        ("branches", [[2], [1, 2], [0, 0, 0]], "whose branches does not belong"),
        ("size", 5, "whose size does not belong"),
        ("depth", torch.zeros(6), "whose depth does not belong"),
        ("mask", None, "does not belong"),
    ],
)
def test_entries_that_do_not_belong_together_are_refused(
    name: str, value: Any, problem: str
) -> None:
    with pytest.raises(TreeError, match=problem):
        from_grow_map({**grow_map(SMALL), name: value})


@pytest.mark.parametrize("values", [None, 7, [], {"size": 3}, {"Successors": [[]]}])
def test_what_is_no_grow_map_is_refused(values: Any) -> None:
    with pytest.raises(TreeError, match="no grow map"):
        from_grow_map(values)


def test_a_torch_file_that_would_run_code_or_is_cut_short_is_refused() -> None:
    file = io.BytesIO()
    torch.save({"Successors": torch.nn.Linear(1, 1)}, file)
    for data in (file.getvalue(), write(SMALL)[:100], b"PK\x03\x04"):
        with pytest.raises(TreeError, match="not a torch file of numbers and lists"):
            read(data)
