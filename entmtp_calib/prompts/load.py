"""Rows of a task turned into a set of distinct prompts.

Always reads to the end, so that a damaged file is noticed even under a limit and the counts are
those of the whole source. This module knows no format, no network and no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.prompts import custom, gsm8k, humaneval, sharegpt
from entmtp_calib.prompts.rows import Row, SkipRow
from entmtp_calib.prompts.sources import Source, find_source
from entmtp_calib.prompts.values import Messages, Prompt, PromptSet

MESSAGES: dict[str, Callable[[Row], Messages]] = {
    "gsm8k": gsm8k.messages,
    "humaneval": humaneval.messages,
    "sharegpt": sharegpt.messages,
    "custom": custom.messages,
}
TASKS = tuple(MESSAGES)
ID_FIELDS = ("task_id", "id")


def load_prompts(
    task: str, data: str | Path | None = None, limit: int | None = None, *, offline: bool = False
) -> PromptSet:
    """The prompts of a task.

    Args:
        task: one of TASKS.
        data: a file, a folder or a hub id; None for the hub's set, or else the bundled one.
        limit: keep this many, from the front; fewer if there are fewer, never one twice.
        offline: do not ask the hub (its cache is still used).
    """
    if task not in MESSAGES:
        raise UsageError(f"--task {task}", f"one of {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise UsageError(f"a limit of {limit} prompts", "1 or more")
    return _collect(task, find_source(task, data, offline), limit)


def _collect(task: str, source: Source, limit: int | None) -> PromptSet:
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    seen: set[bytes] = set()
    names: Counter[str] = Counter()
    read = duplicates = 0
    for read, row in enumerate(source.rows, 1):
        try:
            prompt = Prompt(_id(row, read), MESSAGES[task](row))
        except SkipRow as reason:
            dropped[str(reason)] += 1
            continue
        digest = hashlib.sha256(prompt.key.encode()).digest()
        if digest in seen:
            duplicates += 1
            continue
        seen.add(digest)
        if limit is None or len(prompts) < limit:
            prompts.append(Prompt(_unique(prompt.id, names), prompt.messages))
    found = PromptSet(
        tuple(prompts), source.name, read, dict(dropped), duplicates, limit, source.note
    )
    if not prompts:
        raise DataError(
            f"{source.name} has no usable prompt: {found.counts()}, 0 kept",
            expected=f"rows in the format of --task {task}",
            action="see data/README.md for the format of each task",
        )
    return found


def _id(row: Row, number: int) -> str:
    """The row's own id as text, or its number where it has none."""
    for name in ID_FIELDS:
        if row.fields.get(name) not in (None, ""):
            return str(row.fields[name])
    return f"row-{number}"


def _unique(name: str, names: Counter[str]) -> str:
    """`name`, or with #2, #3, ... where another prompt has it: ids never merge."""
    unique = name
    while names[unique]:
        names[name] += 1
        unique = f"{name}#{names[name]}"
    names[unique] += 1
    return unique
