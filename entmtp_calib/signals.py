"""The numbers a policy may look at before it chooses a tree.

Every signal points the same way: a larger value promises more acceptance (so entropy counts
negatively). Path values have a fixed depth, because the largest over all depths would always be the
target's own top-1 probability. Probabilities are rounded to float32 first, as a trace stores them,
so that a replayed policy sees what a live one sees. What a text's past steps have shown is kept in
a `Memory`, the same in decoding and in replay. This module knows no policies, no tensors and no
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHAIN_KINDS = ("chain_value", "path_value", "expected_accepted")  # of this step's greedy chain
SIGNAL_KINDS = (*CHAIN_KINDS, "entropy", "base_top1", "acceptance_average")

AVERAGE_ALPHA = 0.2  # weight of the newest step in a moving average
AVERAGE_START = 1.0  # accepted draft tokens assumed before anything is known


@dataclass(frozen=True)
class SignalSpec:
    """Which signal, and for the greedy chain's signals to which depth.

    Attributes:
        kind: one of `SIGNAL_KINDS`.
        depth: levels of the greedy chain that it is made of, 0 for the other kinds.
        running: the moving average of the signal over the text's steps, this one included,
            in place of this step's value alone.

    Raises:
        ValueError: for an unknown kind, a depth where none belongs (or the reverse), or a running
            estimate of what is a moving average already.
    """

    kind: str
    depth: int = 0
    running: bool = False

    def __post_init__(self) -> None:
        if self.kind not in SIGNAL_KINDS:
            raise ValueError(f"signal {self.kind!r} is not one of {', '.join(SIGNAL_KINDS)}")
        if (self.depth > 0) != (self.kind in CHAIN_KINDS) or self.depth < 0:
            raise ValueError(f"signal {self.kind!r} cannot have depth {self.depth}")
        if self.running and self.is_average:
            raise ValueError(f"signal {self.kind!r} is a running estimate already")

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.depth, self.running))

    def __hash__(self) -> int:
        return self._hash  # every reading of a signal looks it up

    @property
    def is_average(self) -> bool:
        """Whether the value comes from the text's past steps alone, not from this position."""
        return self.kind == "acceptance_average"

    def __str__(self) -> str:
        """As it is written on the command line: path_value:2, running:entropy."""
        return "running:" * self.running + self.kind + (f":{self.depth}" if self.depth else "")

    @classmethod
    def parse(cls, text: str) -> SignalSpec:
        """Inverse of `str`; ValueError for anything else."""
        rest = text.removeprefix("running:")
        kind, _, depth = rest.partition(":")
        if depth and not depth.isdecimal():
            raise ValueError(f"signal {text!r} has no depth {depth!r}")
        spec = cls(kind, int(depth or 0), running=rest != text)
        if str(spec) != text:
            raise ValueError(f"signal {text!r} is written {spec}")
        return spec


Read = Callable[[SignalSpec], float]
"""Gives a policy a signal's value at this step; what it needs of the greedy chain is drafted."""


class Memory:
    """What the steps of one text have shown so far: moving averages."""

    def __init__(self) -> None:
        self.average = AVERAGE_START
        self._running: dict[SignalSpec, float] = {}

    def value(self, spec: SignalSpec, fresh: float) -> float:
        """What a policy sees of a signal whose value at this step is `fresh`; once per step."""
        if not spec.running:
            return fresh
        before = self._running.get(spec, fresh)
        now = before + AVERAGE_ALPHA * (fresh - before)
        self._running[spec] = now
        return now

    def observe(self, accepted_draft_tokens: int, speculated: bool) -> None:
        """Take in a step.

        A step without speculation shows nothing. It moves the average back to its start value, so
        that a policy that stopped speculating tries again.
        """
        seen = accepted_draft_tokens if speculated else AVERAGE_START
        self.average += AVERAGE_ALPHA * (seen - self.average)


def chain_value(chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N]: the product of the chain's probabilities to `depth`: the heads' own path value."""
    return np.asarray(np.prod(_chain(chain_probs, depth), axis=-1))


def path_value(base: ArrayLike, chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N]: the target's top-1 probability [N] times the chain's value: EntMTP's signal."""
    return np.asarray(_probabilities(base) * chain_value(chain_probs, depth))


def expected_accepted(chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N]: sum over d <= depth of the product of the chain's first d probabilities."""
    return np.asarray(np.cumprod(_chain(chain_probs, depth), axis=-1).sum(axis=-1))


def signal_values(
    spec: SignalSpec, base: ArrayLike, nats: ArrayLike, chain_probs: ArrayLike
) -> NDArray[np.float64]:
    """[N]: a position's signal, from its top-1 probability [N], entropy [N] and chain [N, D]."""
    if spec.kind == "chain_value":
        return chain_value(chain_probs, spec.depth)
    if spec.kind == "path_value":
        return path_value(base, chain_probs, spec.depth)
    if spec.kind == "expected_accepted":
        return expected_accepted(chain_probs, spec.depth)
    if spec.kind == "entropy":
        return -_probabilities(nats)
    if spec.kind == "base_top1":
        return _probabilities(base)
    raise ValueError(f"signal {spec.kind!r} does not come from one position")


def signal_value(spec: SignalSpec, base: float, nats: float, chain_probs: Sequence[float]) -> float:
    """One position's signal, for the decoding loop."""
    return float(signal_values(spec, [base], [nats], [list(chain_probs)])[0])


def _chain(chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N, depth]; a chain that is too short is an error, never another depth's value."""
    chain = _probabilities(chain_probs)
    if chain.shape[-1] < depth:
        raise ValueError(f"a chain of depth {chain.shape[-1]} has no signal of depth {depth}")
    return chain[..., :depth]


def _probabilities(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(np.asarray(values, dtype=np.float32), dtype=np.float64)
