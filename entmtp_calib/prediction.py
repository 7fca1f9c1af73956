"""How well a number tells what a step will accept: statistics of pairs (signal, outcome).

Both look at the order of the values alone, so they judge what any threshold on the signal could
use; equal values count by half. A statistic takes how often each row counts, so that whole texts
can be resampled without sorting again. This module knows no signals, no trees and no traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from entmtp_calib.trace import Floats, Ints

Statistic = Callable[[Floats], float]
"""The figure where row i counts weights[i] times, [N], at least 0; NaN where it is undefined."""


def spearman(values: ArrayLike, outcomes: ArrayLike) -> float:
    """Rank correlation of two columns [N], ties at their mean rank; NaN where one is constant."""
    return rank_correlation(values, outcomes)(np.ones(len(np.asarray(values))))


def auroc(values: ArrayLike, is_positive: ArrayLike) -> float:
    """Chance that a positive row's value is above a negative row's, ties by half.

    Args:
        values: [N].
        is_positive: bool [N]; NaN where all rows are of one class.
    """
    return area(values, is_positive)(np.ones(len(np.asarray(values))))


def rank_correlation(values: ArrayLike, outcomes: ArrayLike) -> Statistic:
    """`spearman` of weighted rows."""
    first, second = _classes(values), _classes(outcomes)

    def figure(weights: Floats) -> float:
        middle = (weights.sum() + 1) / 2
        x, y = (_ranks(classes, weights) - middle for classes in (first, second))
        spread = math.sqrt((weights @ (x * x)) * (weights @ (y * y)))
        return float(weights @ (x * y)) / spread if spread > 0 else math.nan

    return figure


def area(values: ArrayLike, is_positive: ArrayLike) -> Statistic:
    """`auroc` of weighted rows."""
    classes, positive = _classes(values), np.asarray(is_positive, dtype=np.bool_)

    def figure(weights: Floats) -> float:
        n_positive = float(weights[positive].sum())
        pairs = n_positive * (float(weights.sum()) - n_positive)
        above = (weights * _ranks(classes, weights))[positive].sum()
        above -= n_positive * (n_positive + 1) / 2  # pairs among the positive rows
        return float(above) / pairs if pairs > 0 else math.nan

    return figure


def _classes(values: ArrayLike) -> Ints:
    """[N], the number of distinct smaller values: ranks before anything is counted."""
    return np.asarray(np.unique(np.asarray(values), return_inverse=True)[1]).reshape(-1)


def _ranks(classes: Ints, weights: Floats) -> Floats:
    """[N], the mean rank, from 1, of each row's value where rows count `weights` times."""
    count = np.bincount(classes, weights)
    mean_ranks: Floats = np.cumsum(count) - (count - 1) / 2
    return mean_ranks[classes]
