"""Only what is surely slower than something no larger leaves a race, and pairs are pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from entmtp_calib.racing import MARGIN, Runs, beaten, rate, ratio, runs_by_method


def runs(seconds: list[float], rounds: int = 1) -> Runs:
    """Ten tokens in the same seconds per prompt in every round."""
    return {(p, r): (10.0, s) for r in range(rounds) for p, s in enumerate(seconds)}


HARD_AND_EASY = [1.0, 2.0, 4.0, 8.0]  # prompts differ far more than methods do


def slower(by: float, noise: list[float] | None = None) -> Runs:
    """A method that takes `by` times as long on each prompt, give or take."""
    scatter = noise or [0.0] * len(HARD_AND_EASY)
    return runs([s * by * (1 + e) for s, e in zip(HARD_AND_EASY, scatter, strict=True)])


def test_a_method_that_is_surely_slower_than_a_smaller_one_is_beaten() -> None:
    noise = [0.01, -0.01, 0.005, 0.0]
    race = {"plain": slower(1.5), "small": slower(1.0), "large": slower(1.1, noise)}
    assert beaten(race, {"plain": 0, "small": 1, "large": 5}) == {"large"}


def test_a_slower_method_that_is_smaller_may_still_be_on_the_frontier() -> None:
    race = {"plain": slower(2.0), "small": slower(1.5), "large": slower(1.0)}
    assert beaten(race, {"plain": 0, "small": 1, "large": 5}) == set()


def test_of_two_methods_of_one_size_the_slower_one_is_beaten() -> None:
    assert beaten({"a": slower(1.0), "b": slower(1.2)}, {"a": 3, "b": 3}) == {"b"}


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_what_loses_by_less_than_the_margin_stays(share: float) -> None:
    """However sure it is: repeated looks at an interval must not add up to a verdict."""
    close = slower(1 / (1 - share * MARGIN))
    assert beaten({"small": slower(1.0), "large": close}, {"small": 1, "large": 2}) == set()


def test_what_may_be_luck_stays() -> None:
    noise = [0.5, -0.4, 0.6, -0.3]
    race = {"small": slower(1.0), "large": slower(1.05, noise)}
    assert beaten(race, {"small": 1, "large": 2}) == set()


def test_one_prompt_is_too_little_to_be_beaten_on() -> None:
    race = {"small": runs([1.0], rounds=5), "large": runs([9.0], rounds=5)}
    assert beaten(race, {"small": 1, "large": 2}) == set()


def test_equal_methods_are_rarely_beaten_by_chance() -> None:
    """Looked at after each of eight prompts, whose times scatter by 3 %: the real thing."""
    random = np.random.default_rng(0)
    lost = 0
    for _ in range(60):
        times = random.normal(1.0, 0.03, (2, 8)) * random.uniform(1, 4, 8)
        for n in range(2, 9):
            race = {name: runs(row[:n].tolist()) for name, row in zip("ab", times, strict=True)}
            if beaten(race, {"a": 1, "b": 2}):
                lost += 1
                break
    assert lost <= 3


def test_rates_and_ratios_use_the_runs_that_both_have() -> None:
    base = {**runs([1.0, 2.0], rounds=2), (0, 1): (10.0, 100.0)}  # a slow second round
    mine = runs([0.5, 1.0])  # without a second round
    assert ratio(mine, base).value == pytest.approx(2.0)
    assert rate(mine).value == pytest.approx(20 / 1.5)
    assert math.isnan(ratio(runs([1.0]), {(5, 0): (10.0, 1.0)}).value)


def test_a_prompt_counts_once_however_often_it_was_run() -> None:
    often = {**runs([1.0, 4.0]), (1, 1): (10.0, 4.0), (1, 2): (10.0, 4.0)}
    assert rate(often) == rate(runs([1.0, 4.0]))


def test_runs_come_from_whole_texts_only() -> None:
    row = {"kind": "end_to_end", "tree": "plain", "prompt": 3, "round": 1, "tokens": 7}
    rows = [{**row, "seconds": 0.5}, {"kind": "step", "tree": "plain"}, {"kind": "level"}]
    assert runs_by_method(rows) == {"plain": {(3, 1): (7, 0.5)}}
