"""Attention in which rows do not meet in rounding."""

from __future__ import annotations

import pytest
import torch

from entmtp_calib.targets.attention import (
    AttentionShape,
    Rotary,
    Stores,
    _cuts,
    row_blocks,
    rows_pass,
    stable_queries,
    texts_pass,
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


def test_a_masked_pass_is_one_block_and_a_long_text_several() -> None:
    positions = torch.arange(300)
    causal = [rows for rows, *_ in row_blocks(SHAPE, ROTARY, positions, 0, None, stores())]
    assert [(rows.start, rows.stop) for rows in causal] == [(0, 128), (128, 256), (256, 384)]
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert len(list(row_blocks(SHAPE, ROTARY, positions, 0, mask, stores()))) == 1


def test_rotary_angles_come_for_stable_row_counts() -> None:
    assert len(ROTARY(torch.tensor([4]))) == stable_rows(1)


def test_rows_go_behind_the_committed_ones_and_see_up_to_themselves() -> None:
    rotary = ROTARY(torch.arange(3))
    step, views = rows_pass(SHAPE, rotary, [5, 6, 6], 5, None, stores())
    assert step.places.tolist() == [5, 448 + 5, 6, 448 + 6, 7, 448 + 7]
    assert (step.texts, step.rows, step.new_rows, step.start) == (1, len(rotary), 3, 5)
    assert views.keys[0].shape == (2 * 448, 16)
    assert views.seen[0].shape == (2, 16, sum(step.widths))
    assert step.mask is not None
    assert step.mask[0, 0, :3, 0, :3].isneginf().tolist() == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]


def test_texts_side_by_side_see_their_own_columns_only() -> None:
    positions = torch.tensor([2, 130])
    store = torch.zeros(1, 2, 2, 192, 16)
    step, views = texts_pass(SHAPE, ROTARY(positions), positions, (store, store.clone()))
    assert step.places.tolist() == [2, 192 + 2, 2 * 192 + 130, 3 * 192 + 130]
    assert step.widths == [128, 16]
    assert [part.shape for part in views.sums[0]] == [(4, 128, 16), (4, 16, 16)]
    assert step.mask is not None
    assert (step.mask == 0).sum(-1).flatten().tolist() == [3, 131]
