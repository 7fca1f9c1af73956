"""What decoding leaves behind: a record per step, and the text they make."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Step:
    """What one step did; a terminal step (its root ends the text) has no rows and no pass."""

    position: int
    """Absolute position of the root."""
    tree: int
    """Index into the decoder's trees; -1 in a terminal step, and for a tree of one step only."""
    rows: int
    """Of the target pass, the root included."""
    levels: int
    """Levels drafted before the tree was chosen."""
    accepted_draft_tokens: int
    emitted_tokens: int
    signal: float | None
    """What the policy read last; None where it read nothing."""
    draft_ms: float
    verify_ms: float
    step_ms: float


@dataclass(frozen=True)
class Generation:
    """The text a prompt led to, and how it came about."""

    tokens: list[int]
    """Generated ids, up to and with the first EOS."""
    reason: str
    """stop (EOS), length (the token limit), positions (the model's last position), or criterion (a
    stopping criterion of the caller's)."""
    steps: list[Step]
    prefill_seconds: float

    @property
    def decode_seconds(self) -> float:
        """Time of all steps; the prompt's own pass is `prefill_seconds`."""
        return sum(step.step_ms for step in self.steps) / 1000

    @property
    def mean_emitted_tokens(self) -> float:
        """Emitted tokens per step; plain decoding has 1.00."""
        return len(self.tokens) / len(self.steps)

    @property
    def chosen(self) -> list[int]:
        """The tree of each step that had a pass, as in `Step.tree`."""
        return [step.tree for step in self.steps if step.rows]

    @property
    def switches(self) -> int:
        """Passes with another tree than the pass before them."""
        return sum(before != after for before, after in pairwise(self.chosen))
