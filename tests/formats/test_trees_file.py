"""Our own form of trees, written and read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from entmtp_calib.errors import TreeError
from entmtp_calib.formats.reading import read
from entmtp_calib.formats.trees_file import named_paths, trees_document
from entmtp_calib.records import strict_json
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain


def test_trees_read_back_with_their_names_in_their_order() -> None:
    named = [("mine", Tree.of([[0], [1]])), ("chain", chain(2)), ("hydra", HYDRA_DEFAULT)]
    written = strict_json(trees_document(named, "medusa.py")).encode()
    assert [(each.name, each.tree) for each in read(written, "file")] == named


def test_the_file_names_every_tree_and_its_source() -> None:
    document = trees_document([("mine", chain(2))], "medusa.py")
    assert document["source"] == "medusa.py"
    assert document["trees"] == [
        {"name": "mine", "id": "chain-2", "n_nodes": 2, "depth": 2, "paths": [[0], [0, 0]]}
    ]


def test_a_tree_without_a_name_has_the_files() -> None:
    assert named_paths({"trees": [{"paths": [[0]]}]}, "file") == [("file", [[0]])]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 99}, "file has format version 99; expected version 1; update entmtp"),
        ({"trees": [{}]}, "a tree without paths"),
        ({"trees": [{"paths": [["0"]]}]}, "neither paths nor counts"),
    ],
)
def test_a_file_of_another_version_or_damaged_is_one_error(
    change: dict[str, Any], problem: str
) -> None:
    document = trees_document([("mine", chain(2))], "medusa.py") | change
    with pytest.raises(TreeError, match=re.escape(problem)):
        read(strict_json(document).encode(), "file")


@pytest.mark.parametrize("other", [{}, {"trees": None}, {"trees": [7]}, {"trees": [[[0], [1]]]}])
def test_what_lists_no_trees_of_ours_is_none_of_ours(other: dict[str, Any]) -> None:
    assert named_paths(other, "file") is None
