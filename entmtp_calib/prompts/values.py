"""A prompt, and a set of prompts with its origin: what every later stage sees.

One small vocabulary for four tasks, so that no stage asks which data set it runs on. Prompts are
messages, not tokens: this module knows no tokenizer, no file format and no task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

Messages = tuple[tuple[str, str], ...]
"""(role, content) pairs; roles are "system" (first only), "user" and "assistant"."""


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the model's answer; the last message is the user's."""

    id: str
    messages: Messages

    @cached_property
    def key(self) -> str:
        """The text with every run of white space as one space; equal keys are duplicates."""
        return "\n".join(f"{role}: {' '.join(content.split())}" for role, content in self.messages)


@dataclass(frozen=True)
class PromptSet:
    """Distinct prompts in the order of their source, and what was left out.

    Args:
        prompts: the prompts kept; their ids are unique.
        source: "hub NAME SPLIT", "package NAME", "bundled", or the file that was read.
        read: rows read.
        dropped: rows without a usable prompt, counted by reason.
        duplicates: rows whose prompt, apart from white space, an earlier row has.
        asked: the limit asked for, if any.
        note: why this source and not the first choice; empty if it was the first.
    """

    prompts: tuple[Prompt, ...]
    source: str
    read: int
    dropped: Mapping[str, int] = field(default_factory=dict)
    duplicates: int = 0
    asked: int | None = None
    note: str = ""

    @property
    def available(self) -> int:
        """Prompts there were before the limit."""
        return self.read - self.duplicates - sum(self.dropped.values())

    @cached_property
    def sha256(self) -> str:
        """Hash of ids and messages: the same rows in another file format hash the same."""
        rows = [[prompt.id, prompt.messages] for prompt in self.prompts]
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """One line for a person: how many, from where, and what is missing."""
        line = f"{len(self.prompts)} prompts from {self.source} ({self.counts()})"
        if self.asked is not None and self.asked > self.available:
            line += f"; {self.asked} were asked for, {self.available} are available"
        return f"{line}; {self.note}" if self.note else line

    def counts(self) -> str:
        """Rows read, duplicates, and rows dropped per reason, in words."""
        parts = [f"{self.read} rows read"]
        if self.duplicates:
            parts.append(f"{self.duplicates} duplicates")
        parts += [f"{count} dropped: {reason}" for reason, count in sorted(self.dropped.items())]
        return ", ".join(parts)
