"""Our own file of trees, written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entmtp_calib.errors import ArtifactError
from entmtp_calib.files import write_json
from entmtp_calib.formats.trees_file import read_trees, trees_document
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain


def test_trees_read_back_each_once_in_their_order(tmp_path: Path) -> None:
    wide = Tree.of([[0], [1]])
    named = [("mine", wide), ("chain", chain(2)), ("again", wide), ("hydra", HYDRA_DEFAULT)]
    write_json(tmp_path / "trees.json", trees_document(named, "medusa.py"))
    assert read_trees(tmp_path / "trees.json") == [wide, chain(2), HYDRA_DEFAULT]


def test_the_file_names_every_tree_and_its_source() -> None:
    document = trees_document([("mine", chain(2))], "medusa.py")
    assert document["source"] == "medusa.py"
    assert document["trees"] == [
        {"name": "mine", "id": "chain-2", "n_nodes": 2, "depth": 2, "paths": [[0], [0, 0]]}
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"trees": None}, "nothing usable under trees"),
        ({"trees": [{"paths": [[0, 1]]}]}, r"tree 0: the tree has parent missing"),
        ({"trees": [{"paths": [["0"]]}]}, "tree 0: .*is not a path"),
        ({"trees": [{}]}, "tree 0: no paths"),
        ({"trees": [7]}, "tree 0: no paths"),
    ],
)
def test_a_file_that_is_not_ours_or_damaged_is_one_error(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "trees.json"
    write_json(path, trees_document([("mine", chain(2))], "medusa.py") | change)
    with pytest.raises(ArtifactError, match=problem) as error:
        read_trees(path)
    assert str(path) in str(error.value)


def test_a_users_own_list_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "medusa.json"
    path.write_text("[[0], [1]]", encoding="utf-8")
    with pytest.raises(ArtifactError, match="not a JSON object"):
        read_trees(path)
