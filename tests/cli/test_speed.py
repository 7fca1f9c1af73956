"""`benchmarks/speed.py` from a bank to its table, on toys."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest
import speed
import steps
from toy_bank import Built

SIZES = "--prompts 2 --tokens 6 --context 16 --rows 2 4 --rounds 2".split()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "READ_BYTES", 2**16)
    monkeypatch.setattr(steps, "SIDE", 16)
    monkeypatch.setattr(peers, "installed", lambda: None)


def test_all_parts_stand_in_one_table_and_in_json(
    built: Built,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "speed.json"
    arguments = ["--bank", str(built.folder), "--json", str(file), *SIZES]
    monkeypatch.setattr("sys.argv", ["speed.py", *arguments])
    assert speed.main() == 0
    table = capsys.readouterr().out.split("\n\n")[0].splitlines()
    document = json.loads(file.read_text())
    ours = [row for row in document["methods"] if row["claims_lossless"]]
    assert [row["rows"] for row in document["passes"]["rows"]] == [1, 2, 4]
    assert {row["method"] for row in ours} == {"plain", document["policy"]}
    assert all(row["texts_as_plain"] == row["texts"] == 2 for row in ours)
    assert {row["method"] for row in document["methods"] if row["error"]} == {peers.LLAMA}
    assert document["shares"].keys() == {"plain", document["policy"]}
    names = ["floor", "step of plain", "pass, rows: 4", "plain, a", peers.HALF, "xllamacpp"]
    assert all(any(name in line for line in table) for name in names)


def test_passes_alone_need_no_bank(
    cycle: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(cycle[cycle.index("--model") + 1])
    monkeypatch.setattr("sys.argv", ["speed.py", "--only", "passes", "--model", model, *SIZES])
    assert speed.main() == 0
    assert "a token" not in capsys.readouterr().out
