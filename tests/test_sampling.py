"""Sampling: exact in distribution, keyed by position, safe at the edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from entmtp_calib.config import SamplingConfig
from entmtp_calib.errors import ModelError, UsageError
from entmtp_calib.sampling import (
    NOT_FINITE,
    Choices,
    certainty,
    choose,
    entropy,
    greedy,
    gumbel,
    log_probabilities,
    top1_probability,
    typicality,
)

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 1.9, 0.0]])


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1, 0, 1), (0.7, 3, 1), (1, 0, 0.8)])
def test_draws_follow_the_filtered_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    sampling = SamplingConfig(temperature, top_p, top_k, seed=5)
    n = 20_000
    drawn = choose(LOGITS.expand(n, -1), range(n), sampling).numpy()
    probs = log_probabilities(LOGITS, sampling)[0].exp().numpy()
    counts = np.bincount(drawn, minlength=5)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    # 99.9 % quantile of chi-square with 4 degrees of freedom
    assert chi_square(counts[kept], probs[kept]) < 18.5


def test_noise_depends_only_on_seed_and_position() -> None:
    assert torch.equal(gumbel(3, 9, 50), gumbel(3, 9, 50))
    assert not torch.equal(gumbel(3, 9, 50), gumbel(3, 10, 50))
    assert not torch.equal(gumbel(4, 9, 50), gumbel(3, 9, 50))


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    sampling = SamplingConfig(1.0, seed=1)
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    positions = [7, 8, 8, 9, 9, 9]
    together = choose(rows, positions, sampling)
    alone = [choose(rows[i : i + 1], [p], sampling)[0] for i, p in enumerate(positions)]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(0.0),
        SamplingConfig(1e-6),
        SamplingConfig(1e-12),
        SamplingConfig(1.0, top_k=1),
        SamplingConfig(1.0, top_k=1, top_p=0.8),
        SamplingConfig(1.0, top_p=1e-9),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vanishing_randomness_is_greedy(sampling: SamplingConfig, dtype: torch.dtype) -> None:
    rows = (30 * torch.randn(8, 100, generator=torch.Generator().manual_seed(2))).to(dtype)
    assert choose(rows, range(8), sampling).tolist() == rows.argmax(-1).tolist()


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    wide = SamplingConfig(1.0, top_k=10**9, seed=3)
    assert torch.equal(
        log_probabilities(LOGITS, wide), log_probabilities(LOGITS, SamplingConfig(1.0))
    )


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = log_probabilities(logits, SamplingConfig(1.0, top_p=0.6)).isfinite()[0].tolist()
    assert kept == [True, True, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("at", [0, 300, -1])
def test_a_row_that_is_not_finite_has_no_best_token(bad: float | None, at: int) -> None:
    rows = torch.randn(3, 700)
    rows[1] = -torch.inf if bad is None else rows[1]
    rows[1, at] = -torch.inf if bad is None else bad
    best = greedy(rows).tolist()
    assert best[1] == NOT_FINITE
    assert NOT_FINITE not in (best[0], best[2])


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.9, seed=2)])
def test_a_report_gives_the_tokens_and_the_choices_after_them(sampling: SamplingConfig) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    report = torch.stack([torch.tensor([4, 5, 6]), greedy(logits)])
    ids, choices = Choices.read(report, logits, [7, 8, 8], sampling)
    assert ids == [4, 5, 6]
    assert [choices[row] for row in range(3)] == choose(logits, [7, 8, 8], sampling).tolist()
    logits[2, 0] = torch.nan
    report[1] = greedy(logits)
    with pytest.raises(ModelError, match="position 9 are not finite"):
        Choices.read(report, logits, [7, 8, 9], sampling)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_stop_the_run(bad: float) -> None:
    rows = LOGITS.repeat(2, 1)
    rows[1, 2] = bad
    with pytest.raises(ModelError, match=r"position 12 are not finite.*float32"):
        choose(rows, [11, 12], SamplingConfig())


def test_a_row_of_minus_infinity_stops_the_run() -> None:
    with pytest.raises(ModelError, match="not finite"):
        choose(torch.full((1, 4), -torch.inf), [0], SamplingConfig(1.0))


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("inf")}, "--temperature"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.5}, "--top-p"),
        ({"top_p": float("nan")}, "--top-p"),
        ({"top_k": -1}, "--top-k"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_a_value_that_cannot_work_names_its_flag(values: dict, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        SamplingConfig(**values)


def test_typicality_is_each_tokens_probability_and_entropy_at_its_parent() -> None:
    table = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6], [1.0, 1.0, 1.0]])
    probs, nats = typicality(table.log(), [-1, 0, 0, 1], [9, 0, 1, 2], SamplingConfig(1.0))
    assert probs == pytest.approx([1.0, 0.5, 0.25, 0.8])
    assert nats == pytest.approx([0.0, 1.0397, 1.0397, 0.6390], abs=1e-4)
    assert typicality(table[:1].log(), [-1], [9], SamplingConfig(1.0)) == ([1.0], [0.0])


def test_typicality_is_of_the_distribution_that_draws() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(2, -1)
    half = SamplingConfig(0.5)
    probs, nats = typicality(logits, [-1, 0], [0, 1], half)
    assert probs[1] == pytest.approx(0.09 / 0.46)
    assert nats[1] == pytest.approx(entropy(logits[0] * 2), abs=1e-6)
    assert typicality(logits, [-1, 0], [0, 1], SamplingConfig(1.0, top_k=1)) == ([1.0, 0.0], [0, 0])


def test_top_1_probability_and_entropy_of_known_distributions() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.25])) + 7.0
    assert top1_probability(logits) == pytest.approx(0.5)
    assert entropy(logits) == pytest.approx(1.5 * np.log(2))
    assert entropy(torch.zeros(50)) == pytest.approx(np.log(50))
    assert [float(value) for value in certainty(logits)] == [
        top1_probability(logits),
        entropy(logits),
    ]


def test_impossible_tokens_and_large_logits_do_no_harm_to_a_signal() -> None:
    assert entropy(torch.tensor([3.0, -torch.inf, 3.0])) == pytest.approx(np.log(2))
    assert top1_probability(torch.tensor([1e4, 0.0, -torch.inf])) == 1.0
    assert entropy(torch.tensor([1e4, 0.0])) == pytest.approx(0.0)


def test_a_rows_signals_are_bit_for_bit_the_same_wherever_the_row_stands() -> None:
    """A trace holds them from rows of a batch, decoding computes them of one row."""
    rows = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0)) * 3
    for row in rows:
        assert top1_probability(row) == top1_probability(row.clone())
        assert entropy(row) == entropy(row.clone())
