"""Fits find a planted gain and never invent one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from traces import trace_of

from entmtp_calib.errors import DataError
from entmtp_calib.fitting import Fit, fit_hysteresis, fit_ladder, fit_static
from entmtp_calib.policy import Ladder, Policy, Static
from entmtp_calib.replay import accepted, oracle_ms, prompt_ms, walk_policy
from entmtp_calib.signals import SignalSpec
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain

TOP1 = SignalSpec("base_top1")
TREES = [EMPTY, chain(1), chain(3)]
STEP_MS = np.array([10.0, 14.0, 22.0])
FITS = [fit_ladder, fit_hysteresis]


def told_by(easy: list[np.ndarray], signal: list[np.ndarray]) -> tuple[Trace, np.ndarray]:
    """Texts of easy positions (the chain is right up to the next hard token) and hard ones.

    The top-1 probability is 0.9 where the signal says easy, and 0.1 where it says hard.
    """
    texts = []
    for mask in easy:
        ahead = np.append(mask, [False] * 3)
        rows = [
            [all(ahead[row : row + depth + 2]) for depth in range(3)] for row in range(len(mask))
        ]
        texts.append(np.where(rows, 0, -1).tolist())
    trace = trace_of(texts, base_top1=np.where(np.concatenate(signal), 0.9, 0.1).tolist())
    return trace, np.stack([accepted(tree, trace.ranks) for tree in TREES])


def easy_and_hard(
    n_texts: int = 12, length: int = 61, seed: int = 0, told: float = 1.0
) -> tuple[Trace, np.ndarray]:
    """Random runs of both; with probability 1 - `told` the signal is drawn without looking."""
    random = np.random.default_rng(seed)
    easy, signal = [], []
    for _ in range(n_texts):
        runs = np.repeat(random.random(length) < 0.5, random.integers(4, 12, length))
        easy.append(runs[:length])
        is_told = random.random(length) < told
        signal.append(np.where(is_told, easy[-1], random.random(length) < 0.5))
    return told_by(easy, signal)


def static_ms(trace: Trace, table: np.ndarray, index: int) -> float:
    steps = walk_policy(trace, table, Static(index))
    return float(prompt_ms(trace, steps.chosen, STEP_MS).sum())


def test_the_static_fit_is_the_fastest_tree() -> None:
    trace, table = easy_and_hard()
    times = [static_ms(trace, table, index) for index in range(3)]
    fit = fit_static(trace, table, STEP_MS)
    assert fit.policy == Static(int(np.argmin(times)))
    assert fit.tokens_per_second == pytest.approx(1000 * len(trace) / min(times))


def test_a_static_tie_goes_to_the_smaller_tree() -> None:
    trace, table = easy_and_hard()
    assert fit_static(trace, table[[0, 0]], np.array([10.0, 10.0])).policy == Static(0)


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_signal_that_tells_is_found_and_its_speed_is_the_replayed_one(
    fit_policy: Callable[..., Fit],
) -> None:
    trace, table = easy_and_hard()
    fit = fit_policy(trace, table, STEP_MS, TOP1)
    steps = walk_policy(trace, table, fit.policy)
    total_ms = prompt_ms(trace, steps.chosen, STEP_MS).sum()
    assert fit.policy.signal == TOP1
    assert fit.tokens_per_second == pytest.approx(1000 * len(trace) / total_ms)
    assert fit.tokens_per_second > 1.05 * fit.static_tokens_per_second
    assert fit.held_out_gain > 0.05
    best = 1000 * len(trace) / oracle_ms(trace, table, STEP_MS).sum()
    assert fit.static_tokens_per_second < fit.tokens_per_second <= best
    assert set(fit.policy.indices) == {0, 2}


@pytest.mark.parametrize("fit_policy", FITS)
@pytest.mark.parametrize("seed", [0, 6, 13, 16, 21])
def test_a_signal_of_pure_noise_leaves_the_static_tree(
    fit_policy: Callable[..., Fit], seed: int
) -> None:
    trace, table = easy_and_hard(seed=seed, told=0.0)
    fit = fit_policy(trace, table, STEP_MS, TOP1)
    assert fit.policy.signal is None
    assert fit.policy.indices == fit_static(trace, table, STEP_MS).policy.indices
    assert fit.tokens_per_second == fit.static_tokens_per_second
    assert fit.held_out_gain == 0.0


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_signal_that_costs_more_than_it_brings_is_not_used(
    fit_policy: Callable[..., Fit],
) -> None:
    trace, table = easy_and_hard()
    assert fit_policy(trace, table, STEP_MS, TOP1, signal_ms=0.5).policy.signal == TOP1
    assert fit_policy(trace, table, STEP_MS, TOP1, signal_ms=9.0).policy.signal is None


@pytest.mark.parametrize("fit_policy", FITS)
def test_the_signals_cost_may_depend_on_what_the_tree_reuses(
    fit_policy: Callable[..., Fit],
) -> None:
    trace, table = easy_and_hard()
    cost = np.array([1.0, 0.5, 0.0])
    fit = fit_policy(trace, table, STEP_MS, TOP1, signal_ms=cost)
    chosen = walk_policy(trace, table, fit.policy).chosen
    total_ms = prompt_ms(trace, chosen, STEP_MS + cost).sum()
    assert fit.tokens_per_second == pytest.approx(1000 * len(trace) / total_ms)


@pytest.mark.parametrize("fit_policy", FITS)
def test_a_gain_on_half_of_the_texts_only_is_not_believed(fit_policy: Callable[..., Fit]) -> None:
    trace, table = easy_and_hard()
    signal = trace.base_top1.copy()
    odd = trace.prompt % 2 == 1
    signal[odd] = 1.0 - signal[odd]  # in every second text the signal points the wrong way
    contrary = trace_of(
        [trace.ranks[trace.rows_of([p])].tolist() for p in range(trace.n_prompts)],
        base_top1=signal.tolist(),
    )
    assert fit_policy(contrary, table, STEP_MS, TOP1).policy.signal is None


@pytest.mark.parametrize("fit_policy", FITS)
def test_each_half_of_the_texts_must_gain_from_the_other(fit_policy: Callable[..., Fit]) -> None:
    # Twelve hard tokens in every second text, one in the others: too rare there to be learned
    # from, so one half gains nothing while the other gains in every text.
    easy = [~np.isin(np.arange(120), range(40, 41 if odd else 52)) for odd in [False, True] * 6]
    trace, table = told_by(easy, easy)
    assert fit_policy(trace, table, STEP_MS, TOP1).policy.signal is None


@pytest.mark.parametrize("fit_policy", FITS)
def test_one_text_is_too_little_to_believe_a_gain(fit_policy: Callable[..., Fit]) -> None:
    trace, table = easy_and_hard(n_texts=1)
    assert fit_policy(trace, table, STEP_MS, TOP1).policy.signal is None


@pytest.mark.parametrize("fit_policy", FITS)
def test_one_tree_alone_is_a_static_policy(fit_policy: Callable[..., Fit]) -> None:
    trace, table = easy_and_hard()
    assert fit_policy(trace, table[:1], STEP_MS[:1], TOP1).policy.indices == (0,)


@pytest.mark.parametrize("fit_policy", FITS)
def test_past_acceptance_tells_where_easy_and_hard_stretches_are_long(
    fit_policy: Callable[..., Fit],
) -> None:
    random = np.random.default_rng(1)
    texts = []
    for _ in range(12):
        easy = np.repeat(random.random(4) < 0.5, 60)
        easy[-3:] = False
        rows = np.where(easy[:, None], 0, -1) * np.ones((1, 3), dtype=int)
        texts.append(rows.tolist())
    trace = trace_of(texts)
    trees = [EMPTY, chain(1), chain(3)]
    table = np.stack([accepted(tree, trace.ranks) for tree in trees])
    fit = fit_policy(
        trace,
        table,
        STEP_MS,
        SignalSpec("acceptance_average"),
        speculates=np.array([False, True, True]),
    )
    assert fit.policy.signal is not None
    assert fit.tokens_per_second > fit.static_tokens_per_second


def test_a_ladder_is_as_good_as_the_best_single_threshold() -> None:
    random = np.random.default_rng(2)
    confidence = random.random(1200)
    ranks = np.where(random.random((1200, 3)) < confidence[:, None], 0, 1)
    texts = ranks.reshape(12, 100, 3)
    for depth in range(3):
        texts[:, 99 - depth :, depth] = -1
    trace = trace_of(texts.tolist(), base_top1=confidence.tolist())
    trees = [EMPTY, chain(1), Tree.of([(0,), (1,), (0, 0)]), chain(3)]
    costs = np.array([10.0, 12.0, 16.0, 15.0])
    table = np.stack([accepted(tree, trace.ranks) for tree in trees])

    def ms(policy: Policy) -> float:
        return float(prompt_ms(trace, walk_policy(trace, table, policy).chosen, costs).sum())

    single = min(
        ms(Ladder(TOP1, (level,), pair))
        for pair in itertools.combinations(range(4), 2)
        for level in np.linspace(0.1, 0.9, 9)
    )
    fit = fit_ladder(trace, table, costs, TOP1)
    assert list(fit.policy.indices) == sorted(set(fit.policy.indices))
    assert ms(fit.policy) <= 1.01 * single


def test_texts_without_a_step_cannot_be_fitted() -> None:
    trace = trace_of([[[-1]], [[-1]]])
    with pytest.raises(DataError, match="no text of two or more tokens"):
        fit_static(trace, np.zeros((1, 2), dtype=np.int64), np.ones(1))
