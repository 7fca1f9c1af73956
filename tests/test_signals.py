"""The signals' values: worked out by hand, and against a slow direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_trace

from entmtp_calib.signals import (
    AVERAGE_ALPHA,
    AVERAGE_START,
    CHAIN_KINDS,
    SIGNAL_KINDS,
    Memory,
    SignalSpec,
    chain_value,
    expected_accepted,
    path_value,
    signal_value,
    signal_values,
)

SEEDS = st.integers(0, 10**6)
SPECS = [
    *(SignalSpec(kind, depth) for kind in CHAIN_KINDS for depth in (1, 2, 3)),
    SignalSpec("entropy"),
    SignalSpec("base_top1"),
]


def slowly(spec: SignalSpec, base: float, nats: float, chain: list[float]) -> float:
    """A signal's definition, one number after the other."""
    paths = [math.prod(chain[:depth]) for depth in range(1, len(chain) + 1)]
    if spec.kind == "chain_value":
        return paths[spec.depth - 1]
    if spec.kind == "path_value":
        return base * paths[spec.depth - 1]
    if spec.kind == "expected_accepted":
        return sum(paths[: spec.depth])
    return base if spec.kind == "base_top1" else -nats


def test_path_values_multiply_to_their_own_depth() -> None:
    assert chain_value([[0.5, 0.25, 0.1]], 2) == pytest.approx([0.125])
    assert path_value([0.5], [[0.5, 0.25, 0.1]], 2) == pytest.approx([0.0625])


def test_the_expected_acceptance_sums_the_paths_of_every_depth() -> None:
    assert expected_accepted([[0.5, 0.5, 0.5]], 3) == pytest.approx([0.875])
    assert expected_accepted([[0.5, 0.5, 0.5]], 2) == pytest.approx([0.75])


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_every_signal_is_what_a_slow_direct_computation_gives(seed: int) -> None:
    trace = random_trace(seed)
    columns = trace.base_top1, trace.entropy, trace.chain_probs
    for spec in SPECS:
        expected = [slowly(spec, *row) for row in zip(*(c.tolist() for c in columns), strict=True)]
        assert signal_values(spec, *columns) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_a_chain_that_is_too_short_never_gives_another_depths_value() -> None:
    for spec in (SignalSpec(kind, 4) for kind in CHAIN_KINDS):
        with pytest.raises(ValueError, match="a chain of depth 2 has no signal of depth 4"):
            signal_value(spec, 0.9, 0.1, [0.9, 0.9])


def test_a_chain_that_is_longer_changes_nothing() -> None:
    for spec in (SignalSpec(kind, 2) for kind in CHAIN_KINDS):
        short = signal_value(spec, 0.9, 0.1, [0.7, 0.3])
        assert signal_value(spec, 0.9, 0.1, [0.7, 0.3, 0.2]) == short


def test_every_signal_is_larger_where_more_acceptance_is_expected() -> None:
    for spec in SPECS:
        unsure, sure = signal_values(spec, [0.3, 0.9], [3.0, 0.2], [[0.2] * 3, [0.9] * 3])
        assert unsure < sure


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_one_positions_signal_is_bit_for_bit_the_recorded_one(spec: SignalSpec) -> None:
    random = np.random.default_rng(0)
    base, nats, chain = random.random(20), random.random(20), random.random((20, 4))
    recorded = signal_values(spec, *(a.astype(np.float32) for a in (base, nats, chain)))
    live = [signal_value(spec, base[i], nats[i], chain[i, :3].tolist()) for i in range(20)]
    assert live == recorded.tolist()


@pytest.mark.parametrize(
    ("kind", "depth", "running"),
    [
        ("path_value", 0, False),
        ("chain_value", -1, False),
        ("entropy", 2, False),
        ("luck", 0, False),
        ("acceptance_average", 0, True),
    ],
)
def test_a_signal_that_cannot_be_is_refused(kind: str, depth: int, running: bool) -> None:
    with pytest.raises(ValueError, match="signal"):
        SignalSpec(kind, depth, running)


def test_a_signals_text_brings_it_back() -> None:
    specs = [
        SignalSpec(kind, depth, running)
        for kind in SIGNAL_KINDS
        for depth in ((1, 2, 12) if kind in CHAIN_KINDS else (0,))
        for running in ((False,) if kind == "acceptance_average" else (False, True))
    ]
    assert [SignalSpec.parse(str(spec)) for spec in specs] == specs
    assert len({str(spec) for spec in specs}) == len(specs)
    assert str(SignalSpec("path_value", 2, running=True)) == "running:path_value:2"
    assert str(SignalSpec("entropy")) == "entropy"


@pytest.mark.parametrize(
    "text",
    [
        *("", "luck", "chain_value", "chain_value:", "chain_value:0", "chain_value:-1"),
        *("chain_value:01", "chain_value:1.0", "chain_value:1:2", "chain_value: 1", " entropy"),
        *("entropy:", "entropy:0", "entropy:1", "running:", "running:running:entropy"),
        *("running:acceptance_average", "Entropy", "chain_value:\u0661"),
    ],
)
def test_a_text_that_is_no_signals_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="signal"):
        SignalSpec.parse(text)


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_running_value_weighs_every_step_of_the_text_by_its_age(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.random(random.integers(1, 12)).tolist()
    memory, spec = Memory(), SignalSpec("chain_value", 2, running=True)
    for n in range(len(values)):
        first = values[0] * (1 - AVERAGE_ALPHA) ** n
        later = [
            AVERAGE_ALPHA * values[k] * (1 - AVERAGE_ALPHA) ** (n - k) for k in range(1, n + 1)
        ]
        assert memory.value(spec, values[n]) == pytest.approx(first + sum(later))


def test_a_memory_keeps_signals_apart_and_averages_only_what_is_running() -> None:
    memory = Memory()
    fast, slow = SignalSpec("entropy"), SignalSpec("entropy", running=True)
    other = SignalSpec("base_top1", running=True)
    assert [memory.value(fast, value) for value in (1.0, 9.0)] == [1.0, 9.0]
    assert memory.value(slow, 1.0) == 1.0
    assert memory.value(other, 5.0) == 5.0
    assert memory.value(slow, 2.0) == pytest.approx(1.0 + AVERAGE_ALPHA)
    assert memory.average == AVERAGE_START
    assert Memory().value(slow, 2.0) == 2.0


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_average_weighs_every_step_by_its_age_down_to_its_start(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 5, random.integers(0, 12)).tolist()
    memory = Memory()
    for count in counts:
        memory.observe(count, speculated=True)
    weights = [AVERAGE_ALPHA * (1 - AVERAGE_ALPHA) ** age for age in range(len(counts))]
    seen = sum(weight * count for weight, count in zip(weights, reversed(counts), strict=True))
    rest = (1 - AVERAGE_ALPHA) ** len(counts)
    assert memory.average == pytest.approx(seen + rest * AVERAGE_START)


def test_plain_steps_let_the_average_recover_so_that_speculation_is_tried_again() -> None:
    memory = Memory()
    for _ in range(50):
        memory.observe(0, speculated=True)
    assert memory.average == pytest.approx(0.0, abs=1e-4)
    for _ in range(50):
        memory.observe(0, speculated=False)
    assert memory.average == pytest.approx(AVERAGE_START, abs=1e-4)


def test_the_average_is_not_a_signal_of_one_position() -> None:
    with pytest.raises(ValueError, match="does not come from one position"):
        signal_values(SignalSpec("acceptance_average"), [0.5], [0.5], [[0.5]])
