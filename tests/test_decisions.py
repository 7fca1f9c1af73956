"""A policy as a table answers what the policy answers, in every cell and on its borders."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_calib.decisions import Answer, Look, chosen_by_cell, decide, decided
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.signals import SignalSpec

TOP1 = SignalSpec("base_top1")
ONE, TWO = SignalSpec("chain_value", 1), SignalSpec("chain_value", 2)
STAGED = Staged(((), (0.4, 0.6), (0.2, 0.5)), ((DRAFT_ON,), (0, DRAFT_ON, 1), (1, 3, 2)))
POLICIES: list[Policy] = [
    Static(2),
    Ladder(None, (), (1,)),
    Ladder(ONE, (), (1,)),
    Ladder(TOP1, (0.2, 0.5, 0.6), (0, 2, 1, 3)),
    Hysteresis(TOP1, 1, 2, 0.6, 0.4),
    Hysteresis(TWO, 0, 3, 0.5, 0.5),
    STAGED,
    Staged(((),), ((3,),)),
]
# Thresholds themselves, their neighbours, and what lies between and beyond.
VALUES = st.sampled_from([0.2, 0.4, 0.5, 0.6, math.nextafter(0.5, 0), math.nextafter(0.5, 1)])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(rows=st.lists(st.tuples(VALUES | st.floats(-1, 2), VALUES, VALUES), max_size=12))
@settings(max_examples=40, deadline=None)
def test_every_row_is_decided_as_the_policy_decides_it(
    policy: Policy, rows: list[tuple[float, float, float]]
) -> None:
    values = dict(zip((TOP1, ONE, TWO), np.array(rows).reshape(-1, 3).T, strict=True))
    for state in policy.indices:
        index, levels, last = decided(decide(policy, state), values, len(rows))
        for row in range(len(rows)):
            read: list[SignalSpec] = []

            def reading(spec: SignalSpec, row: int = row, read: list[SignalSpec] = read) -> float:
                read.append(spec)
                return float(values[spec][row])

            assert policy.choose(state, reading) == (index[row], index[row])
            assert levels[row] == max((spec.depth for spec in read), default=0)
            seen = values[read[-1]][row] if read else math.nan
            assert last[row] == pytest.approx(seen, nan_ok=True, abs=0)


def test_a_policy_is_asked_once_per_cell_that_it_reaches() -> None:
    decision = decide(STAGED, 0)
    inner = Look(TWO, (0.2, 0.5), (Answer(1, 2), Answer(3, 2), Answer(2, 2)))
    assert decision == Look(ONE, (0.4, 0.6), (Answer(0, 1), inner, Answer(1, 1)))
    assert decide(STAGED, 3) == decision  # its state tells it nothing


def test_hysteresis_decides_by_its_state_between_its_thresholds() -> None:
    policy = Hysteresis(TOP1, 1, 2, 0.6, 0.4)
    assert chosen_by_cell(policy, 1) == [1, 1, 2]
    assert chosen_by_cell(policy, 2) == [1, 2, 2]
    assert chosen_by_cell(Hysteresis(TOP1, 1, 2, 0.5, 0.5), 2) == [1, 2]
