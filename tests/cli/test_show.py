"""`entmtp show`, on a bank with hostile names and known figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from entmtp_calib.bank import Bank, BankEntry
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.timing import Interval
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree, chain

BRANCHED = Tree.of([[0], [1], [0, 0]])
MODEL = "model [/b] [red]List[int] :smile:"
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments])


def entry(tree: Tree, emitted: float, step_ms: float, tokens_per_second: float) -> BankEntry:
    return BankEntry(
        tree,
        Interval(emitted - 0.25, emitted, emitted + 0.25),
        step_ms,
        Interval(tokens_per_second - 1, tokens_per_second, tokens_per_second + 1),
        Interval(float("-inf"), tokens_per_second / 40, float("inf")),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a bank of three trees and one off the frontier."""
    path = tmp_path / "[id] [/y]"
    path.mkdir(parents=True)
    Bank(
        task="gsm8k",
        model={"name": MODEL, "fingerprint": "ab" * 32},
        heads={"kind": "hydra", "n_heads": 4},
        entries=(
            entry(EMPTY, 1.0, 24.8123, 40.0),
            entry(chain(2), 1.75, 1234567.5, 50.0),
            entry(BRANCHED, 2.0, 29.0, 60.0),
        ),
        extras=(replace(entry(chain(1), 1.5, 26.0, 1.0), tokens_per_second=UNKNOWN),),
        policies={
            "static": Static(2),
            "ladder": Ladder(SignalSpec("path_value", 2), (0.25, 0.5), (0, 1, 2)),
            "hysteresis": Hysteresis(SignalSpec("entropy", running=True), 1, 2, -0.5, -1.0),
            "staged": Staged(((), (0.5,), (0.125,)), ((DRAFT_ON,), (0, DRAFT_ON), (3, 2))),
        },
        auto="ladder",
        best=2,
        hardware={"cpu": "a processor", "usable_cores": 2},
        splits={"search": ["a", "b"], "select": ["c"]},
        seeds={"splits": 7},
        notes=("the bundled prompts",),
    ).save(path / "bank.safetensors")
    return path


def test_a_bank_is_shown_with_all_its_figures(folder: Path) -> None:
    result = run(str(folder))
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][:3] == ["plain", "0", "0"]
    assert "1.750 [1.500, 2.000]" in result.stdout
    assert "1234567.500" in result.stdout
    assert "1.500 [-inf, inf]" in result.stdout
    assert lines[3][:4] == [BRANCHED.id, "*", "3", "2"]
    assert lines[4] == [
        *("chain-1", "+", "1", "1", "1.500", "[1.250,", "1.750]", "0.500", "26.000", "-"),
        *("0.025", "[-inf,", "inf]"),
    ]
    for fact in (
        "* in use with --policy static: the fastest fixed tree",
        "+ off the frontier: for policies, where it pays",
        f"policy static      always {BRANCHED.id}",
        f"policy ladder      path_value:2: plain, above 0.25 chain-2, above 0.5 {BRANCHED.id}",
        f"running:entropy: chain-2, with {BRANCHED.id} on above -0.5, off at -1 and below",
        "policy staged      draft on; level 1: plain, above 0.5 draft on; "
        f"level 2: chain-1, above 0.125 {BRANCHED.id}",
        "policy auto        ladder",
        "search 2, select 1",
        "splits 7",
        "fingerprint abababababab",
        "the bundled prompts",
    ):
        assert fact in result.stdout


@pytest.mark.parametrize("columns", ["20", "500"])
def test_what_is_printed_does_not_depend_on_the_width_of_a_terminal(
    folder: Path, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(str(folder)).stdout
    monkeypatch.setenv("COLUMNS", columns)
    assert run(str(folder)).stdout == usual
    assert MODEL in usual
    assert "…" not in usual
    assert "\x1b" not in usual


def test_the_file_and_its_folder_are_the_same_bank(folder: Path) -> None:
    assert run(str(folder / "bank.safetensors")).stdout == run(str(folder)).stdout


@pytest.mark.parametrize("name", [BRANCHED.id, "2"])
def test_a_tree_of_a_bank_is_drawn(folder: Path, name: str) -> None:
    drawing = f"{BRANCHED.id}: 3 nodes, depth 2\nroot\n├─ 0\n│  └─ 0\n└─ 1\n"
    assert run(str(folder), "--tree", name).stdout == drawing
    assert run("[[0], [1], [0, 0]]").stdout == drawing


@pytest.mark.parametrize("name", ["chain-1", "3"])
def test_a_tree_off_the_frontier_is_drawn_too(folder: Path, name: str) -> None:
    assert run(str(folder), "--tree", name).stdout == run("chain-1").stdout


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("plain", EMPTY),
        ("chain-3", chain(3)),
        ("hydra-default", HYDRA_DEFAULT),
        ("medusa2-default", MEDUSA2_DEFAULT),
    ],
)
def test_a_tree_has_a_name(name: str, tree: Tree) -> None:
    document = json.loads(run(name, "--json", "-").stdout)
    assert document["id"] == name
    assert Tree.of(document["paths"]) == tree


def test_medusas_default_is_hydras() -> None:
    assert run("medusa-default").stdout == run("hydra-default").stdout


def test_a_bank_without_extras_says_nothing_of_them(folder: Path) -> None:
    bank = Bank.load(folder)
    plain = replace(bank, extras=(), policies={"static": Static(2)}, auto="static")
    plain.save(folder / "bank.safetensors")
    shown = run(str(folder)).stdout
    assert "off the frontier" not in shown
    assert "policy auto    static" in shown


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_alone_on_stdout_and_has_the_figures(folder: Path) -> None:
    document = strict(run(str(folder), "--json", "-").stdout)
    assert [tree["step_ms"] for tree in document["trees"]] == [24.8123, 1234567.5, 29.0]
    assert document["trees"][2]["paths"] == [[0], [1], [0, 0]]
    assert document["trees"][2]["speedup_over_plain_interval"] == [None, None]
    (extra,) = document["extra_trees"]
    assert (extra["paths"], extra["tokens_per_second"]) == ([[0]], None)
    assert document["policies"]["staged"]["actions"] == [[-1], [0, -1], [3, 2]]
    assert document["auto"] == "ladder"


def test_json_in_a_file_goes_with_the_table(folder: Path, tmp_path: Path) -> None:
    result = run(str(folder), "--json", str(tmp_path / "bank.json"))
    assert result.stdout == run(str(folder)).stdout
    document = strict((tmp_path / "bank.json").read_text(encoding="utf-8"))
    assert document == strict(run(str(folder), "--json", "-").stdout)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "reason"),
    [
        (["no/such/bank"], 1, "neither a bank nor a tree"),
        (["[[0, 1]]"], 1, "parent missing"),
        (["[[0"], 1, "a list of paths"),
        (["chain-2", "--tree", "1"], 2, "--tree"),
        (["chain-2", "--json", "no/such/folder/file"], 1, "cannot write no/such/folder/file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], exit_code: int, reason: str) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr


def test_a_tree_that_the_bank_lacks_and_a_damaged_bank_are_one_line(folder: Path) -> None:
    assert "one of plain, chain-2" in run(str(folder), "--tree", "4").stderr
    (folder / "bank.safetensors").write_bytes(b"short")
    result = run(str(folder))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert str(folder) in result.stderr
