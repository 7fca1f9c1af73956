"""Policies as pure state machines that survive JSON."""

from __future__ import annotations

import json
import math

import pytest

from entmtp_calib.errors import ArtifactError
from entmtp_calib.policy import Hysteresis, Ladder, Policy, Static, policy_from_dict
from entmtp_calib.signals import SignalSpec

TOP1 = SignalSpec("base_top1")


def test_a_static_policy_always_chooses_its_tree() -> None:
    policy = Static(2)
    assert policy.signal is None
    assert policy.choose(policy.start(), math.nan) == (2, 2)


def test_a_ladder_climbs_above_each_threshold_not_at_it() -> None:
    policy = Ladder(TOP1, (0.2, 0.6), (0, 1, 4))
    chosen = [policy.choose(policy.start(), value)[0] for value in (0.1, 0.2, 0.3, 0.6, 0.61)]
    assert chosen == [0, 0, 1, 1, 4]


def test_hysteresis_keeps_its_tree_between_the_thresholds() -> None:
    policy = Hysteresis(TOP1, small=1, large=3, tau_on=0.7, tau_off=0.3)
    state, chosen = policy.start(), []
    for value in (0.5, 0.7, 0.71, 0.5, 0.31, 0.3, 0.5, 0.9):
        index, state = policy.choose(state, value)
        chosen.append(index)
    assert chosen == [1, 1, 3, 3, 3, 1, 1, 3]


def test_choosing_is_pure() -> None:
    policy = Hysteresis(TOP1, 0, 1, 0.7, 0.3)
    assert policy.choose(1, 0.5) == policy.choose(1, 0.5) == (1, 1)
    assert policy.choose(0, 0.5) == (0, 0)


def test_an_undefined_signal_never_makes_a_larger_tree() -> None:
    assert Ladder(TOP1, (0.2, 0.6), (0, 1, 2)).choose(2, math.nan) == (0, 0)
    assert Hysteresis(TOP1, 0, 1, 0.7, 0.3).choose(0, math.nan) == (0, 0)


@pytest.mark.parametrize(
    "policy",
    [
        Static(0),
        Ladder(SignalSpec("path_value", 3), (0.25, 0.5), (0, 1, 5)),
        Ladder(None, (), (2,)),
        Hysteresis(SignalSpec("entropy"), 0, 3, -0.5, -1.25),
        Hysteresis(None, 1, 1),
    ],
)
def test_a_policy_survives_json(policy: Policy) -> None:
    assert policy_from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "lottery"},
        {"name": "static"},
        {"name": "static", "index": 0, "luck": 1},
        {"name": "static", "index": "0"},
        {"name": "static", "index": -1},
        {"name": "ladder", "signal": {"kind": "luck"}, "thresholds": [], "indices": [0]},
        {"name": "ladder", "signal": {"kind": "entropy"}, "thresholds": [2, 1], "indices": [0] * 3},
        {"name": "ladder", "signal": {"kind": "entropy"}, "thresholds": [1], "indices": [0]},
        {"name": "ladder", "signal": None, "thresholds": [1], "indices": [0, 1]},
        {"name": "hysteresis", "signal": None, "small": 0, "large": 1},
    ],
)
def test_a_policy_that_cannot_be_is_refused(data: dict) -> None:
    with pytest.raises(ArtifactError, match="unreadable policy"):
        policy_from_dict(data)


def test_thresholds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="strictly rising"):
        Ladder(TOP1, (0.5, 0.5), (0, 1, 2))
    with pytest.raises(ValueError, match="not finite"):
        Ladder(TOP1, (math.nan,), (0, 1))
    with pytest.raises(ValueError, match="above tau_on"):
        Hysteresis(TOP1, 0, 1, tau_on=0.1, tau_off=0.2)
