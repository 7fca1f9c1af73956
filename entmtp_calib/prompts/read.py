"""Any data file or folder as a stream of rows; the content decides on the format, not the name.

JSON lines named .json, an array named .jsonl, either of them compressed: all are common, so the
first bytes are looked at. Only CSV, which has no mark of its own, goes by its name. Nothing in a
folder is ever executed. This module knows no task and no network.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entmtp_calib.errors import DataError
from entmtp_calib.prompts import json_rows, tables
from entmtp_calib.prompts.rows import Row, kind

DATA_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
FORMATS = "JSON, JSON lines (either also .gz), Parquet, or CSV with a name ending in .csv"
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "package.json", "config.json"}
GZIP_MARK, PARQUET_MARK, LFS_MARK = b"\x1f\x8b", b"PAR1", b"version https://git-lfs"
WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)


def is_data_name(name: str) -> bool:
    """Whether a name ends like a data file's."""
    return name.lower().removesuffix(".gz").endswith(DATA_SUFFIXES)


def read_rows(path: Path) -> Iterator[Row]:
    """All rows of a file or folder; a file that cannot be read to its end raises.

    Rows come one at a time, so an error may follow after good rows: use none before the last.
    """
    if path.is_dir():
        if is_saved(path):
            yield from named(tables.saved_rows(path), path)
            return
        path = only_file(path)
    yield from named(file_rows(path), path)


def named(rows: Iterator[tuple[str, Any]], source: Path | str) -> Iterator[Row]:
    """Rows that know their source and are known to be objects."""
    for place, fields in rows:
        if not isinstance(fields, dict):
            raise DataError(f"{source}, {place}: found {kind(fields)}", "a JSON object in each row")
        yield Row(f"{source}, {place}", fields)


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of one file as (place, value), with whatever format it has."""
    check_file(path)
    with _errors_named(path), path.open("rb") as file:
        head = file.peek(4)
        if head.startswith(PARQUET_MARK):
            yield from tables.parquet_rows(path)
        elif head.startswith(GZIP_MARK):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield from _text_rows(io.BufferedReader(unpacked), path)
        elif path.name.lower().endswith(".gz"):
            found = f"{path}, byte 1: not gzip data (it starts with {head[:12]!r})"
            raise DataError(found, "a gzip file", "compress it, or drop .gz from its name")
        else:
            yield from _text_rows(file, path)


def _text_rows(stream: io.BufferedReader, path: Path) -> Iterator[tuple[str, Any]]:
    head = stream.peek(64)
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not head:
        raise DataError(f"{path} is empty (0 bytes)", FORMATS)
    if head.startswith(WIDE_MARKS) or b"\0" in head[:4]:
        found = f"{path}, byte 1: UTF-16 or other wide text"
        raise DataError(found, "UTF-8", "save the file as UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if head.startswith(LFS_MARK):
        raise DataError(f"{path} is a Git LFS pointer", "the data itself", "run `git lfs pull`")
    if head.startswith(PARQUET_MARK):
        raise DataError(f"{path} is a compressed Parquet file", FORMATS, "unpack it first")
    yield from _format(text, path)(stream, str(path))


def _format(head: bytes, path: Path) -> Any:
    """The reader for text that starts with `head`."""
    if head.startswith(b"["):
        return json_rows.array_rows
    if not head.startswith(b"{") and path.name.lower().removesuffix(".gz").endswith(".csv"):
        return tables.csv_rows
    return json_rows.line_rows


def check_file(path: Path) -> None:
    """Refuse what is not a plain file, saying why."""
    if path.is_symlink() and not path.exists():
        found = f"{path} is a link to {path.readlink()}, which is missing"
        raise DataError(found, "a data file", "fetch the data again, or pass another file")
    if not path.exists():
        raise DataError(f"{path} does not exist", "a data file", "check the path after --data")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file", FORMATS)


def is_saved(folder: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def only_file(folder: Path) -> Path:
    """The one data file in a folder or in its sub-folders; several or none raise."""
    inside = sorted([*folder.glob("*"), *folder.glob("*/*")])
    files = [p for p in inside if is_data_name(p.name) and p.name not in NOT_DATA]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(str(p.relative_to(folder)) for p in files[:5])
        found = f"{folder} holds {len(files)} data files ({names}{', ...' if files[5:] else ''})"
        raise DataError(found, "one", "pass one of them with --data")
    scripts = [p.name for p in inside if p.suffix == ".py"]
    found = f"{folder} holds no data file"
    if scripts:
        found += f", only a loading script ({scripts[0]}), and scripts are not run"
    raise DataError(found, FORMATS, "export the data set to Parquet and pass that file")


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Turn what the system says about a file into one line that names the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        found = f"{path} is a damaged or cut-off gzip file ({error})"
        raise DataError(found, action="fetch or write the file again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
