"""The Target: trees, positions and limits, on toys whose answers are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import toys
from torch import Tensor

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target

CONTEXT = [3, 1, 4, 1, 5, 9]
# The tree of case 12: rows root, [0], [1], [0,0], [0,1], [1,0], and the token of each.
PARENTS = [-1, 0, 0, 1, 1, 2]
DEPTHS = [0, 1, 1, 2, 2, 2]
TOKENS = [2, 6, 5, 3, 7, 8]


def path_to(row: int) -> list[int]:
    return [*path_to(PARENTS[row]), row] if row >= 0 else []


def tree_mask() -> Tensor:
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for row in range(len(PARENTS)):
        mask[row, path_to(row)] = True
    return mask


def plain_logits(target: Target, ids: list[int]) -> Tensor:
    """[n, V] as transformers' own class computes them, without any cache."""
    return target.model(input_ids=torch.tensor([ids]).to(target.device)).logits[0].float()


def tree_logits(target: Target) -> Tensor:
    """[6, V] of the tree behind CONTEXT."""
    cache = target.new_cache(20)
    target.forward(CONTEXT, range(6), cache)
    cache.commit(range(6))
    positions = [6 + depth for depth in DEPTHS]
    return target.logits(target.forward(TOKENS, positions, cache, tree_mask()))


@pytest.fixture(scope="module")
def rand_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save_rand(tmp_path_factory.mktemp("models") / "rand")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_every_node_of_a_tree_has_the_logits_of_its_path(
    rand_folder: Path, attention: str, dtype: str, limit: float
) -> None:
    target = load_target(rand_folder, attention=attention, dtype=dtype)
    found = tree_logits(target)
    for row in range(len(PARENTS)):
        expected = plain_logits(target, CONTEXT + [TOKENS[r] for r in path_to(row)])[-1]
        assert (found[row] - expected).abs().max() < limit


def test_a_committed_path_continues_like_text_that_was_never_a_tree() -> None:
    target = toys.rand()
    cache = target.new_cache(20)
    target.forward(CONTEXT, range(6), cache)
    cache.commit(range(6))
    target.forward(TOKENS, [6 + depth for depth in DEPTHS], cache, tree_mask())
    cache.commit([0, 2, 5])
    assert cache.length == 9
    found = target.logits(target.forward([1], [9], cache))[0]
    expected = plain_logits(target, [*CONTEXT, 2, 5, 8, 1])[-1]
    assert (found - expected).abs().max() < 1e-4


def test_token_by_token_equals_all_at_once() -> None:
    target, ids = toys.rand(), [(7 * i) % 10 for i in range(40)]
    cache = target.new_cache(40)
    single = []
    for position, token in enumerate(ids):
        single.append(target.logits(target.forward([token], [position], cache))[0])
        cache.commit([0])
    assert (torch.stack(single) - plain_logits(target, ids)).abs().max() < 1e-4


def test_forward_does_not_advance_the_cache() -> None:
    target = toys.rand()
    cache = target.new_cache(8)
    first = target.forward([1, 2], [0, 1], cache)
    assert cache.length == 0
    assert torch.equal(first, target.forward([1, 2], [0, 1], cache))


def test_whole_texts_have_the_hidden_states_of_their_rows() -> None:
    target, ids = toys.rand(), torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    hidden = target.hidden_states(ids)
    assert hidden.shape == (2, 4, 32)
    short = target.hidden_states(ids[1:, :2])
    assert (hidden[1, :2] - short[0]).abs().max() < 1e-5


def test_cycle_always_says_the_next_number() -> None:
    target = toys.cycle()
    hidden = target.forward([63, 9], [0, 1], target.new_cache(4))
    logits = target.logits(hidden)
    assert logits.argmax(-1).tolist() == [0, 10]
    best, second = logits.topk(2).values[0].tolist()
    assert best - second == pytest.approx(160, abs=0.1)


def test_markov_says_its_table() -> None:
    target, table = toys.markov(), torch.from_numpy(toys.markov_table())
    assert table.sum(1).tolist() == pytest.approx([1.0] * 8)
    found = target.logits(target.forward(range(8), range(8), target.new_cache(8))).softmax(-1)
    assert (found - table).abs().max() < 1e-5


def test_tied_embeddings_serve_as_output_layer(tmp_path: Path) -> None:
    target = load_target(toys.save_rand(tmp_path, tie_word_embeddings=True))
    assert torch.equal(target.lm_head_weight, target.embedding_weight)
    found = target.logits(target.forward(CONTEXT, range(6), target.new_cache(6)))
    assert torch.equal(target.logits(target.embed(torch.tensor([3]))).argmax(-1), torch.tensor([3]))
    assert (found - plain_logits(target, CONTEXT)).abs().max() < 1e-5


def test_a_vocabulary_padded_beyond_the_tokenizer_is_kept_whole(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path, vocab_size=16)
    toys.word_tokenizer(10).save_pretrained(folder)
    target = load_target(folder)
    assert (target.vocab_size, len(target.tokenizer)) == (16, 10)
    assert target.logits(target.forward([15], [0], target.new_cache(1))).shape == (1, 16)


def test_ids_and_positions_outside_the_model_are_refused_before_any_work() -> None:
    target = toys.rand()
    cache = target.new_cache(200)
    with pytest.raises(ModelError, match="token id 10 is outside"):
        target.forward([1, 10], [0, 1], cache)
    with pytest.raises(ModelError, match="position 128 is outside"):
        target.forward([1], [128], cache)
    with pytest.raises(ModelError, match="position -1"):
        target.forward([1], [-1], cache)


def test_the_last_position_can_be_used() -> None:
    target = toys.rand()
    cache = target.new_cache(target.max_positions)
    target.forward([1] * 127, range(127), cache)
    cache.commit(range(127))
    target.forward([2], [127], cache)
    cache.commit([0])
    assert (cache.length, cache.room) == (128, 0)


def test_weights_are_frozen_and_hidden_states_can_feed_training() -> None:
    target = toys.rand()
    hidden = target.forward([1], [0], target.new_cache(1))
    probe = torch.nn.Linear(32, 1)
    probe(hidden).sum().backward()
    assert probe.weight.grad is not None
    assert not target.embedding_weight.requires_grad
