"""Recorded heads, on a stand-in for CUDA graphs, are the heads themselves."""

from __future__ import annotations

import pytest
import tape
import torch
import toys
from toy_heads import random_heads

from entmtp_calib.errors import EntmtpWarning
from entmtp_calib.heads.graphed import USUAL_ROWS
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.targets.graphs import Sizes

SIZES = Sizes(first=16, margin=8)
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(0))


def pair(kind: str = "hydra", prefix: bool = True) -> tuple[Heads, Heads, tape.Recorder]:
    """Heads, and the same ones recorded."""
    record = tape.Recorder()
    heads, again = (random_heads(toys.rand(), kind, prefix=prefix) for _ in range(2))
    again.record(record, SIZES)
    return heads, again, record


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_a_level_is_recorded_per_depth_and_number_of_parents(kind: str) -> None:
    heads, again, record = pair(kind, prefix=False)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        for depth, n_paths in ((1, 1), (2, 3), (3, 3), (3, 1)):
            vector = torch.randn(32, generator=draw)
            paths = torch.randint(0, 10, (n_paths, depth), generator=draw)
            expected = heads.draft_level(depth, vector, paths)
            found = again.draft_level(depth, vector, paths)
            assert torch.equal(expected[0], found[0])
            torch.testing.assert_close(expected[1], found[1])
    assert record.recorded == (4 if kind == "hydra" else 3)  # Medusa's do not look at paths
    assert record.replayed == 12


@torch.no_grad()
def test_the_prefix_layer_follows_in_pieces_of_every_size() -> None:
    """Prompts run as they are; steps of 1 to 4 rows are one recording per size of columns."""
    heads, again, record = pair()
    states = HeadState(), HeadState()
    draw, position = torch.Generator().manual_seed(2), 0
    for n_rows in (9, 1, 4, 2, 3, 1, 1, 4, 6, 2, 4, 1):
        hidden = torch.randn(n_rows, 32, generator=draw)
        positions = torch.arange(position, position + n_rows)
        for each, state in zip((heads, again), states, strict=True):
            each.observe(state, hidden, positions)
        torch.testing.assert_close(states[0].vectors, states[1].vectors, atol=1e-5, rtol=1e-4)
        position += n_rows
    assert record.recorded == 3
    assert record.replayed == 10


@torch.no_grad()
def test_a_step_that_was_taken_back_leaves_no_mark() -> None:
    _, again, _ = pair()
    state, hidden = HeadState(), torch.randn(8, 32)
    again.observe(state, hidden[:4], torch.arange(4))
    past, vectors, kept = state.past, state.vectors, state.vectors.clone()
    again.observe(state, hidden[4:], torch.arange(4, 8))
    expected = state.vectors
    state.past = past
    again.observe(state, torch.randn(4, 32), torch.arange(4, 8))
    assert torch.equal(vectors, kept)
    state.past = past
    again.observe(state, hidden[4:], torch.arange(4, 8))
    assert torch.equal(state.vectors, expected)


@torch.no_grad()
def test_a_text_that_outgrows_its_memory_takes_its_past_along() -> None:
    heads, again, _ = pair()
    states = HeadState(), HeadState()
    n = SIZES.holding(USUAL_ROWS) - 2
    hidden = torch.randn(n + 3, 32, generator=torch.Generator().manual_seed(3))
    for each, state in zip((heads, again), states, strict=True):
        each.observe(state, hidden[:n], torch.arange(n))
        each.observe(state, hidden[n:], torch.arange(n, n + 3))
    torch.testing.assert_close(states[0].vectors, states[1].vectors, atol=1e-5, rtol=1e-4)


def test_where_recording_fails_heads_draft_and_follow_all_the_same() -> None:
    heads = random_heads(toys.rand(), prefix=True)
    paths, hidden = torch.tensor([[1, 2]]), torch.randn(2, 32)
    expected, states = heads.draft_level(2, VECTOR, paths), (HeadState(), HeadState())
    heads.observe(states[0], hidden, torch.arange(2))
    heads.record(tape.broken, SIZES)
    with pytest.warns(EntmtpWarning, match="drafting runs without CUDA graphs"):
        found = heads.draft_level(2, VECTOR, paths)
    heads.observe(states[1], hidden, torch.arange(2))
    assert torch.equal(expected[0], found[0])
    torch.testing.assert_close(states[0].vectors, states[1].vectors)
