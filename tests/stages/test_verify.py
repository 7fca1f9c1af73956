"""Verify: the gap of a divergence says how near the choice was, greedy and sampled."""

from __future__ import annotations

import pytest
import torch

from entmtp_calib.config import SamplingConfig
from entmtp_calib.sampling import choose
from entmtp_calib.stages.verify import _Logits, logit_gap

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0])


def test_the_greedy_gap_is_of_the_logits() -> None:
    assert logit_gap(LOGITS, 9, SamplingConfig(), 3, 0) == pytest.approx(1.0)


@pytest.mark.parametrize("position", range(20))
def test_the_sampled_gap_is_of_what_the_draw_compared(position: int) -> None:
    sampling = SamplingConfig(temperature=5.0, seed=3)
    chosen = int(choose(LOGITS[None], [position], sampling))
    others = [token for token in range(len(LOGITS)) if token != chosen]
    gaps = [logit_gap(LOGITS, position, sampling, chosen, other) for other in others]
    assert min(gaps) > 0
    nudged = LOGITS.clone()
    nudged[others[gaps.index(min(gaps))]] += 1.001 * min(gaps)
    assert int(choose(nudged[None], [position], sampling)) != chosen


def test_logits_are_compared_row_by_row_whatever_passes_they_come_in() -> None:
    rows = torch.arange(12.0).view(4, 3)
    plain = _Logits()
    for row in rows:
        plain(row, row[None])
    other = _Logits(plain.rows)
    other(rows[:1], rows[:1])
    other(rows[1:], rows[1:] + torch.tensor([0.0, 0.0, 0.5]) * torch.tensor([[0.0], [1.0], [2.0]]))
    assert other.differences == [0.0, 0.0, 0.5, 1.0]
