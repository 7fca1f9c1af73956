"""`--trees` of build-bank and rollout: a user's trees are measured beside the grown ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_bank import Built, interrupt_generating, run

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import Bank
from entmtp_calib.decoding import Decoder
from entmtp_calib.records import CANDIDATES_SCHEMA, POLICIES_SCHEMA
from entmtp_calib.stages.recorded import candidate_trees, user_trees_of
from entmtp_calib.tree import HYDRA_DEFAULT, Tree, chain

WIDE = Tree.of([*([rank] for rank in range(12)), [0, 3], [0, 3, 0]])
NAMES = {WIDE.id: "[red]mine", chain(2).id: "two", HYDRA_DEFAULT.id: "mc_sim_7b_63"}
SHOWN = {f"{tree} ({name})" for tree, name in NAMES.items()}
DEEP = [[0] * length for length in range(1, 6)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The option with two files: a tree that none grows, and two that stand in the table anyway."""
    folder = tmp_path_factory.mktemp("trees")
    own, others = folder / "[red]mine.json", folder / "choices.py"
    own.write_text(str(WIDE.to_list()), encoding="utf-8")
    lines = [("two", chain(2)), ("mc_sim_7b_63", HYDRA_DEFAULT), ("again", WIDE)]
    text = "".join(f"{name} = {tree.to_list()}\n" for name, tree in lines)
    others.write_text(text, encoding="utf-8")
    return ["--trees", own, "--trees", others]


@pytest.fixture(scope="module")
def beside(built: Built, files: list[object], tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("beside")
    arguments = [*built.arguments, *files]
    document = folder / "bank.json"
    result = run("build-bank", *arguments, "--out", folder / "run", "--json", document)
    assert result.exit_code == 0, result.output
    return Built(folder / "run", arguments, result.stdout, document)


def labels(shown: str) -> list[str]:
    """The first column of what is on screen; figures stand two blanks behind it."""
    return [line.split("  ")[0] for line in shown.splitlines()]


def candidates(folder: Path) -> dict[str, dict[str, Any]]:
    table = RunFolder.open(folder).read_table("candidates.parquet", CANDIDATES_SCHEMA)
    rows = table.to_pylist()
    found = {row["tree"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_they_stand_in_the_table_under_the_users_names_each_once(beside: Built) -> None:
    first = labels(beside.stdout)
    trees = first[1 : first.index("")]
    assert {label for label in trees if "(" in label} == SHOWN
    assert len(set(trees)) == len(trees)
    document = json.loads(beside.document.read_text(encoding="utf-8"))
    names = {tree["id"]: tree["name"] for tree in document["trees"]}
    assert {tree: name for tree, name in names.items() if name} == NAMES
    assert len(names) == len(document["trees"]) == len(trees)


def test_each_ran_live_and_one_that_was_also_grown_keeps_its_joint_score(beside: Built) -> None:
    rows = candidates(beside.folder)
    # Perfect heads: as deep as the chain of first choices in the tree, in texts of 12 tokens.
    emitted = {WIDE: 2.0, chain(2): 3.0, HYDRA_DEFAULT: 4.0}
    for tree, tokens in emitted.items():
        assert rows[tree.id]["recalibrated_emitted"] == tokens
        assert rows[tree.id]["replay_emitted"] == tokens
    assert rows[WIDE.id]["joint_emitted"] is None
    assert rows[chain(2).id]["joint_emitted"] is not None


def test_they_run_on_the_report_split_beside_the_policies(beside: Built) -> None:
    table = RunFolder.open(beside.folder).read_table("policies.parquet", POLICIES_SCHEMA)
    rows = {row["policy"]: row for row in table.to_pylist()}
    assert list(rows) == [
        "plain",
        *Bank.load(beside.folder).policies,
        "hydra-default",
        *(tree for tree in NAMES if tree != "hydra-default"),
    ]
    assert rows[WIDE.id]["mean_emitted_tokens"] == 2.0
    assert rows[WIDE.id]["tokens_per_second_predicted"] > 0
    first = labels(beside.stdout)
    assert set(first[first.index("policy") :]) >= SHOWN


def test_a_policy_may_be_made_of_them(beside: Built) -> None:
    assert {WIDE, HYDRA_DEFAULT} <= set(candidate_trees(RunFolder.open(beside.folder)))
    trees = candidate_trees(RunFolder.open(beside.folder))
    assert len(set(trees)) == len(trees)


def test_the_same_command_again_computes_nothing(
    beside: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a finished stage ran again")

    before = {p: p.read_bytes() for p in beside.folder.iterdir() if p.name != "manifest.json"}
    monkeypatch.setattr(Decoder, "generate", refuse)
    result = run("build-bank", *beside.arguments, "--out", beside.folder)
    assert result.exit_code == 0, result.output
    assert before == {p: p.read_bytes() for p in before}


def test_a_run_in_pieces_knows_them_without_the_files(
    built: Built, files: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert run("rollout", *built.arguments, *files, "--out", folder).exit_code == 0
    assert run("grow", folder).exit_code == 0
    with monkeypatch.context() as patch:
        interrupt_generating(patch, 9)
        assert run("recalibrate", folder).exit_code == 130
    live = run("recalibrate", folder, "--json", "-")
    rows = json.loads(live.stdout)["candidates"]
    assert {row["tree"]: row["name"] for row in rows if row["name"]} == NAMES
    first = set(labels(run("recalibrate", folder).stdout))
    assert first >= SHOWN
    timed = set(labels(run("time", folder).stdout))
    assert timed >= SHOWN


def test_a_bank_that_is_measured_again_still_has_them_beside_it(beside: Built) -> None:
    result = run("recalibrate", beside.folder, "--max-new-tokens", "9")
    assert result.exit_code == 0, result.output
    place = beside.folder.with_name("run-recalibrated")
    assert user_trees_of(RunFolder.open(place)) == user_trees_of(RunFolder.open(beside.folder))
    assert {row["tree"] for row in candidates(place).values()} >= set(NAMES)
    first = set(labels(result.stdout))
    assert first >= SHOWN


def test_a_run_without_them_says_nothing_of_them(built: Built) -> None:
    folder = RunFolder.open(built.folder)
    assert "user_trees" not in folder.config
    assert user_trees_of(folder) == {}


@pytest.mark.parametrize("command", ["build-bank", "rollout"])
def test_trees_that_cannot_be_used_are_one_line_before_anything_is_loaded(
    command: str, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    for name in ("load_prompts", "load_target"):
        monkeypatch.setattr(f"entmtp_calib.stages.setup.{name}", refuse)
    file = tmp_path / "[red]mine.json"
    for written, problem in (
        (DEEP, "[0, 0, 0, 0, 0] has depth 5, and there are 4 heads"),
        ([[0], [40]], "[40] has child rank 40, and the heads rank 32 choices"),
        ([[0], [1, 0], [0, 0]], "[1, 0] lacks its parent [1]"),
        ([[n] for n in range(1025)], "[red]mine has 1025 nodes; expected at most 1024 nodes"),
        ({}, "there is no tree in it"),
    ):
        file.write_text(json.dumps(written), encoding="utf-8")
        result = run(command, *built.arguments, "--trees", file, "--out", tmp_path / "run")
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
        assert result.stderr.startswith(f"entmtp: {file}: ")
        assert problem in result.stderr
        assert not (tmp_path / "run").exists()
    missing = run(command, *built.arguments, "--trees", tmp_path / "missing")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)
    assert "missing" in missing.stderr
