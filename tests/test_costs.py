"""Costs: what was measured comes back exactly, and no level of drafting is paid for twice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import linear_costs, random_tree

from entmtp_calib.costs import Costs
from entmtp_calib.errors import DataError
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain, union

SEEDS = st.integers(0, 10**6)
WIDE = Tree.of([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (0, 0, 0)])
SIDE = Tree.of([(1,), (1, 0), (1, 0, 1)])
TREES = [EMPTY, chain(1), SIDE, WIDE]
# Powers of ten and two say which passes and levels a sum is made of.
COSTS = Costs(
    ((1, 1000.0), (2, 2000.0), (4, 4000.0), (8, 8000.0)),
    (
        ((1, 1.0),),
        ((1, 10.0), (2, 20.0), (3, 30.0)),
        ((1, 100.0), (2, 200.0)),
    ),
)


def step(rows: int, context: int, step_ms: float, draft_ms: float = 0.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "tree": "any",
        "rows": rows,
        "context_length": context,
        "step_ms": step_ms,
        "draft_ms": draft_ms,
    }


def level(depth: int, parents: int, draft_ms: float, context: int = 100) -> dict[str, Any]:
    return {
        "kind": "level",
        "depth": depth,
        "rows": parents,
        "context_length": context,
        "draft_ms": draft_ms,
    }


def test_measured_points_come_back_exactly() -> None:
    verify = {1: 24.8123, 2: 25.3, 5: 24.1, 9: 77.7}
    levels = {1: {1: 0.3}, 2: {1: 0.4, 3: 0.7, 8: 0.65}}
    timing = [step(rows, 100, ms + 0.0, 0.0) for rows, ms in verify.items()]
    timing += [level(d, n, ms) for d, points in levels.items() for n, ms in points.items()]
    costs = Costs.of(timing, 100)
    assert {rows: costs.verify(rows) for rows in verify} == verify
    assert {d: {n: costs.level(d, n) for n in points} for d, points in levels.items()} == levels


def test_a_pass_costs_all_of_a_step_but_its_drafting() -> None:
    costs = Costs.of([step(1, 100, 9.0, 0.5), step(3, 100, 12.0, 4.0)], 100)
    assert (costs.verify(1), costs.verify(3)) == (8.5, 8.0)


def test_between_two_measured_counts_costs_are_interpolated_and_unknown_beyond() -> None:
    assert COSTS.verify(3) == 3000.0
    assert COSTS.verify(5) == 5000.0
    assert COSTS.verify(9) == math.inf
    assert COSTS.level(2, 3) == 30.0
    assert COSTS.level(2, 4) == math.inf
    assert COSTS.level(4, 1) == math.inf
    kinked = Costs(((1, 10.0), (4, 10.0), (6, 30.0)), ())
    assert [kinked.verify(n) for n in (2, 3, 5)] == [10.0, 10.0, 20.0]


def test_repeated_steps_count_with_their_median_at_each_context() -> None:
    timing = [step(1, context, ms) for context in (100, 300) for ms in (context / 10, 7.0, 1e6)]
    assert Costs.of(timing, 100).verify(1) == 10.0
    assert Costs.of(timing, 300).verify(1) == 30.0
    assert Costs.of(timing, 150).verify(1) == pytest.approx(15.0)
    # Nothing is known outside the measured contexts, so the nearest one stands.
    assert [Costs.of(timing, context).verify(1) for context in (1, 999)] == [10.0, 30.0]


def test_each_row_count_has_the_contexts_it_was_timed_at() -> None:
    timing = [step(1, 100, 10.0), step(1, 200, 20.0), step(4, 100, 30.0)]
    costs = Costs.of(timing, 200)
    assert (costs.verify(1), costs.verify(4)) == (20.0, 30.0)


def test_drafting_does_not_depend_on_the_context() -> None:
    timing = [step(1, 100, 1.0), level(1, 1, 2.0, 100), level(1, 1, 4.0, 500), level(1, 1, 9.0)]
    for context in (100, 500):
        assert Costs.of(timing, context).level(1, 1) == 4.0


def test_timed_prompts_are_passed_over() -> None:
    whole = {"kind": "end_to_end", "tree": "plain", "rows": 1, "step_ms": None, "draft_ms": None}
    assert Costs.of([step(1, 8, 5.0), whole], 8).verify(1) == 5.0


@pytest.mark.parametrize(
    "timing",
    [[], [step(2, 8, 5.0)], [level(1, 1, 1.0)], [step(1, 8, 5.0), level(2, 1, 1.0)]],
)
def test_a_table_without_plain_steps_or_with_a_missing_depth_is_refused(timing: list) -> None:
    with pytest.raises(DataError, match="every depth from 1"):
        Costs.of(timing, 8)


def test_a_step_is_a_pass_of_its_rows_and_its_levels_under_their_parents() -> None:
    assert COSTS.step_ms([EMPTY, chain(1), chain(3), SIDE, WIDE]).tolist() == [
        1000,
        2001,
        4111,
        4111,
        8000 + 1 + 20 + 100,
    ]


def test_a_tree_beyond_what_was_measured_costs_infinitely_much() -> None:
    assert COSTS.step_ms([HYDRA_DEFAULT, chain(4)]).tolist() == [math.inf, math.inf]
    costs = linear_costs(10, 1, 1, 1, depth=4)
    assert np.isfinite(costs.step_ms([HYDRA_DEFAULT])).all()


def test_a_static_policy_pays_the_step_of_its_tree_and_no_other_is_known() -> None:
    for k, ms in enumerate(COSTS.step_ms(TREES)):
        paid = COSTS.policy_ms(Static(k), TREES)
        assert paid.shape == (1, len(TREES))
        assert paid[0, k] == ms
        assert np.isinf(np.delete(paid[0], k)).all()


def test_a_ladder_pays_for_the_levels_it_looks_at_even_with_the_empty_tree() -> None:
    policy = Ladder(SignalSpec("chain_value", 2), (0.2, 0.5), (0, 1, 3))
    # Two levels of the union of chain-1, WIDE and the chain of two: 1 + 2 parents.
    ms = COSTS.policy_ms(policy, TREES)
    assert ms.shape == (3, len(TREES))
    assert ms[2].tolist() == [1000 + 21, 2000 + 21, math.inf, 8000 + 21 + 100]
    assert ms[0].tolist() == [1000, 2001, math.inf, 8121]


def test_levels_are_drafted_for_all_trees_that_the_policy_may_choose() -> None:
    # (1, 0) of SIDE and (0, 0) of the chain have two parents at the second level.
    ms = COSTS.policy_ms(Hysteresis(SignalSpec("chain_value", 2), 0, 2, 0.5, 0.5), TREES)
    assert ms[2].tolist() == [1000 + 21, math.inf, 4000 + 21 + 100, math.inf]
    # A policy that never chooses SIDE drafts the chain alone.
    ms = COSTS.policy_ms(Hysteresis(SignalSpec("chain_value", 2), 0, 1, 0.5, 0.5), TREES)
    assert ms[2].tolist() == [1000 + 11, 2000 + 11, math.inf, math.inf]


def test_signals_that_need_no_draft_cost_nothing() -> None:
    for kind in ("entropy", "base_top1", "acceptance_average"):
        ms = COSTS.policy_ms(Ladder(SignalSpec(kind), (0.5,), (0, 3)), TREES)
        assert ms.tolist() == [[1000, math.inf, math.inf, 8121]]


def test_a_staged_policy_pays_by_the_level_where_it_decided() -> None:
    policy = Staged(((), (0.5,), ()), ((DRAFT_ON,), (0, DRAFT_ON), (3,)))
    ms = COSTS.policy_ms(policy, TREES)
    assert ms[:, 0].tolist() == [1000, 1001, 1021]
    assert ms[:, 3].tolist() == [8121, 8121, 8121]
    assert np.isinf(ms[:, [1, 2]]).all()


def policies(depth: int) -> list[Policy]:
    spec = SignalSpec("chain_value", depth)
    return [
        Ladder(spec, (0.5,), (0, 1)),
        Hysteresis(SignalSpec("path_value", depth, running=True), 1, 2, 0.5, 0.5),
        Staged(((), *[(0.5,)] * depth), ((DRAFT_ON,), *[(0, DRAFT_ON)] * (depth - 1), (1, 2))),
    ]


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_no_level_is_paid_for_twice(seed: int, depth: int) -> None:
    """By hand: the first l levels of the union, then the tree's own below them."""
    trees = [random_tree(seed + n) for n in range(3)]
    first, row, flat, parent = np.random.default_rng(seed).random(4).tolist()
    costs = linear_costs(first, row, flat, parent)

    def parents(tree: Tree, at: int) -> int:
        return len({path[:-1] for path in tree.paths if len(path) == at})

    for policy in policies(depth):
        used = [trees[k] for k in policy.indices]
        together = union([*used, chain(depth)])
        ms = costs.policy_ms(policy, trees)
        assert ms.shape == (depth + 1, 3)
        for levels in range(depth + 1):
            for k in policy.indices:
                expected = first + row * trees[k].n_nodes
                for at in range(1, max(levels, trees[k].depth) + 1):
                    source = together if at <= levels else trees[k]
                    expected += flat + parent * (parents(source, at) - 1)
                assert ms[levels, k] == pytest.approx(expected)
        assert ms[0, list(policy.indices)] == pytest.approx(costs.step_ms(used))


