"""Policies as pure state machines that read no more than they need, and survive JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_calib.errors import ArtifactError
from entmtp_calib.policy import (
    DRAFT_ON,
    Hysteresis,
    Ladder,
    Policy,
    Staged,
    Static,
    level_signal,
    policy_from_dict,
)
from entmtp_calib.signals import SignalSpec

TOP1 = SignalSpec("base_top1")
CHAIN = [SignalSpec("chain_value", depth) for depth in range(1, 4)]
STAGED = Staged(((), (0.5,), (0.2, 0.6)), ((DRAFT_ON,), (0, DRAFT_ON), (1, 2, 3)))
NAN = math.nan


class Read:
    """Gives the values it was made with, and notes which were asked for."""

    def __init__(self, values: Mapping[SignalSpec, float] | None = None) -> None:
        self.values = values or {}
        self.read: list[SignalSpec] = []

    def __call__(self, spec: SignalSpec) -> float:
        self.read.append(spec)
        return self.values[spec]


def chosen(policy: Policy, values: Mapping[SignalSpec, float], state: int | None = None) -> int:
    """The tree that a policy chooses; its next state is always that tree."""
    index, after = policy.choose(policy.start() if state is None else state, Read(values))
    assert after == index
    return index


def test_a_static_policy_always_chooses_its_tree_and_reads_nothing() -> None:
    policy, read = Static(2), Read()
    assert policy.choose(policy.start(), read) == (2, 2)
    assert (policy.signals, policy.indices, read.read) == ((), (2,), [])


def test_a_ladder_climbs_above_each_threshold_not_at_it() -> None:
    policy = Ladder(TOP1, (0.2, 0.6), (0, 1, 4))
    found = [chosen(policy, {TOP1: value}) for value in (0.1, 0.2, 0.3, 0.6, 0.61)]
    assert found == [0, 0, 1, 1, 4]


@given(st.sets(st.floats(-5, 5), max_size=6), st.floats(-6, 6))
@settings(max_examples=60, deadline=None)
def test_a_ladders_rung_is_the_number_of_thresholds_below(levels: set[float], value: float) -> None:
    policy = Ladder(TOP1, tuple(sorted(levels)), tuple(range(len(levels) + 1)))
    assert chosen(policy, {TOP1: value}) == sum(level < value for level in levels)


def test_a_ladder_of_one_tree_reads_nothing_where_it_has_no_signal() -> None:
    read = Read()
    assert Ladder(None, (), (3,)).choose(0, read) == (3, 3)
    assert read.read == []
    assert Ladder(None, (), (3,)).signals == ()


# below, at and between the thresholds 0.3 and 0.7, at the upper one and above it
HYSTERESIS_TABLE = {
    "small": {0.29: "small", 0.3: "small", 0.31: "small", 0.7: "small", 0.71: "large"},
    "large": {0.29: "small", 0.3: "small", 0.31: "large", 0.7: "large", 0.71: "large"},
}


@pytest.mark.parametrize("before", ["small", "large"])
def test_hysteresis_is_this_truth_table(before: str) -> None:
    trees = {"small": 1, "large": 3}
    policy = Hysteresis(TOP1, **trees, tau_on=0.7, tau_off=0.3)
    for value, after in HYSTERESIS_TABLE[before].items():
        assert chosen(policy, {TOP1: value}, trees[before]) == trees[after], value


def test_hysteresis_starts_small_and_keeps_its_tree_between_the_thresholds() -> None:
    policy = Hysteresis(TOP1, small=1, large=3, tau_on=0.7, tau_off=0.3)
    state, found = policy.start(), []
    for value in (0.5, 0.7, 0.71, 0.5, 0.31, 0.3, 0.5, 0.9):
        index, state = policy.choose(state, Read({TOP1: value}))
        found.append(index)
    assert found == [1, 1, 3, 3, 3, 1, 1, 3]


def test_hysteresis_with_equal_thresholds_remembers_nothing() -> None:
    policy = Hysteresis(TOP1, 0, 1, 0.5, 0.5)
    for state in (0, 1):
        found = [chosen(policy, {TOP1: value}, state) for value in (0.4, 0.5, 0.6)]
        assert found == [0, 0, 1]


def test_hysteresis_reads_its_one_signal_once() -> None:
    for state in (0, 1):
        read = Read({TOP1: 0.5})
        Hysteresis(TOP1, 0, 1, 0.7, 0.3).choose(state, read)
        assert read.read == [TOP1]
    assert Hysteresis(None, 1, 1).choose(1, Read()) == (1, 1)
    assert Hysteresis(None, 1, 1).signals == ()


# Value of the chain after one level and after two; the tree; how many levels were looked at.
STAGED_TABLE = [
    (0.4, 0.9, 0, 1),
    (0.5, 0.9, 0, 1),
    (0.51, 0.1, 1, 2),
    (0.51, 0.2, 1, 2),
    (0.51, 0.21, 2, 2),
    (0.9, 0.6, 2, 2),
    (0.9, 0.61, 3, 2),
]


@pytest.mark.parametrize(("first", "second", "tree", "levels"), STAGED_TABLE)
def test_staged_is_this_truth_table_and_reads_nothing_after_its_decision(
    first: float, second: float, tree: int, levels: int
) -> None:
    read = Read({CHAIN[0]: first, CHAIN[1]: second})
    for state in (0, 3):  # every step is decided afresh
        read.read.clear()
        assert STAGED.choose(state, read) == (tree, tree)
        assert read.read == CHAIN[:levels]


def test_staged_may_decide_before_it_has_drafted_anything() -> None:
    read = Read()
    assert Staged(((),), ((2,),)).choose(0, read) == (2, 2)
    assert Staged(((), (0.5,)), ((2,), (0, 1))).choose(0, read) == (2, 2)
    assert read.read == []


def test_staged_may_draft_on_in_any_range() -> None:
    policy = Staged(
        ((), (0.2, 0.4), (), (0.1,)),
        ((DRAFT_ON,), (DRAFT_ON, 5, DRAFT_ON), (DRAFT_ON,), (6, 7)),
    )
    expected = {0.1: (6, 3), 0.3: (5, 1), 0.5: (6, 3)}
    for first, (tree, levels) in expected.items():
        read = Read({CHAIN[0]: first, CHAIN[1]: 0.5, CHAIN[2]: 0.1})
        assert policy.choose(0, read)[0] == tree
        assert read.read == CHAIN[:levels]
    assert policy.indices == (5, 6, 7)
    assert policy.signals == tuple(CHAIN)


def test_a_level_looks_at_the_chains_value_to_its_depth() -> None:
    assert [level_signal(depth) for depth in (1, 8, 9, 40)] == [
        SignalSpec("chain_value", depth) for depth in (1, 8, 9, 40)
    ]


def test_an_undefined_signal_never_makes_a_larger_tree() -> None:
    assert chosen(Ladder(TOP1, (0.2, 0.6), (0, 1, 2)), {TOP1: NAN}, 2) == 0
    assert chosen(Hysteresis(TOP1, 0, 1, 0.7, 0.3), {TOP1: NAN}, 0) == 0
    assert chosen(STAGED, {CHAIN[0]: NAN, CHAIN[1]: NAN}) == 0


POLICIES: list[Policy] = [
    Static(0),
    Ladder(SignalSpec("path_value", 3), (0.25, 0.5), (0, 1, 5)),
    Ladder(SignalSpec("chain_value", 1, running=True), (0.5,), (2, 0)),
    Ladder(None, (), (2,)),
    Hysteresis(SignalSpec("entropy"), 0, 3, -0.5, -1.25),
    Hysteresis(SignalSpec("acceptance_average"), 2, 1, 0.9, 0.25),
    Hysteresis(None, 1, 1),
    STAGED,
    Staged(((),), ((3,),)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_survives_json(policy: Policy) -> None:
    assert policy_from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_the_policies_of_older_banks_have_no_word_on_running() -> None:
    data = {"name": "ladder", "signal": {"kind": "entropy"}, "thresholds": [0.5], "indices": [0, 1]}
    assert policy_from_dict(data) == Ladder(SignalSpec("entropy"), (0.5,), (0, 1))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("numbers", [(3, 0, 5, 1, 4, 2), (0, 1, 2, 3, 4, 5)])
def test_a_renumbered_policy_chooses_the_same_trees(
    policy: Policy, numbers: tuple[int, ...]
) -> None:
    """Tree k of the old order is tree numbers[k] of the new one."""
    renumbered = policy.renumbered(numbers)
    assert set(renumbered.indices) == {numbers[index] for index in policy.indices}
    assert renumbered.signals == policy.signals
    assert renumbered.start() in renumbered.indices
    for values in itertools.product((-1.0, 0.22, 0.5, 0.55, 0.95), repeat=2):
        given_values = dict(zip(policy.signals, values, strict=False))
        for state in policy.indices:
            index, after = policy.choose(state, Read(given_values))
            found = renumbered.choose(numbers[state], Read(given_values))
            assert found == (numbers[index], numbers[after])


def test_drafting_on_keeps_its_meaning_when_trees_are_renumbered() -> None:
    assert STAGED.renumbered([9, 8, 7, 6]).actions == ((DRAFT_ON,), (9, DRAFT_ON), (8, 7, 6))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"name": "lottery"},
        {"name": ["static"]},
        {"name": "static"},
        {"name": "static", "index": 0, "luck": 1},
        {"name": "static", "index": "0"},
        {"name": "static", "index": -1},
        {"name": "ladder", "signal": {"kind": "luck"}, "thresholds": [], "indices": [0]},
        {"name": "ladder", "signal": {"kind": "entropy"}, "thresholds": [2, 1], "indices": [0] * 3},
        {"name": "ladder", "signal": {"kind": "entropy"}, "thresholds": [1], "indices": [0]},
        {"name": "ladder", "signal": None, "thresholds": [1], "indices": [0, 1]},
        {"name": "hysteresis", "signal": None, "small": 0, "large": 1},
        {"name": "staged", "thresholds": [[]]},
        {"name": "staged", "thresholds": [], "actions": []},
        {"name": "staged", "thresholds": [[]], "actions": [[-1]]},
        {"name": "staged", "thresholds": [[]], "actions": [[-2]]},
        {"name": "staged", "thresholds": [[]], "actions": [["0"]]},
        {"name": "staged", "thresholds": [[]], "actions": [0]},
        {"name": "staged", "thresholds": [[0.5]], "actions": [[0, 1]]},
        {"name": "staged", "thresholds": [[], []], "actions": [[0]]},
        {"name": "staged", "thresholds": [[], [0.5]], "actions": [[-1], [0]]},
        {"name": "staged", "thresholds": [[], [0.5, 0.5]], "actions": [[-1], [0, 1, 2]]},
        {"name": "staged", "thresholds": [[], [None]], "actions": [[-1], [0, 1]]},
    ],
)
def test_a_policy_that_cannot_be_is_refused(data: dict) -> None:
    with pytest.raises(ArtifactError, match="unreadable policy"):
        policy_from_dict(data)


def test_thresholds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="strictly rising"):
        Ladder(TOP1, (0.5, 0.5), (0, 1, 2))
    with pytest.raises(ValueError, match="not finite"):
        Ladder(TOP1, (NAN,), (0, 1))
    with pytest.raises(ValueError, match="above tau_on"):
        Hysteresis(TOP1, 0, 1, tau_on=0.1, tau_off=0.2)
    with pytest.raises(ValueError, match="strictly rising"):
        Staged(((), (0.5, 0.2)), ((DRAFT_ON,), (0, 1, 2)))


def test_staged_cannot_draft_on_for_ever_or_look_before_it_drafts() -> None:
    with pytest.raises(ValueError, match="the last level cannot draft on"):
        Staged(((), (0.5,)), ((DRAFT_ON,), (0, DRAFT_ON)))
    with pytest.raises(ValueError, match="none at level 0"):
        Staged(((0.5,),), ((0, 1),))
