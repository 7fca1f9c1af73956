"""`entmtp rollout`, `grow`, `recalibrate` and `time`: build-bank in pieces, and interrupted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from toy_bank import Built, interrupt_generating, run


@pytest.fixture(scope="module")
def rolled_out(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "run"
    result = run("rollout", *built.arguments, "--out", folder)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[:4] == [
        ["split", "prompts", "tokens"],
        ["search", "3", "36"],
        ["select", "2", "24"],
        ["report", "2", "24"],
    ]
    assert result.stdout.endswith(f"file  {folder / 'trace.parquet'}\n")
    return folder


def document(*arguments: object) -> Any:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_stages_one_by_one_and_interrupted_give_the_same_as_build_bank(
    rolled_out: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = run("grow", rolled_out)
    assert grown.exit_code == 0, grown.output
    assert "chain-4" in grown.stdout
    assert f"file      {rolled_out / 'grown.parquet'}\n" in grown.stdout
    assert re.search(r"^growing   [\d.e-]+ s for \d+ trees, by replay", grown.stdout, re.M)

    trace = rolled_out / "trace.parquet"
    before = trace.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        interrupt_generating(patch, 4)
        stopped = run("recalibrate", rolled_out)
    assert stopped.exit_code == 130
    assert stopped.stderr == "entmtp: interrupted; run the same command again to resume\n"
    assert not (rolled_out / "candidates.parquet").exists()

    live = document("recalibrate", rolled_out)["candidates"]
    assert {row["tree"] for row in live} >= {"plain", "hydra-default"}
    timed = document("time", rolled_out)
    assert {tree["id"] for tree in timed["trees"]} >= {"plain", "hydra-default"}
    assert timed["bank"] is None
    assert run("build-bank", *built.arguments, "--out", rolled_out).exit_code == 0
    assert trace.stat().st_mtime_ns == before
    for name in ("trace.parquet", "grown.parquet"):  # what runs live depends on measured costs
        assert (rolled_out / name).read_bytes() == (built.folder / name).read_bytes(), name


def test_a_stage_of_a_complete_run_changes_nothing(built: Built) -> None:
    before = {path: path.read_bytes() for path in built.folder.iterdir()}
    again = document("grow", built.folder)
    assert again["frontier"]
    assert again["seconds"] > 0
    assert {path: path.read_bytes() for path in built.folder.iterdir()} == before


LIVE = ("--score", "live", "--max-nodes", 3, "--max-depth", 2)


def test_growing_live_shows_both_ways_and_changes_nothing(built: Built) -> None:
    before = {path: path.read_bytes() for path in built.folder.iterdir() if path.is_file()}
    live = document("grow", built.folder, *LIVE)
    assert [(pair["max_depth"], pair["n_nodes"]) for pair in live["pairs"]] == [
        *((1, 1), (1, 2), (1, 3)),
        *((2, 1), (2, 2), (2, 3)),
    ]
    assert all(pair["equal"] and pair["live"] == pair["replay"] for pair in live["pairs"])
    assert live["pairs"][4]["live"]["paths"] == [[0], [0, 0]]
    assert (live["rollouts"], live["differing"]) == (4, 0)
    shown = run("grow", built.folder, *LIVE)
    assert shown.exit_code == 0
    assert "all 6 are equal" in shown.stdout
    assert "s, 4 rollouts of 3 prompts\n" in shown.stdout
    assert {path: path.read_bytes() for path in built.folder.iterdir() if path.is_file()} == before


def test_ways_that_grow_different_trees_are_exit_code_1(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    from entmtp_calib.stages import grow_live

    monkeypatch.setattr(grow_live, "best_candidate", max)
    result = run("grow", built.folder, *LIVE)
    assert result.exit_code == 1
    assert [line.split()[-1] for line in result.stdout.splitlines()[5:7]] == ["NO", "NO"]
    assert "2 of 6 differ" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--score", "fast"), ("--max-nodes", "3"), ("--max-depth", "2", "--score", "replay")],
)
def test_a_flag_that_would_be_ignored_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result = run("grow", "no/run", *arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert arguments[0] in result.stderr


@pytest.mark.parametrize("command", ["grow", "time"])
def test_a_folder_without_a_run_is_one_line(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "[/y]"):
        result = run(command, folder)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert str(folder) in result.stderr
