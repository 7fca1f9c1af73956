"""Train heads: prompts, the target's continuations, its hidden states, epochs, and the result.

Everything on the way lies in the work folder (texts, features, checkpoint), so a stopped run goes
on where it was.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib import files
from entmtp_calib.config import TASKS, TrainConfig
from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.heads.corpus import read_corpus, write_corpus
from entmtp_calib.heads.features import FeatureSet, Text, write_features
from entmtp_calib.heads.native import save_heads
from entmtp_calib.heads.training import Trainer, draft_vocabulary, new_heads
from entmtp_calib.heads.validation import validate
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.prompts import encode, keep_short, load_prompts
from entmtp_calib.provenance import provenance
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target

WORK = "work.json"
_SOURCE = re.compile(
    r"((?P<name>[a-z0-9]+)=)?(?P<task>[a-z0-9]+)(:(?P<data>.+?))?(@(?P<limit>[1-9][0-9]*))?"
)


@dataclass(frozen=True)
class Source:
    """Prompts to learn from: a task's format, and a file or None for the task's usual set."""

    name: str
    task: str
    data: str | None
    limit: int | None

    @classmethod
    def parse(cls, text: str) -> Source:
        """From `NAME=TASK[:FILE][@LIMIT]`, such as `math=gsm8k:train.jsonl@2000`."""
        match = _SOURCE.fullmatch(text)
        if not match or match["task"] not in TASKS:
            raise UsageError(
                f"--prompts {text}",
                f"NAME=TASK[:FILE][@LIMIT] with a task of {', '.join(TASKS)}",
            )
        limit = int(match["limit"]) if match["limit"] else None
        return cls(match["name"] or match["task"], match["task"], match["data"], limit)


@dataclass(frozen=True)
class Trained:
    """Where the heads are, and a validation record per epoch."""

    folder: Path
    history: Sequence[dict[str, Any]]
    positions: int
    parameters: int


def train_heads(
    config: TrainConfig,
    sources: Sequence[Source],
    out: Path,
    work: Path,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    max_new_tokens: int = 192,
    texts_file: Path | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Trained:
    """Train heads for a model on its own text, and write them to `out`.

    Args:
        sources: prompts that the target continues; may be empty where `texts_file` is given.
        work: folder for what is resumed: texts, hidden states, checkpoint.
        texts_file: a corpus written before (`source`, `prompt_ids`, `completion_ids` per line),
            used beside the sources' texts.
    """
    progress = progress or Silent()
    prompts = [
        (source, load_prompts(source.task, _path(source.data), source.limit)) for source in sources
    ]
    if texts_file and not texts_file.is_file():
        raise DataError(f"{texts_file} does not exist", "a corpus", "check the path after --texts")
    target = load_target(model, device=device, dtype=dtype)
    room = target.max_positions - max_new_tokens
    if room < 1:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens}",
            f"less than the {target.max_positions} positions of {target.name}",
        )
    _claim(work, target, max_new_tokens)
    wanted = [
        (source.name, tuple(encode(target.tokenizer, prompt.messages)))
        for source, found in prompts
        for prompt in keep_short(found, target.tokenizer, room).prompts
    ]
    texts = write_corpus(target, wanted, max_new_tokens, work / "texts.jsonl", progress)
    texts = without_repeats(texts + (read_corpus(texts_file) if texts_file else []))
    _check_enough(texts)
    paths = write_features(target, texts, work / "features", progress)
    features = FeatureSet(paths)
    training, held_out = hold_out(features, config)
    draft_ids = draft_vocabulary(features, training, config.draft_vocab)
    heads = new_heads(config, target, draft_ids)
    checkpoint = work / f"{out.resolve().name}.checkpoint.pt"
    trainer = Trainer(heads, config, features, training, checkpoint)
    history = trainer.run(lambda h: validate(h, features, held_out), progress)
    positions = sum(features.positions(i) for i in training)
    record = {
        "settings": config.to_dict(),
        "sources": {
            name: sum(t.source == name for t in texts) for name in {t.source for t in texts}
        },
        "training_positions": positions,
        "held_out_texts": len(held_out),
        "validation": history[-1],
        "provenance": provenance(command, {"training": config.seed}, device=str(target.device)),
    }
    save_heads(heads, out, target_facts(target), record)
    files.write_json(out / "history.json", history)
    parameters = sum(p.numel() for p in heads.parameters())
    return Trained(out, history, positions, parameters)


def without_repeats(texts: Sequence[Text]) -> list[Text]:
    """The first text of every prompt: one that comes twice could be learned and held out."""
    return list({text.prompt_ids: text for text in reversed(texts)}.values())[::-1]


def target_facts(target: Target) -> dict[str, Any]:
    """What heads remember of the target they were made for."""
    return {"name": target.name, "fingerprint": target.fingerprint}


def hold_out(features: FeatureSet, config: TrainConfig) -> tuple[list[int], list[int]]:
    """Sequences to learn from, and to validate on: as many from each source, by a seeded hash."""
    groups: dict[str, list[int]] = {}
    for i, source in enumerate(features.sources):
        groups.setdefault(source, []).append(i)
    share = max(2, config.held_out // len(groups))
    held: set[int] = set()
    for members in groups.values():
        order = sorted(members, key=lambda i: _hash(f"{config.seed} {i}"))
        held |= set(order[: min(share, len(members) // 2)])
    return [i for i in range(len(features)) if i not in held], sorted(held)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _claim(work: Path, target: Target, max_new_tokens: int) -> None:
    """Refuse a work folder whose texts another target wrote, or under another limit."""
    with files.writing(work):
        work.mkdir(parents=True, exist_ok=True)
    mine = {
        **target_facts(target),
        "dtype": str(target.dtype),
        "engine": target.engine,
        "max_new_tokens": max_new_tokens,
    }
    if not (work / WORK).exists():
        files.write_json(work / WORK, mine)
    elif (theirs := files.read_json(work / WORK)) != mine:
        raise DataError(
            f"{work} holds the work for {theirs.get('name')} with {theirs.get('max_new_tokens')}"
            f" tokens per text",
            f"work for {target.name} of the same weights, dtype and engine,"
            f" with {max_new_tokens} tokens",
            "pass another --work, or delete that folder",
        )


def _check_enough(texts: Sequence[Text]) -> None:
    for source, count in Counter(text.source for text in texts).items():
        if count < 8:
            raise DataError(
                f"{count} texts of {source}",
                "at least 8",
                "pass more prompts",
            )
    if not texts:
        raise DataError(
            "no texts to learn from", "prompts or a corpus", "pass --prompts or --texts"
        )


def _path(data: str | None) -> Path | None:
    return Path(data) if data else None
