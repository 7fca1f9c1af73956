"""Policies: which tree to use next, from signals that are read one at a time.

A policy is a small pure state machine over tree indices, smallest tree first; its state is the
index that it chose last. It reads signals through a function it is given, so that decoding drafts
no level of the greedy chain that the decision does not need; replay gives it the recorded values,
so both must agree. This module knows no traces, no costs, no models, no trees' paths and not where
thresholds come from.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from entmtp_calib.errors import ArtifactError
from entmtp_calib.signals import Read, SignalSpec

DRAFT_ON = -1  # in place of a tree's index: draft one level more, then decide
Thresholds = tuple[float, ...]


class _Reader:
    """Reads a signal only to compare it with thresholds: all it sees is how many lie below."""

    @property
    def cuts(self) -> dict[SignalSpec, Thresholds]:
        """What it may read, and the rising thresholds that it compares each value with."""
        return {}

    @property
    def signals(self) -> tuple[SignalSpec, ...]:
        """What it may read."""
        return tuple(self.cuts)


@dataclass(frozen=True)
class Static(_Reader):
    """Always the same tree."""

    index: int
    name: ClassVar[str] = "static"

    @property
    def indices(self) -> tuple[int, ...]:
        """The trees it may choose."""
        return (self.index,)

    def start(self) -> int:
        """The state at the start of a text."""
        return self.index

    def choose(self, state: int, read: Read) -> tuple[int, int]:
        """The tree's index, and the next state."""
        return self.index, self.index

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {"name": self.name, "index": self.index}

    def renumbered(self, numbers: Sequence[int]) -> Static:
        """The same policy where tree k is called numbers[k]."""
        return Static(numbers[self.index])


@dataclass(frozen=True)
class Ladder(_Reader):
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
        _check_steps(self.thresholds, self.indices)
        if self.signal is None and len(self.indices) > 1:
            raise ValueError("several trees without a signal to choose by")

    def start(self) -> int:
        """The state at the start of a text; a ladder looks at the signal only."""
        return self.indices[0]

    @property
    def cuts(self) -> dict[SignalSpec, Thresholds]:
        """See `_Reader`."""
        return {} if self.signal is None else {self.signal: self.thresholds}

    def choose(self, state: int, read: Read) -> tuple[int, int]:
        """The tree's index, and the next state."""
        index = self.indices[0]
        if self.signal is not None:
            index = self.indices[bisect_left(self.thresholds, read(self.signal))]
        return index, index

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {
            "name": self.name,
            "signal": self.signal and asdict(self.signal),
            "thresholds": list(self.thresholds),
            "indices": list(self.indices),
        }

    def renumbered(self, numbers: Sequence[int]) -> Ladder:
        """The same policy where tree k is called numbers[k]."""
        return replace(self, indices=tuple(numbers[index] for index in self.indices))


@dataclass(frozen=True)
class Hysteresis(_Reader):
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

    @property
    def cuts(self) -> dict[SignalSpec, Thresholds]:
        """See `_Reader`."""
        thresholds = tuple(sorted({self.tau_off, self.tau_on}))
        return {} if self.signal is None else {self.signal: thresholds}

    def start(self) -> int:
        """The state at the start of a text."""
        return self.small

    def choose(self, state: int, read: Read) -> tuple[int, int]:
        """The tree's index, and the next state."""
        if self.signal is not None:
            value = read(self.signal)
            if value > self.tau_on:
                state = self.large
            elif value <= self.tau_off:
                state = self.small
        return state, state

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {
            "name": self.name,
            "signal": self.signal and asdict(self.signal),
            "small": self.small,
            "large": self.large,
            "tau_on": self.tau_on,
            "tau_off": self.tau_off,
        }

    def renumbered(self, numbers: Sequence[int]) -> Hysteresis:
        """The same policy where tree k is called numbers[k]."""
        return replace(self, small=numbers[self.small], large=numbers[self.large])


@dataclass(frozen=True)
class Staged(_Reader):
    """Decides while drafting: at each level of the greedy chain, stop with a tree or draft on.

    Level 0 is before any drafting and looks at nothing; level d looks at `level_signal(d)`. What
    was drafted is part of the tree, so a step that the heads are unsure of costs few levels.

    Attributes:
        thresholds: per level, strictly rising; level 0 has none.
        actions: per level, one more than thresholds: a tree's index, or `DRAFT_ON`. The last level
            stops.
    """

    thresholds: tuple[Thresholds, ...]
    actions: tuple[tuple[int, ...], ...]
    name: ClassVar[str] = "staged"

    def __post_init__(self) -> None:
        if not self.actions or len(self.thresholds) != len(self.actions) or self.thresholds[0]:
            raise ValueError("staged levels need thresholds and actions each, none at level 0")
        for thresholds, actions in zip(self.thresholds, self.actions, strict=True):
            _check_steps(thresholds, actions)
        if DRAFT_ON in self.actions[-1]:
            raise ValueError("the last level cannot draft on")

    @property
    def indices(self) -> tuple[int, ...]:
        """The trees it may choose."""
        return tuple(sorted({a for level in self.actions for a in level if a != DRAFT_ON}))

    @property
    def cuts(self) -> dict[SignalSpec, Thresholds]:
        """See `_Reader`."""
        levels = enumerate(self.thresholds)
        return {level_signal(depth): thresholds for depth, thresholds in levels if depth}

    def start(self) -> int:
        """The state at the start of a text; every step is decided afresh."""
        return self.indices[0]

    def choose(self, state: int, read: Read) -> tuple[int, int]:
        """The tree's index, and the next state."""
        index = DRAFT_ON
        for depth, (thresholds, actions) in enumerate(
            zip(self.thresholds, self.actions, strict=True)
        ):
            at = bisect_left(thresholds, read(level_signal(depth))) if depth else 0
            index = actions[at]
            if index != DRAFT_ON:
                break
        return index, index

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `policy_from_dict` reads it back."""
        return {
            "name": self.name,
            "thresholds": [list(level) for level in self.thresholds],
            "actions": [list(level) for level in self.actions],
        }

    def renumbered(self, numbers: Sequence[int]) -> Staged:
        """The same policy where tree k is called numbers[k]."""
        actions = tuple(
            tuple(a if a == DRAFT_ON else numbers[a] for a in level) for level in self.actions
        )
        return replace(self, actions=actions)


def level_signal(depth: int) -> SignalSpec:
    """What a staged policy looks at after drafting to `depth`, at least 1."""
    return _LEVELS[depth - 1] if depth <= len(_LEVELS) else SignalSpec("chain_value", depth)


_LEVELS = tuple(SignalSpec("chain_value", depth) for depth in range(1, 9))


def chain_depth(policy: Policy) -> int:
    """The most levels of the greedy chain that a policy may draft before it chooses."""
    return max((spec.depth for spec in policy.signals), default=0)


Policy = Static | Ladder | Hysteresis | Staged
_POLICIES: dict[str, type[Policy]] = {k.name: k for k in (Static, Ladder, Hysteresis, Staged)}


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
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _check_steps(thresholds: Thresholds, indices: tuple[int, ...]) -> None:
    """ValueError unless the thresholds cut the values into one range per index."""
    rising = all(low < high for low, high in pairwise(thresholds))
    if not rising or not all(map(math.isfinite, thresholds)):
        raise ValueError(f"thresholds {thresholds} are not finite and strictly rising")
    if len(indices) != len(thresholds) + 1:
        raise ValueError(f"{len(thresholds)} thresholds for {len(indices)} trees")
