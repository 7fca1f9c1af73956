"""`entmtp rollout`, `grow`, `recalibrate` and `time`: build-bank in pieces, and interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy_bank import Built, run

from entmtp_calib.decoding import Decoder


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

    trace = rolled_out / "trace.parquet"
    before = trace.stat().st_mtime_ns
    generate, calls = Decoder.generate, 0

    def interrupt(self: Decoder, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return generate(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", interrupt)
        stopped = run("recalibrate", rolled_out)
    assert stopped.exit_code == 130
    assert stopped.stderr == "entmtp: interrupted; run the same command again to resume\n"
    assert not (rolled_out / "candidates.parquet").exists()

    live = document("recalibrate", rolled_out)["candidates"]
    assert {row["tree"] for row in live} >= {"plain", "chain-4", "hydra-default"}
    timed = document("time", rolled_out)
    assert {tree["id"] for tree in timed["trees"]} >= {"plain", "hydra-default"}
    assert timed["bank"] is None
    assert run("build-bank", *built.arguments, "--out", rolled_out).exit_code == 0
    assert trace.stat().st_mtime_ns == before
    for name in ("trace.parquet", "grown.parquet", "candidates.parquet"):
        assert (rolled_out / name).read_bytes() == (built.folder / name).read_bytes(), name


def test_a_stage_of_a_complete_run_changes_nothing(built: Built) -> None:
    before = {path: path.read_bytes() for path in built.folder.iterdir()}
    assert document("grow", built.folder)["frontier"]
    assert {path: path.read_bytes() for path in built.folder.iterdir()} == before


@pytest.mark.parametrize("command", ["grow", "time"])
def test_a_folder_without_a_run_is_one_line(command: str, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "[/y]"):
        result = run(command, folder)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert str(folder) in result.stderr
