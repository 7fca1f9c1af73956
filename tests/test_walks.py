"""Walks of policies against plain loops, the policies' own `choose`, and the oracle's bound."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, long_trace, random_trace, trace_of

from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.replay import accepted, oracle_ms, step_counts, walk
from entmtp_calib.signals import AVERAGE_ALPHA, SignalSpec
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain
from entmtp_calib.walks import NOT_CHOSEN, prompt_ms, walk_policy

SEEDS = st.integers(0, 10**6)
TREES = [EMPTY, chain(1), chain(3), Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])]
SPECULATES = np.array([tree.n_nodes > 0 for tree in TREES])
TOP1 = SignalSpec("base_top1")
POLICIES: list[Policy] = [
    *(Static(k) for k in range(len(TREES))),
    Ladder(TOP1, (0.35, 0.5), (0, 1, 3)),
    Ladder(SignalSpec("chain_value", 2), (0.1, 0.3), (0, 2, 3)),
    Ladder(SignalSpec("path_value", 1, running=True), (0.2, 0.3), (1, 0, 2)),
    Ladder(SignalSpec("acceptance_average"), (0.7, 1.0), (0, 1, 3)),
    Hysteresis(TOP1, 1, 2, 0.6, 0.4),
    Hysteresis(SignalSpec("expected_accepted", 3), 0, 3, 0.9, 0.4),
    Hysteresis(SignalSpec("entropy", running=True), 0, 3, -0.45, -0.55),
    Hysteresis(SignalSpec("acceptance_average"), 1, 2, 1.2, 0.8),
    Staged(((), (0.4,), (0.1, 0.3)), ((DRAFT_ON,), (0, DRAFT_ON), (1, 3, 2))),
    Staged(((), (0.5,)), ((DRAFT_ON,), (1, 2))),
    Staged(((),), ((3,),)),
]


def accepted_by_each(trace: Trace) -> np.ndarray:
    return np.stack([accepted(tree, trace.ranks) for tree in TREES])


def test_a_text_of_one_token_is_one_terminal_step() -> None:
    trace = trace_of([[[-1, -1, -1]]])
    for policy in POLICIES:
        steps = walk_policy(trace, accepted_by_each(trace), policy)
        assert (steps.visited.tolist(), steps.chosen.tolist()) == ([True], [NOT_CHOSEN])
        assert prompt_ms(trace, steps, np.ones((4, 4))).tolist() == [0.0]


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_a_static_policy_walks_like_its_tree(seed: int) -> None:
    trace = random_trace(seed)
    table = accepted_by_each(trace)
    for index, counts in enumerate(table):
        steps = walk_policy(trace, table, Static(index))
        visited = walk(trace, counts)
        assert (steps.visited == visited).all()
        asked = visited & ~trace.terminal
        assert (steps.chosen == np.where(asked, index, NOT_CHOSEN)).all()
        assert (steps.accepted == np.where(asked, counts, 0)).all()
        assert np.isnan(steps.values).all()
        assert not steps.levels.any()
        assert steps.switches(trace) == 0


class Text:
    """What one text's steps have shown, computed anew for every reading of a signal."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.row = trace, 0
        self.seen: list[float] = []  # accepted draft tokens, 1 where nothing was drafted
        self.fresh: dict[SignalSpec, list[float]] = {}
        self.read: list[tuple[SignalSpec, float]] = []

    def __call__(self, spec: SignalSpec) -> float:
        if spec.is_average:
            value = averaged([1.0, *self.seen])
        else:
            history = self.fresh.setdefault(spec, [])
            history.append(self._here(spec))
            value = averaged(history) if spec.running else history[-1]
        self.read.append((spec, value))
        return value

    def _here(self, spec: SignalSpec) -> float:
        top1 = float(self.trace.base_top1[self.row])
        chain = [float(p) for p in self.trace.chain_probs[self.row]][: spec.depth]
        if spec.kind == "expected_accepted":
            return sum(math.prod(chain[: d + 1]) for d in range(spec.depth))
        if spec.kind == "entropy":
            return -float(self.trace.entropy[self.row])
        return math.prod(chain) * (1 if spec.kind == "chain_value" else top1)


def averaged(values: list[float]) -> float:
    average = values[0]
    for value in values[1:]:
        average = AVERAGE_ALPHA * value + (1 - AVERAGE_ALPHA) * average
    return average


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_a_policy_walks_as_a_decoder_would_each_text_from_a_fresh_state(
    policy: Policy, seed: int
) -> None:
    trace = random_trace(seed)
    table = accepted_by_each(trace)
    steps = walk_policy(trace, table, policy, SPECULATES)
    expected = []
    for start, end in zip(trace.starts.tolist(), trace.ends.tolist(), strict=True):
        text, state = Text(trace), policy.start()
        text.row = start
        while text.row < end - 1:
            text.read.clear()
            index, state = policy.choose(state, text)
            count = int(table[index, text.row])
            value = text.read[-1][1] if text.read else None
            levels = max((spec.depth for spec, _ in text.read), default=0)
            expected.append((text.row, index, count, levels, value))
            text.seen.append(count if TREES[index].n_nodes else 1.0)
            text.row += count + 1
        if text.row == end - 1:
            expected.append((text.row, NOT_CHOSEN, 0, 0, None))
    rows = np.flatnonzero(steps.visited).tolist()
    assert rows == [row for row, *_ in expected]
    for row, index, count, levels, value in expected:
        walked = (steps.chosen[row], steps.accepted[row], steps.levels[row])
        assert walked == (index, count, levels)
        if value is None:
            assert np.isnan(steps.values[row])
        else:
            assert steps.values[row] == pytest.approx(value, rel=1e-12)
    assert step_counts(trace, steps.accepted, steps.visited).emitted_tokens == len(trace)


