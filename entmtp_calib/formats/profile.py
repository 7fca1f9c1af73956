"""Acceptance by depth, per target pass, as engines count it; and Model Optimizer's profile of it.

An engine counts passes. A step that only emits a text's last token needs none, so it is left out
here, and means are a little above the emitted tokens per step that stand elsewhere. This module
knows no costs and no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from entmtp_calib.errors import DataError
from entmtp_calib.replay import accepted, counts_by_prompt, reached, walk
from entmtp_calib.trace import Trace
from entmtp_calib.tree import Tree

SCHEMA_VERSION = "1.0"
_DIGITS = 6  # of Model Optimizer's figures


@dataclass(frozen=True)
class Profile:
    """What a tree's passes accept.

    Attributes:
        reached: D + 1 counts, the passes that accepted at least 0, 1, ..., D draft tokens.
        mean_per_request: mean over texts of the tokens that a pass of the text emits.
    """

    reached: tuple[int, ...]
    mean_per_request: float

    @classmethod
    def of(cls, trace: Trace, tree: Tree) -> Profile:
        """By replay; `DataError` where no text has a pass."""
        lengths = accepted(tree, trace.ranks)
        passes = walk(trace, lengths) & ~trace.terminal
        by_text = [c for c in counts_by_prompt(trace, lengths, passes) if c.steps]
        if not by_text:
            raise DataError("no text of two or more tokens", action="generate longer texts")
        mean = float(np.mean([counts.mean_emitted for counts in by_text]))
        return cls(tuple(reached(lengths, passes, tree.depth).tolist()), mean)

    @property
    def passes(self) -> int:
        """How many there are."""
        return self.reached[0]

    @property
    def marginal(self) -> list[float]:
        """[D], the share of all passes that accepted at least 1, ..., D draft tokens."""
        return [count / self.passes for count in self.reached[1:]]

    @property
    def conditional(self) -> list[float]:
        """[D], the same of those that accepted one less; 0 where none did."""
        return [after / before if before else 0.0 for before, after in pairwise(self.reached)]

    @property
    def histogram(self) -> dict[int, int]:
        """Passes by the tokens they emit, 1 to D + 1; numbers that never occur are left out."""
        exactly = [
            before - after
            for before, after in zip(self.reached, (*self.reached[1:], 0), strict=True)
        ]
        return {emitted: count for emitted, count in enumerate(exactly, start=1) if count}

    @property
    def mean_emitted(self) -> float:
        """Tokens that a pass emits: accepted ones and the target's own."""
        return sum(self.reached) / self.passes


def speculation_profile(
    profile: Profile,
    method: str,
    target: str,
    draft: str,
    conditions: Mapping[str, Any],
) -> str:
    """Model Optimizer's `speculation_profile.json`; its draft schema counts the target's own token.

    A tree's acceptance does not follow from that of another depth, so it is `measured_per_k`.

    Args:
        method: kind of heads.
        target, draft: names of the model and of the heads.
        conditions: what the figures hold for, as JSON values.
    """
    depth, mean = len(profile.marginal), round(profile.mean_emitted, _DIGITS)
    document = {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": method,
        "draft_checkpoint": {"name": draft},
        "target_model": {"name": target},
        "num_speculative_tokens": depth,
        "block_size": None,
        "max_supported_k": depth,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, _DIGITS) for rate in profile.conditional],
        "marginal_accept_rates": [round(rate, _DIGITS) for rate in profile.marginal],
        "mean_accept_length": mean,
        "mean_accept_length_per_request": round(profile.mean_per_request, _DIGITS),
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(depth): mean},
        "acceptance_length_histogram": {str(n): k for n, k in profile.histogram.items()},
        "per_category": None,
        "measurement_conditions": dict(conditions),
    }
    return json.dumps(document, indent=1) + "\n"
