"""One row of a data file, with the checks that can name the file, the row and the field.

Two things can be wrong with a row. Where the file has another schema than the task (a field is
absent, or of another type), reading stops with an error. Where a well-formed row just holds no
prompt (null, blank, no user turn), that row is dropped and counted. This module knows no format
and no task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entmtp_calib.errors import DataError

FIELDS_SHOWN = 8


class SkipRow(Exception):
    """This row holds no prompt; `str()` is the reason under which it is counted."""


@dataclass(frozen=True)
class Row:
    """A row and where it stands.

    Args:
        where: file and row for messages, such as "d.jsonl, row 3".
        fields: what the row holds; absent and null are different things.
    """

    where: str
    fields: Mapping[str, Any]

    def text(self, name: str) -> str:
        """The text of a field; a row without text in it is skipped."""
        if name not in self.fields:
            raise self.missing(f"the field '{name}'")
        value = self.string(name, self.fields[name])
        if value is None:
            raise SkipRow(f"empty '{name}'")
        return value

    def string(self, name: str, value: object) -> str | None:
        """`value` if it is text, None if it is null or blank; `name` is for messages."""
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SkipRow("text that is not valid Unicode (half of a surrogate pair)") from error
        return value if value.strip() else None

    def missing(self, what: str) -> DataError:
        names = [str(name) for name in self.fields]
        shown = ", ".join(names[:FIELDS_SHOWN]) + (", ..." if len(names) > FIELDS_SHOWN else "")
        return DataError(
            f"{self.where}: the row has the fields {shown or '(none)'}",
            expected=what,
            action="rename the field, or choose the --task that fits the file",
        )

    def wrong(self, name: str, value: object, expected: str) -> DataError:
        return DataError(f"{self.where}, field '{name}': found {kind(value)}", expected=expected)


def kind(value: object) -> str:
    """What a value is, in the words of JSON."""
    if value is None:
        return "null"
    if isinstance(value, bool | int | float):
        return f"the {'truth value' if isinstance(value, bool) else 'number'} {value}"
    if isinstance(value, str):
        return f"the text {value[:20]!r}"
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"
