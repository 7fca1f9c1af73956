"""Heads with packed weights: the same drafts, and the same bits whatever rides along."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entmtp_calib.heads.model import Heads, HeadsConfig, HeadState
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.targets.packed import can_pack

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")

WIDTH, VOCAB, ROWS = 64, 90, 290


@pytest.fixture(scope="module", params=[4, 2, 1], ids="{} kv heads".format)
def heads(request: pytest.FixtureRequest) -> Heads:
    """Not packed, with a prefix layer of 4 heads."""
    prefix = PrefixConfig(80, 4, request.param, 16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        table = torch.randn(VOCAB, WIDTH)
        config = HeadsConfig("hydra", 2, WIDTH, VOCAB, prefix=prefix)
        return Heads(config, table, torch.randn(VOCAB, WIDTH)).requires_grad_(False)


@pytest.fixture(scope="module")
def hidden() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def vectors(heads: Heads, hidden: Tensor, pieces: list[int]) -> Tensor:
    """What drafting is conditioned on at each row, the rows being observed piece by piece."""
    state, seen, start = HeadState(), [], 0
    for n in pieces:
        rows = slice(start, start + n)
        heads.observe(state, hidden[rows], torch.arange(start, start + n))
        seen.append(state.vectors)
        start += n
    return torch.cat(seen)


def test_packing_changes_the_prefix_layer_by_rounding_only(heads: Heads, hidden: Tensor) -> None:
    exact = vectors(heads, hidden, [ROWS])
    heads.pack()
    packed = vectors(heads, hidden, [ROWS])
    assert not torch.equal(packed, exact)
    assert (packed - exact).abs().max() < 2e-3 * exact.abs().max()


@pytest.mark.parametrize("pieces", [[1] * ROWS, [120, 1, 3, 2, 6, 1, 157], [200, 90]])
def test_a_row_of_the_prefix_layer_has_the_same_bits_in_every_piece(
    heads: Heads, hidden: Tensor, pieces: list[int]
) -> None:
    heads.pack()
    assert torch.equal(vectors(heads, hidden, pieces), vectors(heads, hidden, [ROWS]))


def test_going_back_to_an_earlier_past_gives_the_same_rows_again(
    heads: Heads, hidden: Tensor
) -> None:
    heads.pack()
    state = HeadState()
    heads.observe(state, hidden[:20], torch.arange(20))
    past = state.past
    heads.observe(state, hidden[20:25], torch.arange(20, 25))
    expected = state.vectors
    state.past = past
    heads.observe(state, hidden[100:103], torch.arange(20, 23))
    state.past = past
    heads.observe(state, hidden[20:25], torch.arange(20, 25))
    assert torch.equal(state.vectors, expected)


def test_a_paths_draft_does_not_depend_on_its_company(heads: Heads, hidden: Tensor) -> None:
    heads.pack()
    paths = torch.randint(VOCAB, (40, 2), generator=torch.Generator().manual_seed(2))
    together = heads.level_logits(2, hidden[0], paths)
    for n in (1, 2, 5, 13):
        assert torch.equal(heads.level_logits(2, hidden[0], paths[:n]), together[:n])
