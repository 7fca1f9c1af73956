"""JSON arrays and JSON lines, read as streams of rows with bounded memory.

An array may stand on one line of hundreds of megabytes, so its elements are decoded one at a time;
lines end at line feeds only, because U+2028, U+2029 and U+0085 are text inside a string. This
module knows bytes and JSON, not files, compression or tasks.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from entmtp_calib.errors import DataError

CHUNK_BYTES = 1 << 20
ROW_BYTES = 64 << 20
SPACE = " \t\r\n"
ONE_OBJECT = "one JSON object per line, or a JSON array of objects"


def line_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON lines file as (place, value); blank lines are no rows."""
    row = 0
    for line, raw in byte_lines(stream, name):
        if not raw.strip():
            continue
        row += 1
        place = f"row {row}" if row == line else f"row {row} (line {line})"
        yield place, _line_value(raw, f"{name}, {place}")


def byte_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """(number, line) without a byte order mark; only a line feed ends a line."""
    for line, raw in enumerate(iter(lambda: stream.readline(ROW_BYTES), b""), 1):
        if len(raw) == ROW_BYTES:
            raise too_long(name, f"line {line}")
        yield line, raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw


def _line_value(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(where, f"byte {error.start + 1} of the line") from error
    except json.JSONDecodeError as error:
        start = raw[:20].decode("utf-8", "replace").strip()
        found = f"{where}: not a JSON object, at column {error.colno} ({error.msg})"
        raise DataError(f"{found}; the line starts with {start!r}", ONE_OBJECT) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: JSON that cannot be read ({error})", ONE_OBJECT) from error


def array_rows(stream: BinaryIO, name: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON array as (place, value); the array must be whole and alone."""
    text = _Window(stream, name)
    text.take("[")
    more = text.next() != "]"
    row = 0
    while more:
        row += 1
        text.place = f"row {row}"
        yield text.place, text.value()
        more = text.next() == ","
        if more:
            text.take(",")
    text.take("]")
    if text.next():
        raise text.error("more text after the end of the array", "one JSON array")


class _Window:
    """The text of a byte stream, of which only the part still to be parsed is kept."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text, self._at, self._bytes_read, self._ended = "", 0, 0, False
        self.place = "the start"

    def next(self) -> str:
        """The next character that is not space, without taking it; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._grow()

    def take(self, wanted: str) -> None:
        found = self.next()
        if not found:
            raise self._cut_off()
        if found != wanted:
            raise self.error(f"found {found!r}", f"{wanted!r} there")
        self._at += 1

    def value(self) -> Any:
        """The next JSON value; reads on until it is whole."""
        if not self.next():
            raise self._cut_off()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self._malformed(error) from error
            except (ValueError, RecursionError) as error:
                raise self.error(f"JSON that cannot be read ({error})", "rows of text") from error
            else:
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            if len(self._text) - self._at > ROW_BYTES:
                raise too_long(self._name, self.place)
            self._grow()

    def _grow(self) -> None:
        """Read at least as much again as is waiting, so that long rows cost linear time."""
        self._text, self._at = self._text[self._at :], 0
        raw = self._stream.read(max(CHUNK_BYTES, len(self._text)))
        self._bytes_read += len(raw)
        self._ended = not raw
        try:
            self._text += self._utf8.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            byte = self._bytes_read - len(error.object) + error.start + 1
            raise not_utf8(f"{self._name}, near {self.place}", f"byte {byte}") from error

    def error(self, found: str, expected: str, at: int | None = None) -> DataError:
        rest = self._text[self._at if at is None else at :]
        byte = self._bytes_read - len(rest.encode()) + 1
        return DataError(f"{self._name}, {self.place}, byte {byte}: {found}", expected)

    def _malformed(self, error: json.JSONDecodeError) -> DataError:
        if error.msg.startswith("Unterminated") or not self._text[error.pos :].strip(SPACE):
            return self._cut_off()
        return self.error(f"not valid JSON ({error.msg})", "a JSON array of objects", error.pos)

    def _cut_off(self) -> DataError:
        found = f"{self._name} ends inside {self.place}, at byte {self._bytes_read}"
        return DataError(found, "a whole JSON array", "fetch or write the file again")


def not_utf8(where: str, position: str) -> DataError:
    return DataError(f"{where}: not UTF-8 text at {position}", "UTF-8", "save the file as UTF-8")


def too_long(name: str, place: str) -> DataError:
    return DataError(f"{name}, {place}: longer than {ROW_BYTES >> 20} MiB", "rows of a prompt each")
