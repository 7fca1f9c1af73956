"""Import of a file: its trees by name, checked against heads, as a file of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import save_run, text_trace, timing_rows

from entmtp_calib.errors import ArtifactError, HeadsError, TreeError
from entmtp_calib.files import write_json
from entmtp_calib.formats.engines import FORMS
from entmtp_calib.formats.reading import Limits
from entmtp_calib.policy import Static
from entmtp_calib.stages.export import export
from entmtp_calib.stages.import_trees import head_limits, import_trees
from entmtp_calib.tree import EMPTY, Tree, chain

CHOICES = "deep = [[0], [0, 0], [0, 0, 0]]\nwide = [[0], [1], [2]]\n"


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    file = tmp_path / "[red]choices.py"
    file.write_text(CHOICES, encoding="utf-8")
    return file


def save_description(folder: Path, **changes: object) -> Path:
    """What `heads.json` says of two heads over 40 tokens, of which 3 can be drafted."""
    sizes = {"n_heads": 2, "hidden_size": 8, "vocab_size": 40, "draft_vocab_size": 3}
    folder.mkdir()
    description = {"format_version": 1, "architecture": {"kind": "hydra"} | sizes | changes}
    (folder / "heads.json").write_text(json.dumps(description), encoding="utf-8")
    return folder


def test_a_file_of_ours_is_made_of_a_users_own(choices: Path, tmp_path: Path) -> None:
    found = import_trees(choices)
    write_json(tmp_path / "trees.json", found.document())
    again = import_trees(tmp_path / "trees.json")
    assert again.trees == [("deep", chain(3)), ("wide", Tree.of([[0], [1], [2]]))]
    assert again.document()["trees"] == found.document()["trees"]


def test_one_tree_of_a_file_can_be_taken_by_name(choices: Path) -> None:
    assert [each.tree for each in import_trees(choices, only="deep").listed] == [chain(3)]
    with pytest.raises(TreeError, match="has no tree 'tall'; expected one of deep, wide"):
        import_trees(choices, only="tall")


def test_trees_are_checked_against_heads(choices: Path, tmp_path: Path) -> None:
    heads = save_description(tmp_path / "heads", draft_vocab_size=2)
    found = import_trees(choices, heads=heads)
    assert found.problems == [
        "deep: [0, 0, 0] has depth 3, and there are 2 heads",
        "wide: [2] has child rank 2, and the heads rank 2 choices",
    ]
    with pytest.raises(TreeError, match=r"deep: \[0, 0, 0\] has depth 3.* and 1 more"):
        found.document()


def test_the_limits_of_heads_are_in_their_description_alone(tmp_path: Path) -> None:
    assert head_limits(save_description(tmp_path / "few")) == Limits(2, 3)
    assert head_limits(save_description(tmp_path / "all", draft_vocab_size=None)) == Limits(2, 32)
    with pytest.raises(HeadsError, match="does not describe heads"):
        head_limits(save_description(tmp_path / "odd", layers=3))
    with pytest.raises(HeadsError, match=r"has no heads\.json"):
        head_limits(tmp_path)


def test_errors_name_the_file(choices: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read .*missing"):
        import_trees(tmp_path / "missing")
    choices.write_text("nothing here", encoding="utf-8")
    with pytest.raises(TreeError) as error:
        import_trees(choices)
    assert str(choices) in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_exported_is_imported(form: str, tmp_path: Path) -> None:
    trees = [EMPTY, Tree.of([[0], [1], [0, 0]]), chain(2)]
    run = save_run(tmp_path / "run", text_trace(), trees, {"static": Static(2)}, timing_rows(0.1))
    file = tmp_path / "exported.txt"
    file.write_bytes(export(run, form).content)
    found = import_trees(file)
    assert chain(2) in [each.tree for each in found.listed]
    assert not found.problems
    # Lists of nodes look alike.
    assert {each.form for each in found.listed} == {
        {"trtllm-bench": "medusa", "vllm-tree": "medusa", "eagle": "medusa"}.get(form, form)
    }
