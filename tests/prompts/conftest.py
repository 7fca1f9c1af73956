"""Shared by the prompt tests: no network, an empty cache, and a way to write rows in any format."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty-hf-home"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(rows, name)` writes rows in the format of the name, or bytes as they are."""

    def write_file(rows: Any, name: str) -> Path:
        path = tmp_path / name
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines(rows)))
        elif name.endswith(".jsonl"):
            path.write_bytes(lines(rows))
        elif name.endswith(".parquet"):
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
        elif name.endswith(".csv"):
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
        return path

    return write_file


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
