"""`entmtp recalibrate`: a bank measured again, beside the old one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from toy_bank import Built, run

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.bank import Bank
from entmtp_calib.records import CANDIDATES_SCHEMA


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files, also of the parts that an earlier command may have left."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_trees_are_measured_again_and_the_old_bank_stays(built: Built) -> None:
    before = contents(built.folder)
    result = run("recalibrate", built.folder, "--max-new-tokens", "9", "--select-prompts", "3")
    assert result.exit_code == 0, result.output
    place = built.folder.with_name("run-recalibrated")
    assert result.stdout.endswith(f"run folder  {place}\n")
    assert contents(built.folder) == before
    RunFolder.open(place).verify()
    again, first = Bank.load(place), Bank.load(built.folder)
    assert set(again.trees) <= set(first.trees)
    assert len(again.splits["select"]) == 3
    table = RunFolder.open(place).read_table("candidates.parquet", CANDIDATES_SCHEMA)
    assert {tree.id for tree in first.trees} <= set(table.column("tree").to_pylist())


@pytest.mark.parametrize("flag", ["--data", "--max-new-tokens", "--out"])
def test_a_run_without_a_bank_takes_no_changes(flag: str, tmp_path: Path) -> None:
    result = run("recalibrate", tmp_path, flag, "5")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert flag in result.stderr


def test_the_old_folder_is_refused_as_the_new_one(built: Built) -> None:
    result = run("recalibrate", built.folder / "bank.safetensors", "--out", built.folder)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--out" in result.stderr


def test_another_task_does_not_keep_the_data_of_the_old_one(built: Built) -> None:
    sizes = ["--search-prompts", "100000"]
    result = run("recalibrate", built.folder, "--task", "gsm8k", *sizes)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert "100000" in result.stderr.replace(",", "")
    assert "[id].jsonl" not in result.stderr


def test_a_bank_that_is_missing_or_damaged_is_one_line(built: Built, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(built.folder, copy)
    data = (copy / "bank.safetensors").read_bytes()
    (copy / "bank.safetensors").write_bytes(data[:-1])
    for bank in (copy, tmp_path / "nothing"):
        result = run("recalibrate", bank)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert str(bank) in result.stderr
