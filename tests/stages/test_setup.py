"""An opened run: what it refuses before it works, and what its folder is called after."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_bank import save_inputs

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.config import BuildConfig
from entmtp_calib.errors import TreeError
from entmtp_calib.files import read_json, write_json
from entmtp_calib.stages.setup import Inputs, open_run, reopen_run
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain

CONFIG = BuildConfig(
    task="custom", search_prompts=2, select_prompts=1, report_prompts=1, max_new_tokens=8
)
WIDE = Tree.of([[0], [1], [2]])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return save_inputs(tmp_path_factory.mktemp("setup"), n_heads=2, n_prompts=5)


def default_folder(inputs: Inputs, user_trees: dict[Tree, str] | None = None) -> Path:
    with open_run(CONFIG, inputs, user_trees=user_trees).folder as folder:
        return folder.path


def test_a_runs_folder_is_named_by_the_users_trees_not_by_their_names_or_order(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = default_folder(inputs)
    assert default_folder(inputs, {}) == without
    one = default_folder(inputs, {WIDE: "mine"})
    both = default_folder(inputs, {WIDE: "mine", chain(2): "deep"})
    assert len({without, one, both}) == 3
    assert default_folder(inputs, {chain(2): "2", WIDE: "other"}) == both


def test_a_reopened_run_has_the_users_trees_and_an_older_one_has_none(
    inputs: Inputs, tmp_path: Path
) -> None:
    mine = {WIDE: "[red]mine", chain(2): "deep"}
    for trees, place in ((mine, tmp_path / "mine"), (None, tmp_path / "older")):
        with open_run(CONFIG, inputs, place, user_trees=trees).folder:
            pass
        with (again := reopen_run(place)).folder:
            assert again.user_trees == (trees or {})
            assert list(again.user_trees) == list(trees or {})
    assert "user_trees" not in RunFolder.open(tmp_path / "older").config
    damaged = read_json(tmp_path / "mine" / "run.json")
    damaged["config"]["user_trees"] = [{"name": "mine", "paths": [[0, 0]]}]
    write_json(tmp_path / "mine" / "run.json", damaged)
    with pytest.raises(TreeError, match="parent missing"):
        reopen_run(tmp_path / "mine")


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (chain(3), r"\[red\]mine: tree chain-3 has depth 3, and there are 2 heads"),
        (HYDRA_DEFAULT, r"\[red\]mine: tree hydra-default has depth 4"),
        (Tree.of([[12]]), r"\[red\]mine: tree .* uses child rank 12; expected ranks below 10"),
    ],
)
def test_a_tree_that_the_heads_cannot_draft_is_refused_by_the_users_name(
    tree: Tree, problem: str, inputs: Inputs, tmp_path: Path
) -> None:
    with pytest.raises(TreeError, match=problem):
        open_run(CONFIG, inputs, tmp_path / "run", user_trees={tree: "[red]mine"})
    assert not (tmp_path / "run").exists()