def test_only_plain_decoding_alone_is_spared_the_heads() -> None:
    """A policy that may draft keeps its heads up to date, also where it drafts nothing."""
    costs = Costs(((1, 10.0), (2, 12.0)), (((1, 1.0),),), plain_ms=8.0)
    trees = [EMPTY, chain(1)]
    assert costs.step_ms(trees).tolist() == [8.0, 13.0]
    assert costs.policy_ms(Static(0), trees)[0, 0] == 8.0
    for fixed in (Ladder(None, (), (0,)), Hysteresis(None, 0, 0), Staged(((),), ((0,),))):
        assert costs.policy_ms(fixed, trees)[0, 0] == 8.0
    ladder = Ladder(SignalSpec("entropy"), (0.5,), (0, 1))
    assert costs.policy_ms(ladder, trees).tolist() == [[10.0, 13.0]]
    looking = Staged(((), (0.5,)), ((DRAFT_ON,), (0, 0)))
    assert costs.policy_ms(looking, trees)[1, 0] == 11.0


def test_plain_steps_are_told_from_steps_without_drafts() -> None:
    def timed(tree: str, ms: float) -> dict[str, Any]:
        times = {"step_ms": ms, "draft_ms": 0.0}
        return {"kind": "step", "tree": tree, "rows": 1, "context_length": 8, **times}

    level = {"kind": "level", "depth": 1, "rows": 1, "draft_ms": 1.0}
    both = Costs.of([timed("plain", 8.0), timed("plain with heads", 10.0), level], 8)
    assert (both.plain_ms, both.verify(1)) == (8.0, 10.0)
    alone = Costs.of([timed("plain", 8.0), level], 8)
    assert (alone.plain_ms, alone.verify(1)) == (8.0, 8.0)
