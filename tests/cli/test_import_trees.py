"""`entmtp import-trees`: a table and a file of ours, or a line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_bank import Built, run

from entmtp_calib.stages.import_trees import import_trees
from entmtp_calib.tree import Tree, chain

MEDUSA = """mc_sim = [[0], [1], [0, 0]]
deep = [[0], [0, 0], [0, 0, 0]]
"""


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    file = tmp_path / "[red]choices.py"
    file.write_text(MEDUSA, encoding="utf-8")
    return file


def heads_of(built: Built) -> object:
    arguments = list(built.arguments)
    return arguments[arguments.index("--heads") + 1]


def test_trees_go_into_a_file_beside_a_table(choices: Path, tmp_path: Path) -> None:
    out = tmp_path / "trees.json"
    result = run("import-trees", choices, "--out", out)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][0] == "mc_sim"
    assert lines[2] == ["deep", "chain-3", "3", "3", "medusa"]
    assert import_trees(out).trees == [
        ("mc_sim", Tree.of([[0], [1], [0, 0]])),
        ("deep", chain(3)),
    ]


def test_without_a_file_the_json_is_alone_on_stdout(choices: Path) -> None:
    result = run("import-trees", choices, "--tree", "deep")
    document = json.loads(result.stdout)
    assert document["source"] == str(choices)
    assert [tree["paths"] for tree in document["trees"]] == [[[0], [0, 0], [0, 0, 0]]]


def test_leaves_are_taken_for_what_they_imply_and_this_is_said(tmp_path: Path) -> None:
    file = tmp_path / "leaves.txt"
    file.write_text('--medusa_choices="[[0, 0], [1]]"', encoding="utf-8")
    result = run("import-trees", file)
    assert json.loads(result.stdout)["trees"][0]["n_nodes"] == 3
    assert result.stderr == "note: leaves lists leaves, which imply 1 more nodes\n"


def test_trees_that_the_heads_can_draft_pass(choices: Path, built: Built) -> None:
    result = run("import-trees", choices, "--heads", heads_of(built))
    assert result.exit_code == 0, result.output


def test_every_problem_is_its_own_line(tmp_path: Path, built: Built) -> None:
    file = tmp_path / "[red]mine.json"
    file.write_text("[[0], [0, 1, 0], [99], [0, 0], [0, 0, 0, 0, 0]]", encoding="utf-8")
    result = run("import-trees", file, "--heads", heads_of(built))
    assert (result.exit_code, result.stdout) == (1, "")
    name = "[red]mine"
    assert result.stderr.splitlines() == [
        f"entmtp: {name}: [0, 1, 0] lacks its parent [0, 1]",
        f"entmtp: {name}: [99] has child rank 99, and the heads rank 32 choices",
        f"entmtp: {name}: [0, 0, 0, 0, 0] has depth 5, and there are 4 heads",
        f"entmtp: {name}: [0, 0, 0, 0, 0] lacks its parent [0, 0, 0, 0]",
        f"entmtp: {file}: {name}: [0, 1, 0] lacks its parent [0, 1] and 3 more; "
        "correct the file, or take one of its trees with entmtp import-trees --tree",
    ]


def test_a_single_problem_is_one_line_and_many_are_not_all_told(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text("[[0], [0, 0], [1, 0]]", encoding="utf-8")
    assert run("import-trees", file).stderr.count("\n") == 1
    file.write_text(str([[0], *([n, 0] for n in range(900))]), encoding="utf-8")
    result = run("import-trees", file)
    assert result.stderr.count("\n") == 21
    assert "and 898 more" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (("--format", "tree"), 2, "--format tree; expected one of dense, medusa"),
        (("--format", "dense"), 1, "mc_sim is written as medusa; expected dense"),
        (("--tree", "tall"), 1, "has no tree 'tall'; expected one of mc_sim, deep"),
        (("--heads", "no/such/folder"), 1, "no/such/folder has no heads.json"),
        (("--out", "/proc/no/file"), 1, "cannot write /proc/no/file"),
    ],
)
def test_what_cannot_be_imported_is_one_line(
    arguments: tuple[str, ...], exit_code: int, words: str, choices: Path
) -> None:
    result = run("import-trees", choices, *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (exit_code, 1)
    assert words in result.stderr


def test_a_file_without_trees_is_one_line(tmp_path: Path) -> None:
    result = run("import-trees", tmp_path / "missing")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    (tmp_path / "words").write_text("no tree", encoding="utf-8")
    result = run("import-trees", tmp_path / "words")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert str(tmp_path / "words") in result.stderr
