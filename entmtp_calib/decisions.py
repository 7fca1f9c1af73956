"""What a policy does, looked up: it is asked once per cell of its signals, not once per step.

A policy sees of a signal only how many of its thresholds lie below it. So a replay of very many
steps asks it once for each state and each such cell, and looks the answers up; it is the policy's
own `choose` that answers. This module knows no texts, no trees and no costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from entmtp_calib.policy import Policy, Thresholds
from entmtp_calib.signals import SignalSpec
from entmtp_calib.trace import Floats, Ints


@dataclass(frozen=True)
class Answer:
    """The policy has chosen.

    Attributes:
        index: the tree's, and the policy's next state.
        levels: of the greedy chain, drafted for what it has read.
    """

    index: int
    levels: int


@dataclass(frozen=True)
class Look:
    """The policy reads a signal; `after[i]` follows where i of the thresholds lie below it."""

    spec: SignalSpec
    thresholds: Thresholds
    after: tuple[Decision, ...]


Decision = Answer | Look


def decide(policy: Policy, state: int) -> Decision:
    """All that the policy may do in a step that starts in this state."""
    return _decide(policy, state, {})


def _decide(policy: Policy, state: int, known: Mapping[SignalSpec, float]) -> Decision:
    """What it does where it has read these values."""
    unknown: list[SignalSpec] = []

    def read(spec: SignalSpec) -> float:
        if spec not in known:
            unknown.append(spec)
        return known.get(spec, math.nan)

    index, _ = policy.choose(state, read)
    if not unknown:
        return Answer(index, max((spec.depth for spec in known), default=0))
    spec = unknown[0]
    thresholds = policy.cuts[spec]
    # The largest value of each cell stands for all of it.
    after = [_decide(policy, state, {**known, spec: cell}) for cell in (*thresholds, math.inf)]
    return Look(spec, thresholds, tuple(after))


def chosen_by_cell(policy: Policy, state: int) -> list[int]:
    """The trees that a policy with one signal chooses, by how many thresholds lie below it."""
    decision = decide(policy, state)
    assert isinstance(decision, Look)
    return [after.index for after in decision.after if isinstance(after, Answer)]


def decided(
    decision: Decision, values: Mapping[SignalSpec, Floats], n_rows: int
) -> tuple[Ints, Ints, Floats]:
    """What it comes to at every row.

    Args:
        values: float64 [N] per signal.
        n_rows: N.

    Returns:
        int64 [N], the chosen indices; int64 [N], the levels drafted; float64 [N], the values read
        last, NaN where none was read.
    """
    if isinstance(decision, Answer):
        index, levels = np.full(n_rows, decision.index), np.full(n_rows, decision.levels)
        return index, levels, np.full(n_rows, np.nan)
    last = values[decision.spec].copy()
    cells = np.searchsorted(decision.thresholds, last, side="left")
    answers = [d if isinstance(d, Answer) else Answer(0, 0) for d in decision.after]
    index = np.array([answer.index for answer in answers])[cells]
    levels = np.array([answer.levels for answer in answers])[cells]
    for cell, further in enumerate(decision.after):
        if isinstance(further, Look):
            rows = np.flatnonzero(cells == cell)
            inside = {spec: numbers[rows] for spec, numbers in values.items()}
            index[rows], levels[rows], last[rows] = decided(further, inside, len(rows))
    return index, levels, last
