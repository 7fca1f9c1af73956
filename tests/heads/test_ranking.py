"""Ranks of the true tokens, against one call per position."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor
from toy_heads import perfect_cycle_heads, random_heads

from entmtp_calib.heads import ranking
from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.ranking import following_tokens, ranks_and_chain, true_ranks

TEXT = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def test_following_tokens_end_with_the_text() -> None:
    rows = following_tokens(torch.tensor([7, 8, 9]), 2)
    assert rows.tolist() == [[7, 8, 9], [8, 9, -1], [9, -1, -1]]


def test_ranks_are_those_of_one_call_per_position(monkeypatch) -> None:
    monkeypatch.setattr(ranking, "CHUNK_ROWS", 3)
    heads = random_heads(toys.rand(), draft_ids=[1, 2, 3, 4, 5, 6])
    vectors = torch.randn(len(TEXT), 32)
    ranks = true_ranks(heads, vectors, following_tokens(TEXT, 3))
    for t in range(len(TEXT)):
        for depth in range(1, 4):
            expected = -1
            if t + depth < len(TEXT):
                path = TEXT[t : t + depth][None]
                order = heads.draft_level(depth, vectors[t], path)[0][0].tolist()
                token = int(TEXT[t + depth])
                expected = order.index(token) if token in order else -1
            assert ranks[t, depth - 1] == expected


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_a_chain_follows_its_own_choices_on_and_off_the_text(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(ranking, "CHUNK_ROWS", 3)
    heads = random_heads(toys.rand(), kind)
    vectors = torch.randn(len(TEXT), 32)
    chains = [chain_from(heads, vectors[t], int(TEXT[t])) for t in range(len(TEXT))]
    # The chain from 2 is the text itself; those from other positions leave it somewhere.
    text = torch.cat([TEXT[:3], torch.tensor(chains[2][0]), TEXT[6:]])
    ranks, probs = ranks_and_chain(heads, vectors, following_tokens(text, 3))
    for t in range(len(text)):
        _, expected = chain_from(heads, vectors[t], int(text[t]))
        torch.testing.assert_close(probs[t], torch.stack(expected))
    assert ranks[2].tolist() == [0, 0, 0]
    assert torch.equal(ranks, true_ranks(heads, vectors, following_tokens(text, 3)))


def chain_from(heads: Heads, vector: Tensor, root: int) -> tuple[list[int], list[Tensor]]:
    """Tokens and probabilities of the greedy chain from one position."""
    path, probs = torch.tensor([[root]]), []
    for depth in range(1, heads.n_heads + 1):
        ids, p = heads.draft_level(depth, vector, path)
        path = torch.cat([path, ids[:, :1]], dim=1)
        probs.append(p[0, 0])
    return path[0, 1:].tolist(), probs


def test_perfect_heads_rank_everything_first() -> None:
    target = toys.cycle()
    text = torch.arange(10, 20)
    hidden = target.forward(list(range(9, 19)), list(range(10)), target.new_cache(10))
    ranks = true_ranks(perfect_cycle_heads(target), hidden, following_tokens(text, 4))
    assert ranks.tolist() == [[0 if t + d < 10 else -1 for d in range(1, 5)] for t in range(10)]
