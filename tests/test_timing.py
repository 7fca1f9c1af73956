"""Fair order, and intervals that say no more than the data does."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from entmtp_calib.timing import (
    Clock,
    Interval,
    bootstrap,
    interleave,
    is_tie,
    mean_interval,
    median,
    median_error,
    paired_bootstrap,
    relative_spread,
)


def test_every_round_has_every_method_once_in_changing_order() -> None:
    order = list(interleave("ABCD", rounds=30, seed=3))
    rounds = [[name for number, name in order if number == k] for k in range(30)]
    assert all(sorted(names) == list("ABCD") for names in rounds)
    assert len({tuple(names) for names in rounds}) > 10
    assert max(Counter(names[0] for names in rounds).values()) < 20
    assert [number for number, _ in order] == sorted(number for number, _ in order)


def test_the_order_is_seeded() -> None:
    assert list(interleave("ABC", 5, seed=1)) == list(interleave("ABC", 5, seed=1))
    assert list(interleave("ABC", 5, seed=1)) != list(interleave("ABC", 5, seed=2))


def test_the_mean_is_a_ratio_of_totals_and_not_a_mean_of_ratios() -> None:
    interval = mean_interval([10, 1], [2, 1])
    assert interval.value == pytest.approx(11 / 3)
    assert interval.low <= interval.value <= interval.high


def test_prompts_without_steps_do_not_count() -> None:
    assert mean_interval([4, 0, 6], [2, 0, 3]) == mean_interval([4, 6], [2, 3])


def test_equal_prompts_leave_no_doubt() -> None:
    interval = mean_interval([6] * 8, [3] * 8)
    assert (interval.low, interval.value, interval.high) == (2, 2, 2)


def test_one_prompt_bounds_nothing() -> None:
    assert mean_interval([6], [3]) == Interval(0.0, 2, math.inf)
    ratio = paired_bootstrap([10], [1], [10], [9])
    assert ratio.value == pytest.approx(9)
    assert (ratio.low, ratio.high) == (0, math.inf)
    assert is_tie(ratio)


def test_no_prompt_has_no_figure_and_is_a_tie() -> None:
    for interval in (mean_interval([], []), paired_bootstrap([0], [0], [0], [0])):
        assert math.isnan(interval.value)
        assert is_tie(interval)


def test_the_ratio_is_the_quotient_of_the_two_throughputs() -> None:
    ratio = paired_bootstrap([30, 10], [1, 3], [30, 10], [2, 6])
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((2, 2, 2))
    assert not is_tie(ratio)


def test_pairing_cancels_the_difference_between_prompts() -> None:
    rng = np.random.default_rng(0)
    tokens, seconds = np.full(20, 100.0), rng.uniform(1, 20, 20)
    ratio = paired_bootstrap(tokens, seconds, tokens, seconds * 1.05)
    assert ratio.low == pytest.approx(1.05)
    own = mean_interval(tokens, seconds)
    assert own.high / own.low > 1.2


@pytest.mark.parametrize("n_prompts", [3, 6, 20])
def test_a_method_against_itself_is_a_tie_at_least_nine_times_in_ten(n_prompts: int) -> None:
    rng = np.random.default_rng(n_prompts)
    tokens, ties = np.full(n_prompts, 64), 0
    for seed in range(200):
        base = rng.uniform(1, 3, n_prompts)
        first, second = (base * rng.lognormal(0, 0.1, n_prompts) for _ in range(2))
        ties += is_tie(paired_bootstrap(tokens, first, tokens, second, n_boot=500, seed=seed))
    assert ties >= 180


def test_a_real_difference_is_seen() -> None:
    rng = np.random.default_rng(1)
    tokens, base = np.full(16, 64), rng.uniform(1, 3, 16)
    noise = rng.lognormal(0, 0.03, 16)
    assert paired_bootstrap(tokens, base, tokens, base * 1.2 * noise).low > 1


def test_intervals_are_seeded() -> None:
    tokens, seconds = [5, 7, 9], [1, 2, 3]
    assert mean_interval(tokens, seconds, seed=4) == mean_interval(tokens, seconds, seed=4)


@pytest.mark.parametrize("bad", [[1, math.nan], [1, -1], [1, math.inf], [1], [[1, 1]]])
def test_counts_that_cannot_be_are_a_bug(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"finite|one value"):
        mean_interval([1, 1], bad)


def test_median_and_spread() -> None:
    assert median([3, 1, 2]) == 2
    assert relative_spread([10, 10, 10]) == 0
    assert relative_spread([5, 10, 15]) == pytest.approx(0.5)


def test_the_clock_runs_forward() -> None:
    clock = Clock()
    assert clock.now() <= clock.now()


def test_timing_on_the_cpu_needs_no_torch() -> None:
    code = (
        "import sys; from entmtp_calib.timing import Clock; Clock('cpu').now(); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_interval_of_a_positive_rate_stays_positive() -> None:
    assert mean_interval([3, 40], [10, 11]).low > 0


def test_any_figure_has_an_interval_over_prompts() -> None:
    above, below = np.array([3.0, 4.0, 9.0, 2.0, 5.0]), np.array([1.0, 2.0, 3.0, 2.0, 4.0])
    found = bootstrap(lambda counts: float(counts @ above / (counts @ below)), 5)
    expected = mean_interval(above, below)
    assert found.value == expected.value
    # That one is taken on the log, so its bounds differ a little.
    assert found.low == pytest.approx(expected.low, rel=0.1)
    assert found.high == pytest.approx(expected.high, rel=0.1)


def test_resamples_without_a_figure_are_left_out_and_no_figure_has_no_interval() -> None:
    def figure(counts: np.ndarray) -> float:
        return math.nan if counts[0] == 0 else 2.0

    assert bootstrap(figure, 4) == Interval(2, 2, 2)
    assert math.isnan(bootstrap(lambda counts: math.nan, 4).low)


def test_the_error_of_a_median_is_that_of_normal_samples() -> None:
    random = np.random.default_rng(0)
    samples = random.normal(100.0, 3.0, (4000, 15))
    true = np.median(samples, axis=1).std() / 100.0
    assert np.median([median_error(row) for row in samples]) == pytest.approx(true, rel=0.15)
    assert median_error([5.0] * 5) == 0.0
    assert median_error([5.0, 5.1, 4.9, 5.0, 80.0]) < 0.02  # an outlier leaves the median alone
