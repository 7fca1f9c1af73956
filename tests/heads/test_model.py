"""Heads compute what their definition says, alone or packed, step by step or at once."""

from __future__ import annotations

import pytest
import torch
import toys
from torch.nn.functional import linear, silu
from toy_heads import random_heads

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import RANK_CAP, Heads, HeadsConfig, HeadState

PATHS = torch.tensor([[1, 2], [3, 4], [5, 0]])


def test_a_hydra_head_is_its_definition_on_the_concatenated_input() -> None:
    target = toys.rand()
    heads = random_heads(target, n_layers=3, embed_scale=1.7)
    vector = torch.randn(32)
    head = heads.head(2)
    e = target.embedding_weight[PATHS] * 1.7
    x = torch.cat([vector.expand(3, -1), e[:, 0], e[:, 1]], dim=1)
    first, again = head.first, head.again
    y = linear(x, first.skip.weight, first.skip.bias)
    y = y + silu(linear(x, first.linear.weight, first.linear.bias))
    for _ in range(2):
        y = y + silu(linear(y, again.linear.weight, again.linear.bias))
    expected = y @ target.lm_head_weight.T
    torch.testing.assert_close(heads.level_logits(2, vector, PATHS), expected)


def test_a_medusa_head_does_not_look_at_the_path() -> None:
    heads = random_heads(toys.rand(), "medusa", own_projection=True)
    vector = torch.randn(32)
    rows = heads.level_logits(2, vector, PATHS)
    assert rows.shape[0] == 3
    assert torch.equal(rows[0], rows[2])
    ids, probs = heads.draft_level(2, vector, PATHS)
    assert ids.shape == probs.shape == (3, 10)


def test_the_prefix_layer_sees_the_same_in_pieces_as_at_once() -> None:
    heads = random_heads(toys.rand(), prefix=True)
    hidden, positions = torch.randn(9, 32), torch.arange(9)
    whole, pieces = HeadState(), HeadState()
    heads.observe(whole, hidden, positions)
    for start, end in ((0, 4), (4, 5), (5, 9)):
        heads.observe(pieces, hidden[start:end], positions[start:end])
    torch.testing.assert_close(pieces.vector, whole.vector)


def test_the_prefix_layer_is_causal_and_uses_positions() -> None:
    heads = random_heads(toys.rand(), prefix=True)
    hidden = torch.randn(1, 6, 32)
    changed = hidden.clone()
    changed[0, 4] += 1
    before, _ = heads.prefix(hidden, torch.arange(6))
    after, _ = heads.prefix(changed, torch.arange(6))
    torch.testing.assert_close(before[0, :4], after[0, :4])
    assert not torch.allclose(before[0, 5], after[0, 5])
    stretched, _ = heads.prefix(hidden, 3 * torch.arange(6))
    assert not torch.allclose(before[0, 5], stretched[0, 5])


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_packed_heads_draft_the_same_and_rows_do_not_depend_on_company(kind: str) -> None:
    heads = random_heads(toys.rand(), kind, n_layers=2, own_projection=kind == "medusa")
    vectors, paths = torch.randn(40, 32), torch.randint(0, 10, (40, 2))
    expected = heads.level_logits(2, vectors, paths)
    heads.pack()
    if not heads._packed:
        pytest.skip("this CPU has no packed kernels")
    together = heads.level_logits(2, vectors, paths)
    torch.testing.assert_close(together, expected, atol=0.02, rtol=0.01)
    for i in (0, 17, 39):
        alone = heads.level_logits(2, vectors[i], paths[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_probabilities_are_made_only_where_they_are_wanted(kind: str) -> None:
    heads, vector = random_heads(toys.rand(), kind), torch.randn(32)
    ids, probs = heads.draft_level(2, vector, PATHS)
    torch.testing.assert_close(probs.sum(1), torch.ones(3))  # all of ten tokens
    for n in (0, 1):
        some_ids, some = heads.draft_level(2, vector, PATHS, n)
        assert torch.equal(some_ids, ids)
        assert len(some) >= n
        assert torch.equal(some[:n], probs[:n])


def test_a_draft_vocabulary_maps_to_target_ids() -> None:
    heads = random_heads(toys.rand(), draft_ids=[2, 5, 7])
    ids, probs = heads.draft_level(1, torch.randn(32), torch.tensor([[1]]))
    assert sorted(ids[0].tolist()) == [2, 5, 7]
    assert probs[0].sum() == pytest.approx(1)
    assert heads.n_ranks == 3


def test_ranks_are_capped() -> None:
    config = HeadsConfig("medusa", 1, 4, 50, own_projection=True)
    heads = Heads(config, torch.randn(50, 4), torch.randn(50, 4))
    assert heads.n_ranks == RANK_CAP
    assert heads.top(torch.randn(2, 50))[0].shape == (2, RANK_CAP)


def test_an_architecture_survives_json() -> None:
    config = random_heads(toys.rand(), prefix=True, draft_ids=[1, 2, 3]).config
    assert HeadsConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("values", [{"kind": "eagle"}, {"n_heads": 0}, {"n_layers": 0}])
def test_an_impossible_architecture_is_refused(values: dict) -> None:
    facts = {"kind": "hydra", "n_heads": 2, "hidden_size": 8, "vocab_size": 9, **values}
    with pytest.raises(HeadsError):
        HeadsConfig(**facts)
