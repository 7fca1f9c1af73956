"""Fits on fixed texts stay the ones that the plain step-by-step search found, digit for digit."""

from __future__ import annotations

import pytest
from traces import linear_costs, random_trace, telling_trace

from entmtp_calib.fitting import (
    fit_ladder,
    fit_staged,
    search_hysteresis,
    search_ladder,
    search_staged,
)
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged
from entmtp_calib.signals import SignalSpec
from entmtp_calib.task import Task
from entmtp_calib.tree import EMPTY, Tree, chain

BRANCHED = Tree.of([(0,), (1,), (0, 0)])
WIDER = Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
TREES = [EMPTY, chain(1), BRANCHED, chain(3), WIDER]
TOLD = Task.of(telling_trace(4, n_texts=6, length=40), TREES, linear_costs(10, 1.5, 0.4, 0.1))
RANDOM = Task.of(
    random_trace(11, n_texts=6, max_length=50), TREES, linear_costs(10, 0.4, 0.2, 0.05)
)

CHAIN, RUNNING = SignalSpec("chain_value", 1), SignalSpec("chain_value", 1, running=True)
PATH, ENTROPY = SignalSpec("path_value", 2), SignalSpec("entropy")
AVERAGE = SignalSpec("acceptance_average")


@pytest.mark.parametrize(
    ("task", "signal", "policy", "tokens_per_second"),
    [
        (TOLD, CHAIN, Ladder(CHAIN, (0.6848499774932861,), (2, 3)), 161.855948206),
        (TOLD, PATH, Ladder(PATH, (0.23450974583627726,), (2, 3)), 161.855948206),
        (TOLD, RUNNING, Ladder(RUNNING, (0.75899931142807,), (2, 3)), 154.868684261),
        (TOLD, AVERAGE, Ladder(AVERAGE, (1.494859988369408,), (2, 4)), 154.083204931),
        (TOLD, ENTROPY, Ladder(None, (), (2,)), 149.39309057),
        (RANDOM, CHAIN, Ladder(None, (), (4,)), 192.307692308),
        (RANDOM, PATH, Ladder(PATH, (0.14959387774452773,), (2, 4)), 192.996967191),
        (
            RANDOM,
            RUNNING,
            Ladder(RUNNING, (0.48919902890777583, 0.5312343244923291), (2, 3, 4)),
            195.749440716,
        ),
        (RANDOM, AVERAGE, Ladder(None, (), (4,)), 192.307692308),
        (RANDOM, ENTROPY, Ladder(ENTROPY, (-0.8845990300178528,), (3, 4)), 192.943770673),
    ],
)
def test_ladders(task: Task, signal: SignalSpec, policy: Policy, tokens_per_second: float) -> None:
    found = search_ladder(task, signal)
    assert found == policy
    assert task.tokens_per_second(found) == pytest.approx(tokens_per_second, abs=1e-9)


@pytest.mark.parametrize(
    ("task", "policy", "tokens_per_second"),
    [
        (TOLD, Hysteresis(CHAIN, 2, 3, 0.7947660088539124, 0.4817681610584259), 165.175498968),
        (TOLD, Hysteresis(RUNNING, 2, 3, 0.75899931142807, 0.75899931142807), 154.868684261),
        (RANDOM, Hysteresis(CHAIN, 2, 4, 0.5433536767959595, 0.06827934831380844), 196.850393701),
        (
            RANDOM,
            Hysteresis(RUNNING, 2, 4, 0.49714344956381906, 0.13416607558727264),
            198.581560284,
        ),
    ],
)
def test_pairs_of_thresholds(task: Task, policy: Hysteresis, tokens_per_second: float) -> None:
    found = search_hysteresis(task, policy.signals[0])
    assert found == policy
    assert task.tokens_per_second(found) == pytest.approx(tokens_per_second, abs=1e-9)


def test_staged_policies() -> None:
    told, random = search_staged(TOLD), search_staged(RANDOM)
    assert told == Staged(((), (0.7728511095046997,)), ((DRAFT_ON,), (2, 3)))
    assert TOLD.tokens_per_second(told) == pytest.approx(160.717873167, abs=1e-9)
    first = (0.24766846001148224, 0.6415791511535645, 0.7111159563064575)
    second = (0.01236975631197934, 0.06966281094311633, 0.09952219318127042)
    second += (0.3420804549207297, 0.6138893963997205)
    actions = ((DRAFT_ON,), (4, DRAFT_ON, 4, DRAFT_ON), (2, 4, 2, 4, 2, 4))
    assert random == Staged(((), first, second), actions)
    assert RANDOM.tokens_per_second(random) == pytest.approx(196.078431373, abs=1e-9)


def test_gains_on_texts_that_were_not_fitted_on() -> None:
    assert fit_ladder(TOLD, CHAIN).held_out_gain == pytest.approx(0.008094879518072364, rel=1e-12)
    assert fit_staged(TOLD).held_out_gain == pytest.approx(0.0429109322253961, rel=1e-12)
    assert fit_ladder(RANDOM, CHAIN).held_out_gain == pytest.approx(
        -0.011943539630836025, rel=1e-12
    )
    assert fit_staged(RANDOM).held_out_gain == pytest.approx(-0.06474820143884898, rel=1e-12)
