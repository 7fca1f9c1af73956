"""Rank statistics against counting every pair, and against values known by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from entmtp_calib.prediction import area, auroc, rank_correlation, spearman


def pairs_won(values: np.ndarray, positive: np.ndarray) -> float:
    """AUROC by its definition."""
    pairs = list(itertools.product(values[positive], values[~positive]))
    won = sum(1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs)
    return won / len(pairs)


def counted_ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks by counting who is smaller and who is equal."""
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


@pytest.mark.parametrize("seed", range(8))
def test_both_are_what_counting_pairs_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    values, outcomes = random.integers(0, 7, 40) / 7, random.integers(0, 4, 40)
    assert auroc(values, outcomes > 1) == pytest.approx(pairs_won(values, outcomes > 1))
    expected = np.corrcoef(counted_ranks(values), counted_ranks(outcomes))[0, 1]
    assert spearman(values, outcomes) == pytest.approx(expected)


def test_known_values() -> None:
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)
    assert spearman([0.1, 0.2, 0.9], [10, 100, 1000]) == 1
    assert spearman([0.1, 0.2, 0.9], [3, 2, 1]) == -1
    assert auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auroc([3, 1], [True, False]) == 1
    assert auroc([2, 2, 2], [True, False, True]) == 0.5


def test_only_the_order_counts() -> None:
    random = np.random.default_rng(3)
    values, outcomes = random.normal(size=30), random.integers(0, 3, 30)
    assert spearman(np.exp(values), outcomes) == spearman(values, outcomes)
    assert auroc(-values, outcomes > 0) == pytest.approx(1 - auroc(values, outcomes > 0))


@pytest.mark.parametrize("seed", range(4))
def test_weights_are_repeated_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    values, outcomes = random.integers(0, 5, 25), random.integers(0, 3, 25)
    weights = random.integers(0, 4, 25)
    again, told = np.repeat(values, weights), np.repeat(outcomes, weights)
    counts = weights.astype(float)
    assert rank_correlation(values, outcomes)(counts) == pytest.approx(spearman(again, told))
    assert area(values, outcomes > 0)(counts) == pytest.approx(auroc(again, told > 0))


def test_what_is_constant_has_no_figure() -> None:
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    assert math.isnan(spearman([1, 2, 3], [2, 2, 2]))
    assert math.isnan(auroc([1, 2, 3], [True, True, True]))
    assert math.isnan(auroc([1, 2, 3], [False, False, False]))
    assert math.isnan(rank_correlation([1, 2, 3], [1, 2, 3])(np.array([4.0, 0.0, 0.0])))
