"""The text heads learn from: the target's own continuations of prompts.

Texts are appended to a JSONL file as they end; what is there already is not generated again. How a
text is written is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entmtp_calib import files
from entmtp_calib.errors import DataError
from entmtp_calib.heads.features import Text
from entmtp_calib.progress import Progress
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.texts import plain_texts


def write_corpus(
    target: Target,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    max_new_tokens: int,
    path: Path,
    progress: Progress,
) -> list[Text]:
    """Continue each (source, prompt ids) greedily; returns all texts, in the prompts' order.

    `path` is a JSONL file of texts; it may hold part of them from an earlier, stopped run.
    """
    _drop_partial_line(path)
    known = {(text.source, text.prompt_ids): text for text in read_corpus(path)}
    left = sorted({item for item in prompts if item not in known})
    progress.start("continuations", len(left) * max_new_tokens)  # tokens, if no text ended early
    prompt_ids = [ids for _, ids in left]
    for written in plain_texts(target, prompt_ids, max_new_tokens, on_tokens=progress.advance):
        item = left[written.prompt]
        known[item] = Text(*item, tuple(written.tokens))
        with files.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(known[item])) + "\n")
        progress.advance(max_new_tokens - len(written.tokens), f"{len(known)} texts")
    progress.done()
    return [known[item] for item in prompts]


def read_corpus(path: Path) -> list[Text]:
    """The texts of a corpus file; none where there is no file."""
    if not path.exists():
        return []
    texts = []
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            row = json.loads(line)
            source, prompt, completion = row["source"], row["prompt_ids"], row["completion_ids"]
            if not (_is_name(source) and _is_ids(prompt) and _is_ids(completion)):
                raise ValueError("a source is a word, ids are lists of whole numbers")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is no text of a corpus ({error})",
                "source, prompt_ids and completion_ids",
                "delete the file to generate it again",
            ) from error
        texts.append(Text(source, tuple(prompt), tuple(completion)))
    return texts


def _is_name(value: Any) -> bool:
    """Sources name files."""
    return isinstance(value, str) and value.isalnum()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _drop_partial_line(path: Path) -> None:
    """Remove what a killed run left of a line, so that the next text is not glued to it."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)
