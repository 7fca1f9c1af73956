"""`entmtp signals`: a table of every signal, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recorded_run import save_run, text_trace, timing_rows
from toy_bank import Built, run

from entmtp_calib.policy import Static
from entmtp_calib.tree import EMPTY, chain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    policies = {"static": Static(1), "other": Static(2)}
    trees = [EMPTY, chain(1), chain(3)]
    return save_run(tmp_path / "[/y]", text_trace(), trees, policies, timing_rows(1.0))


def test_the_table_has_a_row_per_signal_and_says_what_it_is_of(folder: Path) -> None:
    result = run("signals", folder)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = {words[0]: words for words in lines[1:24]}
    assert rows["chain_value:3"][-3:] == ["2.000", "20", "%"]  # two levels of 1 ms, in 10 ms
    assert rows["running:entropy"][-3:] == ["0.000", "0", "%"]
    assert len(rows) == 1 + 2 * (2 + 3 * 3)
    for words in (
        "the draft tokens that chain-3 accepts",
        "where chain-3 accepts more than chain-1",
        "plain step  10.000 ms",
        "data        twelve texts",
        "3 prompts of the report split",
        "costs       timing.parquet (a processor, 2 cores), at ",
        f"bank        {folder}",
    ):
        assert words in result.stdout


def test_json_has_the_same_figures(folder: Path) -> None:
    document = json.loads(run("signals", folder, "--split", "select", "--json", "-").stdout)
    assert (document["split"], document["prompts"]) == ("select", 3)
    assert (document["small_tree"], document["large_tree"]) == ("chain-1", "chain-3")
    row = next(row for row in document["signals"] if row["signal"] == "path_value:2")
    assert row["auroc_low"] <= row["auroc"] <= row["auroc_high"]
    assert row["drafted_ahead_ms"] == pytest.approx(1)


def test_where_every_draft_is_right_nothing_can_be_told(built: Built) -> None:
    result = run("signals", built.folder)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split()[:3] == ["acceptance_average", "-", "-"]
    document = json.loads(run("signals", built.folder, "--json", "-").stdout)
    assert {row["rank_correlation"] for row in document["signals"]} == {None}


def test_an_unknown_split_is_a_usage_error(folder: Path) -> None:
    result = run("signals", folder, "--split", "train")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--split train" in result.stderr


def test_a_missing_table_is_one_line(folder: Path) -> None:
    (folder / "timing.parquet").unlink()
    result = run("signals", folder)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "make it with entmtp time" in result.stderr
