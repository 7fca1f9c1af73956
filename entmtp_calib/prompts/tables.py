"""CSV, Parquet and Arrow tables as streams of rows of plain Python values.

Plain values, so that a list column is a list whatever wrote it: nulls stay None, lists stay
lists, and the tasks cannot tell a table from a JSON file. This module knows no task.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from entmtp_calib.errors import DataError
from entmtp_calib.prompts.json_rows import ROW_BYTES, byte_lines, not_utf8

ROWS_AT_ONCE = 256


def csv_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Rows of a CSV file with a header line as (place, fields)."""
    before = csv.field_size_limit(ROW_BYTES)
    row = 0
    try:
        reader = csv.DictReader(_text_lines(stream, name), strict=True)
        for row, fields in enumerate(reader, 1):
            if None in fields or None in fields.values():
                count = len(reader.fieldnames or ())
                found = f"{name}, row {row} (line {reader.line_num}): more or fewer cells"
                raise DataError(found, f"{count}, as in the header")
            yield f"row {row}", fields
    except csv.Error as error:
        raise DataError(f"{name}, row {row + 1}: not valid CSV ({error})") from error
    finally:
        csv.field_size_limit(before)


def _text_lines(stream: BinaryIO, name: str) -> Iterator[str]:
    for line, raw in byte_lines(stream, name):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(name, f"line {line}") from error


def parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a Parquet file as (place, fields)."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            batches = table.iter_batches(batch_size=ROWS_AT_ONCE)
            yield from _numbered(row for batch in batches for row in batch.to_pylist())
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is not a readable Parquet file ({error})",
            action="fetch or write the file again",
        ) from error


def saved_rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """Rows of a folder written by `datasets.save_to_disk` as (place, fields)."""
    import datasets
    import pyarrow

    try:
        table = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{folder} is not a readable `save_to_disk` folder ({error})",
            action="save the data set again, or pass a Parquet or JSON file",
        ) from error
    if isinstance(table, datasets.DatasetDict):
        table = table[choose_split(list(table), str(folder))]
    yield from _numbered(table)


def arrow_rows(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Rows of the `datasets` library's cached Arrow files as (place, fields)."""
    import datasets
    import pyarrow

    def rows() -> Iterator[dict[str, Any]]:
        for path in files:
            try:
                yield from datasets.Dataset.from_file(str(path))
            except pyarrow.ArrowException as error:
                raise DataError(
                    f"{path} is damaged ({error})", action="delete it from the datasets cache"
                ) from error

    return _numbered(rows())


def choose_split(names: list[str], where: str) -> str:
    """The split to use when the task names none: `test`, or else the only one there is."""
    if "test" in names:
        return "test"
    if len(names) == 1:
        return names[0]
    raise DataError(
        f"{where} has the splits {', '.join(sorted(names)) or '(none)'}",
        expected="a split called test, or one split only",
        action="pass the folder or file of one split with --data",
    )


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for row, fields in enumerate(rows, 1):
        yield f"row {row}", fields
