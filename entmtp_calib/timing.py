"""A clock that waits for the device, a fair order of runs, and how sure a figure is.

Figures are ratios of totals (tokens per second, tokens per step); their intervals come from
resampling whole prompts, since positions of one text are not independent. Methods are compared
prompt by prompt, so that easy and hard prompts cancel. This module knows no trees and no models; it
imports torch only to wait for a device that works asynchronously.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Method = TypeVar("Method")

CONFIDENCE = 0.95

Mark = Any
"""A point in time: seconds on the host, or an event of the device."""


class Clock:
    """Seconds on the host's clock, read after the device has finished what it was given."""

    def __init__(self, device: str = "cpu") -> None:
        self._asynchronous = device if device.startswith("cuda") else None

    def now(self) -> float:
        if self._asynchronous:
            import torch

            torch.cuda.synchronize(self._asynchronous)
        return time.perf_counter()

    def mark(self) -> Mark:
        """This point in what the device was given to do; nobody waits for it."""
        if not self._asynchronous:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._asynchronous))
        return event

    def milliseconds(self, begin: Mark, end: Mark) -> float:
        """From mark to mark, once the device is known to have passed both."""
        if isinstance(begin, float):
            return 1000 * (end - begin)
        return float(begin.elapsed_time(end))


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % interval; NaN where undefined, infinite where nothing bounds it."""

    low: float
    value: float
    high: float


def is_tie(ratio: Interval) -> bool:
    """Whether a ratio cannot be told apart from 1; an undefined one cannot."""
    return not (ratio.low > 1 or ratio.high < 1)


def interleave(methods: Sequence[Method], rounds: int, seed: int) -> Iterator[tuple[int, Method]]:
    """Every method once per round, in an order drawn anew for each round.

    Heat and other people's load then fall on all methods alike.
    """
    draw = random.Random(seed)
    for number in range(rounds):
        for method in draw.sample(methods, len(methods)):
            yield number, method


def median(values: Sequence[float]) -> float:
    """The middle of at least one value."""
    return float(statistics.median(values))


def relative_spread(values: Sequence[float]) -> float:
    """Interquartile range over the median: repeats that scatter more than they differ."""
    low, middle, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75])
    return float((high - low) / middle)


def median_error(values: Sequence[float]) -> float:
    """Standard error of the median, as a share of it.

    That of a normal distribution with the same interquartile range: sqrt(pi / 2) * sigma / sqrt(n)
    with sigma = range / 1.349, so that a few outliers, which leave the median alone, do not count.
    """
    return math.sqrt(math.pi / 2 / len(values)) * relative_spread(values) / 1.349


def mean_interval(
    numerators: ArrayLike, denominators: ArrayLike, n_boot: int = 2000, seed: int = 0
) -> Interval:
    """Total over total with its interval over prompts.

    Args:
        numerators: [P], such as emitted tokens per prompt.
        denominators: [P], such as steps or seconds per prompt; prompts with 0 are left out.
        n_boot: resamples.
        seed: of the resampling.
    """
    above, below = _per_prompt(numerators, denominators)
    above, below = above[below > 0], below[below > 0]
    if not len(below):
        return Interval(math.nan, math.nan, math.nan)
    counts = _resamples(len(below), n_boot, seed)
    value, resampled = float(above.sum() / below.sum()), (counts @ above) / (counts @ below)
    if (above == 0).any():
        return _interval(value, resampled, len(below))
    # On the log, so that a widened interval of a positive figure stays positive.
    log = _interval(math.log(value), np.log(resampled), len(below))
    return Interval(math.exp(log.low), value, math.exp(log.high))


def paired_bootstrap(
    tokens: ArrayLike,
    seconds: ArrayLike,
    baseline_tokens: ArrayLike,
    baseline_seconds: ArrayLike,
    n_boot: int = 2000,
    seed: int = 0,
) -> Interval:
    """Tokens per second of a method over those of a baseline, on the same prompts.

    The interval is taken on the log ratio of totals.

    Args:
        tokens, seconds: [P], per prompt, of the method.
        baseline_tokens, baseline_seconds: [P], per prompt, in the same order.
        n_boot: resamples.
        seed: of the resampling.
    """
    columns = _per_prompt(tokens, seconds, baseline_tokens, baseline_seconds)
    used = np.all([column > 0 for column in columns], axis=0)
    columns = [column[used] for column in columns]
    n_prompts = int(used.sum())
    if not n_prompts:
        return Interval(math.nan, math.nan, math.nan)
    counts = _resamples(n_prompts, n_boot, seed)
    log_ratios = _log_ratio([counts @ column for column in columns])
    value = _log_ratio([column.sum(keepdims=True) for column in columns])[0]
    log = _interval(float(value), log_ratios, n_prompts)
    return Interval(math.exp(log.low), math.exp(log.value), math.exp(log.high))


def bootstrap(
    figure: Callable[[NDArray[np.float64]], float],
    n_prompts: int,
    n_boot: int = 2000,
    seed: int = 0,
) -> Interval:
    """Any figure of whole prompts with its interval.

    Args:
        figure: takes how often each prompt counts, [P]; resamples where it is NaN are left out.
        n_prompts: P.
        n_boot: resamples.
        seed: of the resampling.
    """
    value = figure(np.ones(n_prompts))
    resampled = np.array([figure(counts) for counts in _resamples(n_prompts, n_boot, seed)])
    resampled = resampled[~np.isnan(resampled)]
    if math.isnan(value) or not len(resampled):
        return Interval(math.nan, math.nan, math.nan)
    return _interval(value, resampled, n_prompts)


def _log_ratio(totals: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    tokens, seconds, baseline_tokens, baseline_seconds = (np.log(total) for total in totals)
    ratio: NDArray[np.float64] = tokens - seconds - baseline_tokens + baseline_seconds
    return ratio


def _per_prompt(*columns: ArrayLike) -> list[NDArray[np.float64]]:
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    if any(array.ndim != 1 or array.shape != arrays[0].shape for array in arrays):
        raise ValueError(f"one value per prompt each, not {[array.shape for array in arrays]}")
    if not all(np.isfinite(array).all() and (array >= 0).all() for array in arrays):
        raise ValueError("counts and seconds are finite and not negative")
    return arrays


def _resamples(n_prompts: int, n_boot: int, seed: int) -> NDArray[np.float64]:
    """How often each resample takes each prompt, [n_boot, n_prompts]."""
    generator = np.random.default_rng(seed)
    share = np.full(n_prompts, 1 / n_prompts)
    return generator.multinomial(n_prompts, share, size=n_boot).astype(np.float64)


def _interval(value: float, resampled: NDArray[np.float64], n_prompts: int) -> Interval:
    """Percentiles of the resampled figures, widened about the value for few prompts.

    With one prompt nothing is known about the spread.
    """
    if n_prompts < 2:
        return Interval(-math.inf, value, math.inf)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(bound) for bound in np.quantile(resampled, [tail, 1 - tail]))
    widening = _widening(n_prompts)
    return Interval(
        value - max(value - low, 0.0) * widening, value, value + max(high - value, 0.0) * widening
    )


def _widening(n: int) -> float:
    """What an interval over n resampled values must grow by, near 1 from 20 values on.

    Resampling understates the spread by sqrt((n - 1) / n), and the percentiles are the normal
    distribution's where Student's are due (here by their usual series in 1 / (n - 1)).
    """
    z, v = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2), n - 1
    student = (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
    return student / z * math.sqrt(n / v)
