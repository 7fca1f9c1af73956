"""Attention in which rows do not meet in rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entmtp_calib.targets.attention import (
    AttentionShape,
    Rotary,
    _cuts,
    row_blocks,
    rows_pass,
    stable_queries,
    texts_pass,
)
from entmtp_calib.targets.packed import stable_rows

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=16)
FREQUENCIES = 1000.0 ** -(torch.arange(0, 16, 2) / 16)
ROTARY = Rotary(SHAPE, FREQUENCIES, 1.0, 0.25)


def store() -> Tensor:
    return torch.zeros(1, 2, 448, 2 * 16)


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
    causal = [rows for rows, *_ in row_blocks(SHAPE, ROTARY, positions, 0, None, store())]
    assert [(rows.start, rows.stop) for rows in causal] == [(0, 128), (128, 256), (256, 384)]
    mask = torch.ones(300, 300, dtype=torch.bool)
    assert len(list(row_blocks(SHAPE, ROTARY, positions, 0, mask, store()))) == 1


def test_rotary_angles_come_for_stable_row_counts_and_values_do_not_turn() -> None:
    rotary = ROTARY([4])
    assert rotary.shape == (stable_rows(1), 6 + 2 + 2, 8)
    assert torch.equal(rotary[0, 6:8], rotary[0, :1].expand(2, -1) * 4)  # queries carry 0.25
    assert (rotary[:, 8:] == 1).all()


def test_a_position_turns_the_same_whichever_came_before_it() -> None:
    late_first = Rotary(SHAPE, FREQUENCIES, 1.0, 0.25)
    late = late_first([5000, 3])
    assert torch.equal(ROTARY([3])[0], late[1])
    assert torch.equal(ROTARY([5000])[0], late[0])


def test_rows_go_behind_the_committed_ones_and_see_up_to_themselves() -> None:
    step, views = rows_pass(SHAPE, ROTARY([5, 6, 6]), [5, 6, 6], 5, None, store())
    assert step.places[:6].tolist() == [5, 448 + 5, 6, 448 + 6, 7, 448 + 7]
    assert (step.texts, step.start) == (1, 5)
    assert step.rows + step.more_rows == stable_rows(3)
    assert views.flat.shape == (1, 2 * 448, 2 * 16)
    assert views.keys.shape == (1, 2, 16, sum(step.widths))
    assert step.mask is not None
    assert step.mask.shape[1] == step.rows * 3 + step.more_queries
    assert step.mask[0, :9:3, :3].isneginf().tolist() == [
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]


def test_padding_is_written_where_the_row_goes_that_it_repeats() -> None:
    step, _ = rows_pass(SHAPE, ROTARY([5]), [5], 5, None, store())
    assert step.places.view(-1, 2).tolist() == [[5, 448 + 5]] * stable_rows(1)


def test_no_more_rows_attend_than_are_needed_for_stable_bits() -> None:
    step, _ = rows_pass(SHAPE, ROTARY([130]), [130], 130, None, store())
    least = stable_queries(min(2, torch.get_num_threads()))
    assert step.rows * SHAPE.group + step.more_queries >= least
    assert step.rows == 1 or (step.rows - 1) * SHAPE.group < least


def test_texts_side_by_side_see_their_own_columns_only() -> None:
    positions = [2, 130]
    step, views = texts_pass(SHAPE, ROTARY(positions), positions, torch.zeros(1, 2, 2, 192, 32))
    assert step.places[:4].tolist() == [2, 192 + 2, 2 * 192 + 130, 3 * 192 + 130]
    assert step.rows + step.more_rows == 1 + stable_rows(2) - 2
    assert step.widths == [128, 16]
    assert [values[0].shape for values in views.sums] == [(4, 128, 16), (4, 16, 16)]
    assert step.mask is not None
    assert (step.mask == 0).sum(-1).flatten().tolist() == [3, 3, 131, 131]
