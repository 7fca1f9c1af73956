"""A file is there whole or not at all; one that cannot be used is one line with its name."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entmtp_calib import files, records
from entmtp_calib.errors import ArtifactError

ROWS = [
    {"prompt": 0, "step": k, "position": k, "tree": "chain-2", "rows": 3, "levels": 1}
    | {
        "draft_ms": 0.5,
        "accepted_draft_tokens": k % 3,
        "emitted_tokens": k % 3 + 1,
        "verify_ms": 2.0,
        "step_ms": 3,
    }
    for k in range(50)
]


def steps() -> pa.Table:
    return records.table(ROWS, records.STEPS_SCHEMA)


def refused(path: Path, schema: pa.Schema | None = None) -> str:
    """The message with which reading the file is refused."""
    with pytest.raises(ArtifactError) as error:
        files.read_json(path) if schema is None else files.read_table(path, schema)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_json_and_tables_survive_a_round_trip(tmp_path: Path) -> None:
    value = {"text": "BaNaNa NaN \u2028\x85", "number": 0.1, "none": None}
    files.write_json(tmp_path / "deep" / "a.json", value)
    assert files.read_json(tmp_path / "deep" / "a.json") == value
    files.write_table(tmp_path / "a.parquet", steps())
    read = files.read_table(tmp_path / "a.parquet", records.STEPS_SCHEMA)
    assert read.equals(steps(), check_metadata=True)


def test_chunks_are_joined_and_a_failing_one_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    files.write_chunks(path, (bytes([n]) for n in range(3)))
    assert path.read_bytes() == b"\x00\x01\x02"

    def failing() -> Iterator[bytes]:
        yield b"new"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        files.write_chunks(path, failing())
    assert path.read_bytes() == b"\x00\x01\x02"
    assert list(tmp_path.iterdir()) == [path]


def test_other_readers_get_the_declared_types(tmp_path: Path) -> None:
    files.write_table(tmp_path / "a.parquet", steps())
    frame = pytest.importorskip("pandas").read_parquet(tmp_path / "a.parquet")
    assert frame["signal"].isna().all()
    assert frame["step_ms"].dtype == "float64"
    assert pq.read_schema(tmp_path / "a.parquet").metadata[b"format_version"] == b"1"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EACCES, "may write to"),
        (errno.EROFS, "may write to"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, call: str
) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, "old")

    def fail(*_: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, call, fail)
    with pytest.raises(ArtifactError, match=remedy) as error:
        files.write_json(path, "new")
    assert str(path) in str(error.value)
    assert os.strerror(number) in str(error.value)
    assert files.read_json(path) == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_bytes(tmp_path / "a", b"data")
    assert os.listdir(tmp_path) == []


def test_a_really_full_disk_is_named() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(ArtifactError, match="free some space"), files.writing(Path("/dev/full")):
        Path("/dev/full").write_bytes(b"x")


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="in the way"):
        files.write_bytes(tmp_path / "file" / "a.json", b"")
    with pytest.raises(ArtifactError, match="shorter"):
        files.write_bytes(tmp_path / ("n" * 300), b"")


def test_missing_files_and_folders_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.json")
    assert "directory" in refused(tmp_path)
    with pytest.raises(ArtifactError, match="cannot read"):
        files.hash_file(tmp_path / "none")


@pytest.mark.parametrize(
    "data", [b"", b'{"a": [1', b'{"a": 1} {"b": 2}', b"\xff\xfe", b"[" * 100_000, b"PAR1"]
)
def test_json_that_is_cut_short_or_rubbish_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert "damaged" in refused(tmp_path / "a.json")


def test_a_table_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    files.write_table(path, steps())
    data = path.read_bytes()
    for length in [0, 1, 4, 8, 100, len(data) // 2, len(data) - 100, len(data) - 8, len(data) - 1]:
        path.write_bytes(data[:length])
        assert "damaged" in refused(path, records.STEPS_SCHEMA)


def test_a_changed_byte_never_gives_other_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    files.write_table(path, steps())
    data = path.read_bytes()
    refusals = 0
    for place in range(4, len(data), 11):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        try:
            assert files.read_table(path, records.STEPS_SCHEMA).equals(steps())
        except ArtifactError:
            refusals += 1
    assert refusals > 50


def test_a_table_of_another_schema_names_each_column_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    other = records.STEPS_SCHEMA
    other = other.set(0, pa.field("prompt", pa.int64(), nullable=False))
    other = other.remove(other.get_field_index("signal")).append(pa.field("extra", pa.string()))
    files.write_table(path, other.empty_table())
    message = refused(path, records.STEPS_SCHEMA)
    for part in (
        "prompt: int64 not null instead of int32 not null",
        "signal: absent instead of double",
        "extra: string instead of absent",
    ):
        assert part in message


@pytest.mark.parametrize("metadata", [{"format_version": "2"}, None])
def test_a_table_of_another_format_version_is_refused(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    files.write_table(tmp_path / "a.parquet", steps().replace_schema_metadata(metadata))
    message = refused(tmp_path / "a.parquet", records.STEPS_SCHEMA)
    assert f"format version {'2' if metadata else 'unknown'}; expected format version 1" in message


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "a.parquet").write_bytes(pointer)
    assert "git lfs pull" in refused(tmp_path / "a.parquet", records.STEPS_SCHEMA)
