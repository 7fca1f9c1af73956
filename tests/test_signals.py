"""The signals' values, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from entmtp_calib.signals import (
    AVERAGE_ALPHA,
    AVERAGE_START,
    SIGNAL_KINDS,
    SignalSpec,
    base_top1,
    entropy,
    expected_accepted,
    next_average,
    path_value,
    signal_value,
    signal_values,
)


def test_top_1_probability_and_entropy_of_known_distributions() -> None:
    logits = np.log([0.5, 0.25, 0.25]) + 7.0
    assert base_top1(logits) == pytest.approx(0.5)
    assert entropy(logits) == pytest.approx(1.5 * math.log(2))
    assert entropy(np.zeros(50)) == pytest.approx(math.log(50))


def test_impossible_tokens_and_large_logits_do_no_harm() -> None:
    assert entropy([3.0, -np.inf, 3.0]) == pytest.approx(math.log(2))
    assert base_top1([1e4, 0.0, -np.inf]) == 1.0
    assert entropy([1e4, 0.0]) == pytest.approx(0.0)


def test_a_path_value_multiplies_to_its_own_depth() -> None:
    assert path_value([0.5], [[0.5, 0.25, 0.1]], 2) == pytest.approx([0.0625])


def test_the_expected_acceptance_sums_the_paths_of_every_depth() -> None:
    assert expected_accepted([[0.5, 0.5, 0.5]], 3) == pytest.approx([0.875])
    assert expected_accepted([[0.5, 0.5, 0.5]], 2) == pytest.approx([0.75])


def test_a_chain_that_is_too_short_never_gives_another_depths_value() -> None:
    with pytest.raises(ValueError, match="a chain of depth 2 has no signal of depth 4"):
        path_value([0.9], [[0.9, 0.9]], 4)


def test_every_signal_is_larger_where_more_acceptance_is_expected() -> None:
    chain = [[0.2, 0.2], [0.9, 0.9]]
    for kind in SIGNAL_KINDS:
        spec = SignalSpec(kind, 2 if kind in ("path_value", "expected_accepted") else 0)
        if not spec.is_average:
            unsure, sure = signal_values(spec, [0.3, 0.9], [3.0, 0.2], chain)
            assert unsure < sure


@pytest.mark.parametrize("kind", ["path_value", "expected_accepted"])
def test_one_positions_signal_is_bit_for_bit_the_recorded_one(kind: str) -> None:
    random = np.random.default_rng(0)
    base, nats, chain = random.random(20), random.random(20), random.random((20, 4))
    recorded = signal_values(
        SignalSpec(kind, 3), base.astype(np.float32), nats, chain.astype(np.float32)
    )
    live = [
        signal_value(SignalSpec(kind, 3), base[i], nats[i], chain[i, :3].tolist())
        for i in range(20)
    ]
    assert live == recorded.tolist()


def test_only_the_chains_signals_have_a_depth() -> None:
    assert SignalSpec("path_value", 3).chain_depth == 3
    assert SignalSpec("entropy").chain_depth == 0
    for kind, depth in [("path_value", 0), ("entropy", 2), ("path_value", -1), ("luck", 0)]:
        with pytest.raises(ValueError, match="signal"):
            SignalSpec(kind, depth)


def test_the_average_moves_toward_what_was_accepted() -> None:
    assert next_average(1.0, 3, True) == pytest.approx(1.0 + AVERAGE_ALPHA * 2)
    assert next_average(1.0, 0, True) == pytest.approx(1.0 - AVERAGE_ALPHA)


def test_plain_steps_let_the_average_recover_so_that_speculation_is_tried_again() -> None:
    average = 0.0
    for _ in range(50):
        average = next_average(average, 0, False)
    assert average == pytest.approx(AVERAGE_START, abs=1e-3)


def test_the_average_is_not_a_signal_of_one_position() -> None:
    with pytest.raises(ValueError, match="does not come from one position"):
        signal_values(SignalSpec("acceptance_average"), [0.5], [0.5], [[0.5]])