def test_the_values_of_a_walk_are_those_the_policy_saw() -> None:
    trace = trace_of([[[0], [0], [0], [0], [-1]]], base_top1=[0.1, 0.2, 0.3, 0.4, 0.5])
    policy = Ladder(TOP1, (), (1,))
    steps = walk_policy(trace, accepted_by_each(trace), policy)
    assert steps.values[[0, 2]].tolist() == trace.base_top1[[0, 2]].tolist()
    assert np.isnan(steps.values[[1, 3, 4]]).all()


def test_a_staged_walk_notes_how_far_each_step_looked() -> None:
    trace = trace_of([[[-1] * 2] * 4], chain_probs=[[0.3, 0.5], [0.9, 0.2], [0.6, 0.9], [0.1, 0.1]])
    policy = Staged(((), (0.5,), (0.4,)), ((DRAFT_ON,), (0, DRAFT_ON), (1, 2)))
    steps = walk_policy(trace, accepted_by_each(trace), policy)
    assert steps.chosen.tolist() == [0, 1, 2, NOT_CHOSEN]
    assert steps.levels.tolist() == [1, 2, 2, 0]
    assert steps.values[:3] == pytest.approx([0.3, 0.18, 0.54])


def test_switches_are_counted_within_a_text() -> None:
    trace = trace_of([[[-1]] * 4, [[-1]] * 3], base_top1=[0.1, 0.9, 0.1, 0.0, 0.9, 0.9, 0.0])
    steps = walk_policy(trace, accepted_by_each(trace), Ladder(TOP1, (0.5,), (0, 1)))
    assert steps.switches(trace) == 2
    assert steps.steps_per_tree(3).tolist() == [2, 3, 0]


def test_a_step_without_drafts_shows_the_average_nothing() -> None:
    trace = trace_of([[[-1]] * 8])
    policy = Ladder(SignalSpec("acceptance_average"), (0.9,), (0, 1))
    table = accepted_by_each(trace)
    # From 1.0 a miss brings 0.8; two steps without drafts bring it back to 0.84 and 0.872, a third
    # and a fourth to 0.8976 and 0.91808, so the sixth step speculates again.
    steps = walk_policy(trace, table, policy, SPECULATES)
    assert steps.chosen.tolist() == [1, 0, 0, 0, 0, 1, 0, NOT_CHOSEN]
    assert steps.values[:6] == pytest.approx([1.0, 0.8, 0.84, 0.872, 0.8976, 0.91808])
    # Where all trees are said to speculate, it never comes back.
    assert walk_policy(trace, table, policy).chosen.tolist() == [1, *[0] * 6, NOT_CHOSEN]


def test_time_is_what_the_chosen_trees_cost_at_the_levels_drafted() -> None:
    values = [[0.9, 0.1], [0.1, 0.9], [0.5, 0.5], [0.9, 0.9], [0.5, 0.5]]
    trace = trace_of([[[-1] * 2] * 3, [[-1] * 2] * 2], chain_probs=values)
    policy = Staged(((), (0.5,), ()), ((DRAFT_ON,), (0, DRAFT_ON), (1,)))
    steps = walk_policy(trace, accepted_by_each(trace), policy)
    ms = np.array([[1e6, 1e6], [2.0, 1e6], [1e6, 5.0]])
    assert prompt_ms(trace, steps, ms).tolist() == [7.0, 5.0]


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_oracle_bounds_every_policy_on_every_text(seed: int) -> None:
    trace = random_trace(seed)
    table = accepted_by_each(trace)
    first, row, level, parent = np.random.default_rng(seed).random(4).tolist()
    costs = linear_costs(first, row, level, parent)
    best = oracle_ms(trace, table, costs.step_ms(TREES))
    for policy in POLICIES:
        steps = walk_policy(trace, table, policy, SPECULATES)
        ms = prompt_ms(trace, steps, costs.policy_ms(policy, TREES))
        assert (ms >= best * (1 - 1e-12)).all(), policy


def peak_bytes(n_texts: int, n_trees: int) -> int:
    """Memory that walking with two of the trees takes on top of what it is given."""
    trace = long_trace(n_texts, 100)
    table = np.repeat(accepted(chain(2), trace.ranks)[None], n_trees, axis=0)
    policy = Ladder(TOP1, (0.5,), (0, 1))
    tracemalloc.start()
    walk_policy(trace, table, policy)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_the_memory_of_a_walk_grows_with_the_rows_and_not_with_the_trees() -> None:
    small = peak_bytes(100, 2)
    assert peak_bytes(100, 50) < 1.1 * small
    assert peak_bytes(200, 2) < 2.2 * small
