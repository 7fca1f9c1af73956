"""Attention in which rows do not meet in rounding."""

from __future__ import annotations

import pytest
import torch

from entmtp_calib.targets.attention import (
    AttentionShape,
    Rotary,
    RowsAttention,
    Stores,
    _cuts,
    row_blocks,
    stable_queries,
)
from entmtp_calib.targets.packed import stable_rows

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=16)
ROTARY = Rotary(SHAPE, 1000.0 ** -(torch.arange(0, 16, 2) / 16), 1.0, 0.25)


def stores() -> Stores:
    keys, values = torch.zeros(2, 1, 2, 448, 16)
    return keys, values


def test_sums_are_cut_where_positions_cross_multiples_of_128() -> None:
    assert _cuts([5], start=5) == [0, 16]
    assert _cuts([127], start=127) == [0, 128]
    assert _cuts([128], start=128) == [0, 128, 144]
    assert _cuts([130], start=130) == [0, 128, 144]
    assert _cuts([126, 127, 127, 128, 128, 129], start=126) == [0, 129, 145]
    assert _cuts(list(range(300)), start=0) == [0, 128, 256, 300]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_as_many_queries_as_are_stable_have_the_bits_of_many_more(groups: int) -> None:
    generator = torch.Generator().manual_seed(5)
    queries = torch.randn(groups, 48, 32, generator=generator)
    keys = torch.randn(groups, 77, 32, generator=generator)
    whole = queries @ keys.transpose(1, 2)
    for n in range(stable_queries(groups), 48):
        assert torch.equal(torch.bmm(queries[:, :n], keys.transpose(1, 2)), whole[:, :n])


def test_it_is_softmax_attention_over_rotated_grouped_keys() -> None:
    n = stable_rows(5)
    rows = torch.randn(n, 10 * 16, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(n)
    attend = RowsAttention(SHAPE, ROTARY(positions), positions.tolist(), 0, None, stores())
    found = attend(0, rows.clone())[:n]

    pairs = torch.view_as_complex(rows[:, : 8 * 16].reshape(n, 8, 8, 2))
    turned = (
        pairs * torch.polar(torch.ones(n, 8), positions[:, None] * ROTARY._frequencies)[:, None]
    )
    heads = torch.view_as_real(turned).flatten(2)
    keys, values = heads[:, 6:], rows[:, 8 * 16 :].view(n, 2, 16)
    for head in range(6):
        scores = heads[:, head] @ keys[:, head // 3].T * 0.25
        weights = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        expected = weights @ values[:, head // 3]
        assert torch.allclose(found[:, 16 * head : 16 * head + 16], expected, atol=1e-5)


def test_a_masked_pass_is_one_block_and_a_long_text_several() -> None:
    positions = torch.arange(300)
    causal = [rows for rows, _ in row_blocks(SHAPE, ROTARY, positions, 0, None, stores())]
    assert [(rows.start, rows.stop) for rows in causal] == [(0, 128), (128, 256), (256, 384)]
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert len(list(row_blocks(SHAPE, ROTARY, positions, 0, mask, stores()))) == 1


def test_rotary_angles_come_for_stable_row_counts() -> None:
    assert len(ROTARY(torch.tensor([4]))) == stable_rows(1)
