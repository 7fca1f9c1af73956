"""Ranks of the true tokens, against one call per position."""

from __future__ import annotations

import torch
import toys
from toy_heads import perfect_cycle_heads, random_heads

from entmtp_calib.heads import ranking
from entmtp_calib.heads.ranking import following_tokens, greedy_chain, true_ranks

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


def test_a_chain_follows_its_own_choices() -> None:
    heads = random_heads(toys.rand())
    vectors, roots = torch.randn(2, 32), torch.tensor([4, 7])
    tokens, probs = greedy_chain(heads, vectors, roots)
    path = roots[1:2, None]
    for depth in range(1, 4):
        ids, p = heads.draft_level(depth, vectors[1], path)
        assert tokens[1, depth - 1] == ids[0, 0]
        torch.testing.assert_close(probs[1, depth - 1], p[0, 0])
        path = torch.cat([path, ids[:, :1]], dim=1)


def test_perfect_heads_rank_everything_first() -> None:
    target = toys.cycle()
    text = torch.arange(10, 20)
    hidden = target.forward(list(range(9, 19)), list(range(10)), target.new_cache(10))
    ranks = true_ranks(perfect_cycle_heads(target), hidden, following_tokens(text, 4))
    assert ranks.tolist() == [[0 if t + d < 10 else -1 for d in range(1, 5)] for t in range(10)]
