"""Files of every format and every kind of damage."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entmtp_calib.errors import DataError
from entmtp_calib.prompts import json_rows
from entmtp_calib.prompts.read import read_rows

Write = Callable[[Any, str], Path]
ROWS = [
    {"task_id": "HumanEval/0", "prompt": "def é():\n", "entry_point": "é"},
    {"task_id": "HumanEval/1", "prompt": "def g(x):\n", "entry_point": "g", "extra": 1},
]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS, ensure_ascii=False, indent=2).encode()


def fields(path: Path) -> list[dict[str, Any]]:
    return [dict(row.fields) for row in read_rows(path)]


def message(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(path))
    text = str(caught.value)
    assert path.name in text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_only_a_line_feed_ends_a_line(write: Write, separator: str, end: str, last: bool) -> None:
    first = json.dumps({"q": f"A{separator}B"}, ensure_ascii=False)
    path = write((first + end + '{"q": "C"}' + (end if last else "")).encode(), "u.jsonl")
    assert fields(path) == [{"q": f"A{separator}B"}, {"q": "C"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", JSONL),
        ("d.jsonl", JSONL.removesuffix(b"\n")),
        ("bom.jsonl", codecs.BOM_UTF8 + JSONL),
        ("d.json", JSONL),
        ("d.jsonl", ARRAY),
        ("bom.json", codecs.BOM_UTF8 + ARRAY),
        ("d.json", b"\n\n  " + ARRAY + b"\n\n"),
        ("one-line.txt", json.dumps(ROWS).encode()),
        ("d.jsonl.gz", gzip.compress(JSONL, mtime=0)),
        ("d.json.gz", gzip.compress(codecs.BOM_UTF8 + ARRAY, mtime=0)),
        ("not-called-gz.jsonl", gzip.compress(JSONL, mtime=0)),
        ("d.csv", JSONL),
    ],
)
def test_the_content_decides_on_the_format(write: Write, name: str, content: bytes) -> None:
    assert fields(write(content, name)) == ROWS


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64])
def test_an_array_is_the_same_however_it_is_cut_into_chunks(
    write: Write, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", chunk_bytes)
    rows = [{"q": 'é "quoted" ] } , \u2028 😀', "n": [1, {"a": None}], "x": -1.5e3}, {"q": ""}]
    assert fields(write(json.dumps(rows, ensure_ascii=False).encode(), "a.json")) == rows
    assert fields(write(b"[ ]", "b.json")) == []


@pytest.mark.parametrize("chunk_bytes", [1, 5, 1 << 20])
def test_an_array_cut_off_anywhere_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", chunk_bytes)
    whole = '[{"q": "é😀"}, {"q": [true, 12]}]'.encode()
    for size in range(1, len(whole)):
        message(write(whole[:size], "cut.json"))


def test_a_cut_off_array_names_the_row_and_the_byte(write: Write) -> None:
    size = len(ARRAY) * 6 // 10
    text = message(write(ARRAY[:size], "cut.json"))
    assert f"ends inside row 2, at byte {size}" in text


def test_text_after_an_array_and_errors_inside_it_name_the_byte(write: Write) -> None:
    assert "byte 6: more text after" in message(write(b"[{}]\n{}", "two.json"))
    assert "row 2, byte 6: not valid JSON" in message(write(b"[{}, x, {}]", "bad.json"))
    assert "row 1, byte 5: found '{'" in message(write(b"[{} {}]", "comma.json"))
    assert "row 2, byte 6: not valid JSON" in message(write(b"[{}, ]", "trailing.json"))
    assert "byte 4" in message(write(b'[{"\xff": 1}]', "latin.json"))


def test_a_bad_line_names_row_and_line(write: Write) -> None:
    assert "row 2 (line 3)" in message(write(b'{"q": 1}\n\n{"q": \n', "d.jsonl"))
    assert "row 2" in message(write(b'{"q": 1}\n{"q": "\xe9"}\n', "latin.jsonl"))
    assert "starts with 'hello'" in message(write(b"hello\nworld\n", "plain.jsonl"))
    assert "row 1: found the number 3" in message(write(b"3\n", "n.jsonl"))
    assert "row 2: found null" in message(write(b"[{}, null]", "n.json"))


def test_json_bombs_are_refused(write: Write) -> None:
    message(write(b"[" * 200_000, "deep.json"))
    message(write(b'{"a":' * 200_000 + b"\n", "deep.jsonl"))
    message(write(b'[{"n": ' + b"9" * 10_000 + b"}]", "long.json"))
    message(write(b'{"n": ' + b"9" * 10_000 + b"}\n", "long.jsonl"))


def test_a_row_without_end_does_not_fill_the_memory(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "ROW_BYTES", 1000)
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", 100)
    assert "longer than" in message(write(b'[{"q": "' + b"x" * 5000 + b'"}]', "long.json"))
    assert "longer than" in message(write(b'{"q": "' + b"x" * 5000 + b'"}\n', "long.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("plain.jsonl.gz", b"just text\n", "byte 1: not gzip"),
        ("cut.jsonl.gz", gzip.compress(JSONL * 50, mtime=0)[:60], "cut-off gzip"),
        ("damaged.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-6] + b"xxxxxx", "cut-off gzip"),
        ("le.jsonl", JSONL.decode().encode("utf-16"), "UTF-16"),
        ("be.json", codecs.BOM_UTF16_BE + ARRAY.decode().encode("utf-16-be"), "UTF-16"),
        ("nobom.json", ARRAY.decode().encode("utf-16-le"), "UTF-16"),
        ("pointer.jsonl", b"version https://git-lfs.github.com/spec/v1\noid x\n", "git lfs pull"),
        ("empty.jsonl", b"", "0 bytes"),
        ("cut.parquet", b"PAR1 and no footer", "not a readable Parquet file"),
        ("packed.parquet.gz", gzip.compress(b"PAR1 whatever", mtime=0), "compressed Parquet"),
    ],
)
def test_damage_is_one_line_with_file_and_fact(
    write: Write, name: str, content: bytes, fact: str
) -> None:
    assert fact in message(write(content, name))


def test_missing_files_links_and_pipes_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "none.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "gone")
    assert "gone, which is missing" in message(link)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in message(tmp_path / "pipe")


def test_csv_keeps_quotes_and_line_ends_inside_cells(write: Write) -> None:
    rows = [{"prompt": 'a "b",\r\nc\u2028d', "id": "1"}, {"prompt": "", "id": "2"}]
    assert fields(write(rows, "d.csv")) == rows
    plain = write(codecs.BOM_UTF8 + b"prompt\nx" + b"y" * 200_000 + b"\n", "bom.csv")
    assert len(fields(plain)[0]["prompt"]) == 200_001


def test_bad_csv_names_the_row(write: Write) -> None:
    assert "row 2 (line 3)" in message(write(b"a,b\n1,2\n3\n", "short.csv"))
    assert "row 1 (line 2)" in message(write(b"a,b\n1,2,3\n", "long.csv"))
    assert "row 2" in message(write(b'a,b\n1,2\n3,"4\n', "quote.csv"))
    assert "UTF-8 text at line 3" in message(write(b"a,b\n1,2\n3,\xe9\n", "latin.csv"))


def test_parquet_gives_plain_lists_and_nulls(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    turns = [[{"from": "human", "value": "a"}], None, []]
    kind = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    words = ["x", "y", "x"]
    table = pa.table(
        {
            "conversations": pa.array(turns, kind),
            "dictionary": pa.array(words).dictionary_encode(),
            "large": pa.array(words, pa.large_string()),
        }
    )
    path = tmp_path / "t.parquet"
    parquet.write_table(table, path, row_group_size=1)
    assert fields(path) == [
        {"conversations": turn, "dictionary": word, "large": word}
        for turn, word in zip(turns, words, strict=True)
    ]


def test_folders_written_by_save_to_disk_are_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"q": "a"}, {"q": "b"}])
    table.save_to_disk(str(tmp_path / "one"))
    other = datasets.Dataset.from_list([{"q": "other"}])
    datasets.DatasetDict({"train": other, "test": table}).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict({"a": other, "b": table}).save_to_disk(str(tmp_path / "unclear"))
    assert fields(tmp_path / "one") == [{"q": "a"}, {"q": "b"}]
    assert fields(tmp_path / "splits") == [{"q": "a"}, {"q": "b"}]
    assert "splits a, b" in message(tmp_path / "unclear")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    assert "save_to_disk" in message(tmp_path / "one")


def test_a_folder_must_hold_one_data_file_and_no_script_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    assert "holds no data file" in message(folder)
    (folder / "ds.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "scripts are not run" in message(folder)
    assert not (tmp_path / "ran").exists()
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "data" / "test.jsonl").write_bytes(JSONL)
    assert fields(folder) == ROWS
    (folder / "train.jsonl").write_bytes(JSONL)
    assert "2 data files" in message(folder)


def test_reading_does_not_depend_on_the_locale(write: Write) -> None:
    path = write(JSONL, "d.jsonl")
    code = (
        "from pathlib import Path; from entmtp_calib.prompts.read import read_rows;"
        f"rows = list(read_rows(Path({str(path)!r})));"
        "assert rows[0].fields['entry_point'] == chr(233), rows"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, check=True)
