"""The numbers a policy may look at before it chooses a tree.

Every signal points the same way: a larger value promises more acceptance (so entropy counts
negatively). Path values have a fixed depth, because the largest over all depths would always be the
target's own top-1 probability. Probabilities are rounded to float32 first, as a trace stores them,
so that a replayed policy sees bit for bit what a live one sees. This module knows no policies, no
tensors and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHAIN_KINDS = ("path_value", "expected_accepted")  # need the greedy chain of this step
SIGNAL_KINDS = (*CHAIN_KINDS, "entropy", "base_top1", "acceptance_average")

AVERAGE_ALPHA = 0.2  # weight of the newest step in the moving average of acceptance
AVERAGE_START = 1.0  # accepted draft tokens assumed before anything is known


@dataclass(frozen=True)
class SignalSpec:
    """Which signal, and for the greedy chain's signals to which depth.

    Raises:
        ValueError: for an unknown kind, or a depth where none belongs (or the reverse).
    """

    kind: str
    depth: int = 0

    def __post_init__(self) -> None:
        if self.kind not in SIGNAL_KINDS:
            raise ValueError(f"signal {self.kind!r} is not one of {', '.join(SIGNAL_KINDS)}")
        if (self.depth > 0) != (self.kind in CHAIN_KINDS) or self.depth < 0:
            raise ValueError(f"signal {self.kind!r} cannot have depth {self.depth}")

    @property
    def chain_depth(self) -> int:
        """How many levels of the greedy chain must be drafted before the policy can choose."""
        return self.depth

    @property
    def is_average(self) -> bool:
        """Whether the value comes from the policy's own past steps, not from this position."""
        return self.kind == "acceptance_average"


def base_top1(logits: ArrayLike) -> float:
    """Probability of the target's best token; logits [V]."""
    shifted = np.asarray(logits, dtype=np.float64)
    return float(1.0 / np.exp(shifted - shifted.max()).sum())


def entropy(logits: ArrayLike) -> float:
    """Entropy of the target's distribution in nats; logits [V], -inf for impossible tokens."""
    shifted = np.asarray(logits, dtype=np.float64)
    shifted = shifted[np.isfinite(shifted)] - shifted.max()
    weights = np.exp(shifted)
    return float(np.log(weights.sum()) - (weights * shifted).sum() / weights.sum())


def path_value(base: ArrayLike, chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N]: the target's top-1 probability [N] times the chain's to `depth` [N, >= depth]."""
    return np.asarray(_probabilities(base) * np.prod(_chain(chain_probs, depth), axis=-1))


def expected_accepted(chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N]: sum over d <= depth of the product of the chain's first d probabilities."""
    return np.asarray(np.cumprod(_chain(chain_probs, depth), axis=-1).sum(axis=-1))


def signal_values(
    spec: SignalSpec, base: ArrayLike, nats: ArrayLike, chain_probs: ArrayLike
) -> NDArray[np.float64]:
    """[N]: a position's signal, from its top-1 probability [N], entropy [N] and chain [N, D]."""
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


def next_average(average: float, accepted_draft_tokens: int, speculated: bool) -> float:
    """The moving average of acceptance after one more step.

    A step without speculation shows nothing. It moves the average back to its start value, so that
    a policy that stopped speculating tries again.
    """
    seen = accepted_draft_tokens if speculated else AVERAGE_START
    return average + AVERAGE_ALPHA * (seen - average)


def _chain(chain_probs: ArrayLike, depth: int) -> NDArray[np.float64]:
    """[N, depth]; a chain that is too short is an error, never another depth's value."""
    chain = _probabilities(chain_probs)
    if chain.shape[-1] < depth:
        raise ValueError(f"a chain of depth {chain.shape[-1]} has no signal of depth {depth}")
    return chain[..., :depth]


def _probabilities(values: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(np.asarray(values, dtype=np.float32), dtype=np.float64)
