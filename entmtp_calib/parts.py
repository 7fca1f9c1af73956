"""Finished parts of a stage's work, kept until the stage is done, so that it can be resumed.

This module does not know what the parts hold, nor which of them belong together.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from entmtp_calib import files

if TYPE_CHECKING:
    import pyarrow as pa


class Parts:
    """Numbered results of one stage's work, each whole or absent, so that it can be resumed.

    A number has a table, a JSON value, or both. With each goes the time that all have taken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._clock = path / "seconds.json"
        earlier = float(files.read_json(self._clock)) if self._clock.exists() else 0.0
        self._started = perf_counter() - earlier

    @property
    def seconds(self) -> float:
        """What the work has taken, that of earlier tries included as far as it was kept."""
        return perf_counter() - self._started

    def tables(self) -> list[int]:
        """The numbers that have a table, rising."""
        return self._numbers("parquet")

    def values(self) -> list[int]:
        """The numbers that have a JSON value, rising."""
        return self._numbers("json")

    def write_table(self, number: int, table: pa.Table) -> None:
        files.write_table(self._file(number, "parquet"), table)
        files.write_json(self._clock, self.seconds)

    def read_table(self, number: int, schema: pa.Schema) -> pa.Table:
        return files.read_table(self._file(number, "parquet"), schema)

    def write_json(self, number: int, value: Any) -> None:
        files.write_json(self._file(number, "json"), value)
        files.write_json(self._clock, self.seconds)

    def read_json(self, number: int) -> Any:
        return files.read_json(self._file(number, "json"))

    def _file(self, number: int, kind: str) -> Path:
        return self.path / f"{number:06d}.{kind}"

    def _numbers(self, kind: str) -> list[int]:
        return sorted(int(path.stem) for path in self.path.glob(f"[0-9]*.{kind}"))
