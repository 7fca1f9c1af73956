"""Conversations of many conventions, normalised to roles that alternate.

Rules (also in data/README.md): known names of roles become system, user, assistant; blank turns go;
system turns before the first user turn become one system message and later ones go; assistant
turns before the first user turn go; consecutive turns of one role are joined by a blank line. This
module knows no task: which turns make the prompt is the task's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from entmtp_calib.prompts.rows import Row, SkipRow
from entmtp_calib.prompts.values import Messages

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
}
ROLE_FIELDS = ("from", "role")
TEXT_FIELDS = ("value", "content")


def conversation(row: Row, names: Sequence[str]) -> Messages:
    """The normalised conversation under the first of the fields that is not null."""
    present = [name for name in names if name in row.fields]
    if not present:
        raise row.missing(f"a list of turns in {' or '.join(repr(name) for name in names)}")
    name = next((name for name in present if row.fields[name] is not None), present[0])
    turns = [_turn(row, f"{name}[{n}]", turn) for n, turn in enumerate(_turns(row, name))]
    return _alternate([(role, text) for role, text in turns if text is not None])


def _turns(row: Row, name: str) -> Sequence[Any]:
    """The list of turns, also from JSON text (CSV) or from columns (old Parquet exports)."""
    value = row.fields[name]
    if value in (None, "", [], {}):
        raise SkipRow(f"no turns in '{name}'")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise row.wrong(name, row.fields[name], f"a JSON list of turns ({error})") from error
    if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
        columns = list(value.values())
        if len({len(column) for column in columns}) > 1:
            raise row.wrong(name, value, "columns of one length")
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*columns, strict=True)]
    if not isinstance(value, list):
        raise row.wrong(name, value, "a list of turns")
    return value


def _turn(row: Row, name: str, turn: object) -> tuple[str, str | None]:
    if not isinstance(turn, Mapping):
        raise row.wrong(name, turn, "an object with from and value, or role and content")
    label = _first(row, name, turn, ROLE_FIELDS)
    text = row.string(f"{name}.value", _first(row, name, turn, TEXT_FIELDS))
    if label is not None and not isinstance(label, str):
        raise row.wrong(f"{name}.from", label, "the name of a role")
    role = ROLES.get((label or "").strip().lower())
    if role is None:
        raise SkipRow(f"a turn of an unknown role ({label[:20] if label else 'null'})")
    return role, text


def _first(row: Row, name: str, turn: Mapping[str, Any], keys: tuple[str, str]) -> Any:
    """The value of the key that is there; null only if all that are there are null."""
    present = [key for key in keys if key in turn]
    if not present:
        raise row.wrong(name, turn, f"'{keys[0]}' or '{keys[1]}' in it")
    return next((turn[key] for key in present if turn[key] is not None), None)


def _alternate(turns: list[tuple[str, str]]) -> Messages:
    users = [n for n, (role, _) in enumerate(turns) if role == "user"]
    if not users:
        raise SkipRow("no user turn")
    system = [text for role, text in turns[: users[0]] if role == "system"]
    merged: list[tuple[str, str]] = [("system", "\n\n".join(system))] if system else []
    for role, text in turns[users[0] :]:
        if role == "system":
            continue
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n\n{text}")
        else:
            merged.append((role, text))
    return tuple(merged)
