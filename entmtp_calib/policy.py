"""Policies: which tree to use next, from one number.

A policy is a small pure state machine over tree indices, smallest tree first; its state is the
index that it chose last. It is pure so that decoding and replay can call the same `choose` and
must agree. This module knows no traces, no costs, no models, no trees' paths and not where
thresholds come from.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from entmtp_calib.errors import ArtifactError
from entmtp_calib.signals import SignalSpec


@dataclass(frozen=True)
class Static:
    """Always the same tree."""

    index: int
    name: ClassVar[str] = "static"
    signal: ClassVar[None] = None

    @property
    def indices(self) -> tuple[int, ...]:
        """The trees it may choose."""
        return (self.index,)

    def start(self) -> int:
        """The state at the start of a text."""
        return self.index

    def choose(self, state: int, value: float) -> tuple[int, int]:
        """The tree's index, and the next state."""
        return self.index, self.index

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {"name": self.name, "index": self.index}


@dataclass(frozen=True)
class Ladder:
    """The i-th index where exactly i thresholds lie below the signal.

    Attributes:
        signal: what to look at; None only where there is a single index.
        thresholds: strictly rising.
        indices: one more than thresholds.
    """

    signal: SignalSpec | None
    thresholds: tuple[float, ...]
    indices: tuple[int, ...]
    name: ClassVar[str] = "ladder"

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in pairwise(self.thresholds))
        if not rising or not all(map(math.isfinite, self.thresholds)):
            raise ValueError(f"thresholds {self.thresholds} are not finite and strictly rising")
        if len(self.indices) != len(self.thresholds) + 1:
            raise ValueError(f"{len(self.thresholds)} thresholds for {len(self.indices)} trees")
        if self.signal is None and len(self.indices) > 1:
            raise ValueError("several trees without a signal to choose by")

    def start(self) -> int:
        """The state at the start of a text; a ladder looks at the signal only."""
        return self.indices[0]

    def choose(self, state: int, value: float) -> tuple[int, int]:
        """The tree's index, and the next state. An undefined value chooses the first index."""
        index = self.indices[bisect_left(self.thresholds, value)]
        return index, index

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {
            "name": self.name,
            "signal": _signal_to_dict(self.signal),
            "thresholds": list(self.thresholds),
            "indices": list(self.indices),
        }


@dataclass(frozen=True)
class Hysteresis:
    """Two trees: the large one above tau_on, the small one at or below tau_off, else as before.

    A text starts with the small one. The signal is None only where both are the same.
    """

    signal: SignalSpec | None
    small: int
    large: int
    tau_on: float = 0.0
    tau_off: float = 0.0
    name: ClassVar[str] = "hysteresis"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tau_on) and math.isfinite(self.tau_off)):
            raise ValueError(f"thresholds {self.tau_on} and {self.tau_off} are not finite")
        if self.tau_off > self.tau_on:
            raise ValueError(f"tau_off {self.tau_off} is above tau_on {self.tau_on}")
        if self.signal is None and self.small != self.large:
            raise ValueError("two trees without a signal to choose by")

    @property
    def indices(self) -> tuple[int, ...]:
        """The trees it may choose."""
        return (self.small,) if self.small == self.large else (self.small, self.large)

    def start(self) -> int:
        """The state at the start of a text."""
        return self.small

    def choose(self, state: int, value: float) -> tuple[int, int]:
        """The tree's index, and the next state. An undefined value changes nothing."""
        if value > self.tau_on:
            state = self.large
        elif value <= self.tau_off:
            state = self.small
        return state, state

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {
            "name": self.name,
            "signal": _signal_to_dict(self.signal),
            "small": self.small,
            "large": self.large,
            "tau_on": self.tau_on,
            "tau_off": self.tau_off,
        }


Policy = Static | Ladder | Hysteresis
_POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (Static, Ladder, Hysteresis)}


def policy_from_dict(data: Mapping[str, Any]) -> Policy:
    """Read what a policy's `to_dict` wrote.

    Raises:
        ArtifactError: for an unknown policy or signal, or fields that do not fit together.
    """
    try:
        fields = dict(data)
        name = fields.pop("name")
        if fields.get("signal") is not None:
            fields["signal"] = SignalSpec(**fields["signal"])
        if name not in _POLICIES:
            raise ValueError(f"there is no policy {name!r}")
        policy = _POLICIES[name](**{key: _frozen(value) for key, value in fields.items()})
        if not all(isinstance(index, int) and index >= 0 for index in policy.indices):
            raise ValueError(f"indices {policy.indices} do not number trees")
        return policy
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"unreadable policy {data!r}: {error}",
            "a policy as `entmtp build-bank` writes it",
            "build the bank again with this version",
        ) from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _signal_to_dict(signal: SignalSpec | None) -> dict[str, Any] | None:
    return None if signal is None else {"kind": signal.kind, "depth": signal.depth}
