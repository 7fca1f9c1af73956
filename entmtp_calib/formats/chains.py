"""Forms that hold numbers and no tree: SGLang's flags, its adaptive file, vLLM's schedule.

SGLang builds a tree anew each step from three numbers, by EAGLE-2's rule; with one choice per node
it is a chain. Its adaptive mode and vLLM's schedule switch between chains, by past acceptance and
by batch size. This module knows neither traces nor costs: which numbers fit is `fit`'s to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Ranges = list[tuple[int, int, int]]
"""(first batch size, last batch size, chain's depth), rising and without gaps."""

CANDIDATES, SCHEDULE = "candidate_steps", "num_speculative_tokens_per_batch_size"

_FLAGS = {
    "steps": "--speculative-num-steps",
    "topk": "--speculative-eagle-topk",
    "draft_tokens": "--speculative-num-draft-tokens",
}


@dataclass(frozen=True)
class SglangNumbers:
    """What SGLang builds its trees from.

    Attributes:
        steps: levels drafted.
        topk: choices drafted under a node, and nodes of a level that are expanded.
        draft_tokens: rows of the verify pass, the root included.

    Raises:
        ValueError: numbers that SGLang refuses or changes.
    """

    steps: int
    topk: int
    draft_tokens: int

    def __post_init__(self) -> None:
        if min(self.steps, self.topk) < 1 or self.draft_tokens < 2:
            raise ValueError(f"{self} has a number that is too small")
        if self.draft_tokens > self.steps * self.topk + 1:
            raise ValueError(f"{self} verifies more than steps * topk + 1")
        if self.topk == 1 and self.draft_tokens != self.steps + 1:
            raise ValueError(f"{self} is a chain, which verifies steps + 1")

    @property
    def eagle(self) -> dict[str, int]:
        """The same for EAGLE-2 and 3, which draft `depth` levels behind the first."""
        return {"total_token": self.draft_tokens, "depth": self.steps - 1, "top_k": self.topk}

    def flags(self) -> str:
        """As flags of SGLang's server, on one line."""
        values = asdict(self)
        return " ".join(f"{flag} {values[name]}" for name, flag in _FLAGS.items())

    @classmethod
    def parse(cls, text: str) -> SglangNumbers | None:
        """The numbers in a command line; None where one of the flags is missing."""
        found = {
            name: re.search(rf"{flag}[ =]+(\d{{1,6}})\b", text) for name, flag in _FLAGS.items()
        }
        if not all(found.values()):
            return None
        return cls(**{name: int(match[1]) for name, match in found.items() if match})


@dataclass(frozen=True)
class AdaptiveRule:
    """When SGLang's adaptive mode changes its chain; the defaults are SGLang's.

    Attributes:
        ema_alpha: weight of a pass's accepted draft tokens in their moving average.
        update_interval: passes from one decision to the next.
        warmup_batches: passes before the first one.
        up_hysteresis: added to what the average must pass to go up.
        down_hysteresis: added to what it must not pass to go down.
    """

    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25


def adaptive_file(steps: Sequence[int], rule: AdaptiveRule) -> str:
    """The file of `--speculative-adaptive-config`.

    The first releases read the keys at the top, later ones the slot of batch sizes from 1 on; each
    passes over the other's.
    """
    hysteresis = {"up_hysteresis": rule.up_hysteresis, "down_hysteresis": rule.down_hysteresis}
    slot = {CANDIDATES: list(steps), **hysteresis}
    return json.dumps({CANDIDATES: list(steps), **asdict(rule), "1": slot}) + "\n"


def adaptive_steps(document: Mapping[str, Any]) -> list[int]:
    """The chains of an adaptive file, of all batch sizes; those without a node are left out."""
    slots = [document, *(slot for slot in document.values() if isinstance(slot, Mapping))]
    steps = {step for slot in slots for step in slot.get(CANDIDATES, [])}
    return sorted(_positive(steps))


def schedule_config(ranges: Ranges) -> str:
    """vLLM's speculative config with a chain's depth per range of batch sizes."""
    most = max(depth for _, _, depth in ranges)
    document = {"num_speculative_tokens": most, SCHEDULE: [list(entry) for entry in ranges]}
    return json.dumps(document) + "\n"


def schedule_steps(document: Mapping[str, Any]) -> list[int]:
    """The chains of a schedule; those without a node are left out."""
    return sorted(_positive({entry[-1] for entry in document[SCHEDULE]}))


def synthetic_config(marginal: Sequence[float]) -> str:
    """A vLLM config that accepts by these rates at random: for load tests, the text is nonsense.

    Args:
        marginal: share of the passes that accept at least 1, 2, ... draft tokens.
    """
    rates = [round(rate, 4) for rate in marginal]
    return json.dumps(
        {
            "num_speculative_tokens": len(rates),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
        }
    )


def _positive(values: set[Any]) -> set[int]:
    """The positive ones; ValueError for what is no integer."""
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ValueError(f"{sorted(map(str, values))} are not all integers")
    return {value for value in values if value > 0}
