"""Text to a value: flags, JSON, Python literals and YAML, tried in this order.

Nothing is run: Python is parsed, and only literals in it are evaluated; YAML makes plain values
only. This module knows no trees.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from itertools import accumulate
from typing import Any

from entmtp_calib.errors import TreeError

MAX_BYTES = 1_000_000
_YAML_CHARACTERS, _YAML_NESTING = 100_000, 32  # beyond these its parser takes minutes
_FAILURES = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
_CHOICES_FLAG = re.compile(r"--medusa_choices[ =]+[\"']?(\[[\[\]\d,\s]*\])")


def text_of(data: bytes) -> str:
    """A file's text; `TreeError` where it is too long, or none."""
    if len(data) > MAX_BYTES:
        raise TreeError(f"{len(data)} bytes", f"at most {MAX_BYTES}, far more than any tree needs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise TreeError("no text in UTF-8") from None


def value_of(text: str) -> Any:
    """The value that a text stands for; a Python module's literals are an object by name.

    Raises:
        TreeError: it stands for none.
    """
    if flag := _CHOICES_FLAG.search(text):
        return literal(flag[1])
    for read in (_json, _python, _module, _yaml):
        value = read(text)
        if value is not None:
            return value
    raise TreeError("neither JSON nor YAML nor a Python literal")


def literal(text: str) -> Any:
    """The Python literal in a text; `TreeError` where there is none."""
    value = _python(text)
    if value is None:
        raise TreeError(f"{text[:60]!r} is no Python literal")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _python(text: str) -> Any:
    try:
        return ast.literal_eval(_parsed(text.strip(), "eval").body)
    except _FAILURES:
        return None


def _module(text: str) -> Any:
    """The literals that a Python module gives names; all else in it is passed over."""
    try:
        lines = _parsed(text, "exec").body
    except _FAILURES:
        return None
    named = {}
    for line in lines:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
            try:
                named[target.id if isinstance(target, ast.Name) else ""] = ast.literal_eval(
                    line.value
                )
            except _FAILURES:
                continue
    return named or None


def _parsed(text: str, mode: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes and the like
        return ast.parse(text, mode=mode)


def _yaml(text: str) -> Any:
    import yaml

    opened = accumulate((c in "[{") - (c in "]}") for c in text)
    if len(text) > _YAML_CHARACTERS or max(opened, default=0) > _YAML_NESTING:
        return None
    try:
        # Aliases may stand for far more than is written, and no tree needs them.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            return None
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return value if isinstance(value, list | dict) else None
