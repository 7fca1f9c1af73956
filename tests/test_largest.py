"""The largest numbers of long rows are those of torch's own functions."""

from __future__ import annotations

import pytest
import torch

from entmtp_calib.largest import largest, top

SIZES = [5, 1000, 4096, 4100, 8192, 49152]


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_of_a_row_is_at_its_first_place(size: int) -> None:
    rows = torch.randn(30, size, generator=torch.Generator().manual_seed(3))
    rows[::2] = (2 * rows[::2]).round()  # ties, within blocks and across them
    rows[7] = -torch.inf
    rows[7, -1] = 3.0
    values, places = largest(rows)
    assert values.tolist() == rows.amax(-1).tolist()
    assert places.tolist() == [row.tolist().index(float(row.max())) for row in rows]


@pytest.mark.parametrize("at", [0, 3000, -1])
def test_a_number_that_is_none_is_the_largest(at: int) -> None:
    rows = torch.randn(2, 8192)
    rows[1, at] = torch.nan
    assert largest(rows)[0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("size", [100, *SIZES[1:]])
def test_the_top_of_a_row_is_in_order_and_complete(size: int, k: int) -> None:
    rows = torch.randn(9, size, generator=torch.Generator().manual_seed(4))
    rows[::2] = (8 * rows[::2]).round()
    values, places = top(rows, k)
    assert torch.equal(values, rows.topk(k, -1).values)
    assert torch.equal(rows.gather(1, places), values)
    assert all(len(set(row)) == k for row in places.tolist())


def test_a_row_has_the_same_top_alone_and_in_company() -> None:
    """Ranks in a trace, taken over many rows, are the ranks that live drafting sees."""
    rows = (4 * torch.randn(9, 8192, generator=torch.Generator().manual_seed(5))).round()
    together = top(rows, 32)[1]
    for index, row in enumerate(rows):
        assert torch.equal(top(row[None].clone(), 32)[1][0], together[index])
