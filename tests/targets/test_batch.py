"""BatchCache: sequences side by side; and a batched pass that is the pass of each sequence."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.packed import can_pack

ENGINES = ["transformers", *(["lean"] if can_pack() else [])]
TEXTS = [(3, 1, 4, 1, 5), (9,), (2, 6, 5, 3), (5, 8)]
NEXT = [7, 0, 2, 4]


def row(*values: float) -> Tensor:
    """[B, 2 heads, 3 dims], sequence b filled with values[b]."""
    return torch.tensor(values)[:, None, None].expand(-1, 2, 3)


def written(cache: BatchCache, layer: int = 0) -> list[list[float]]:
    """The committed rows of every sequence, one number each."""
    keys, values = cache.storage(layer, row(0.0), row(0.0))
    assert torch.equal(keys, -values)
    return [keys[b, 0, :n, 0].tolist() for b, n in enumerate(cache.lengths)]


def filled(*lengths: int) -> BatchCache:
    """Sequence b holds b.0, b.1, ... in both layers."""
    cache = BatchCache(n_layers=2, capacity=10, n_sequences=len(lengths))
    for b, length in enumerate(lengths):
        rows = (b + torch.arange(length) / 10)[None, :, None].expand(2, -1, 3)
        one = cache.of(b)
        for layer in range(2):
            one.write(layer, rows, -rows)
        one.commit(range(length))
    return cache


def test_a_sequence_is_a_cache_of_its_own_in_shared_memory() -> None:
    cache = filled(2, 0, 1)
    assert cache.lengths == [2, 0, 1]
    assert written(cache, layer=1) == [[0.0, pytest.approx(0.1)], [], [2.0]]
    one = cache.of(0)
    assert (one.length, one.capacity, one.room) == (2, 10, 8)
    one.reset()
    assert cache.lengths == [0, 0, 1]


def test_storage_is_zero_and_has_whole_blocks_of_rows() -> None:
    cache = BatchCache(n_layers=3, capacity=65, n_sequences=2)
    assert cache.n_bytes == 0
    keys, values = cache.storage(2, row(1.0, 1.0), row(1.0, 1.0)[..., :1])
    assert (keys.shape, values.shape) == ((2, 2, 128, 3), (2, 2, 128, 1))
    assert not keys.any()
    assert cache.n_bytes == 3 * 2 * 2 * 128 * (3 + 1) * 4


def test_ended_sequences_leave_and_the_others_are_numbered_anew() -> None:
    cache = filled(1, 2, 3, 2)
    memory = cache.n_bytes
    cache.keep([0, 3, 2])
    assert cache.lengths == [1, 2, 3]
    assert written(cache, layer=1) == [
        [0.0],
        [3.0, pytest.approx(3.1)],
        [2.0, pytest.approx(2.1), pytest.approx(2.2)],
    ]
    cache.commit()
    assert cache.lengths == [2, 3, 4]
    cache.keep([2])
    assert (cache.n_sequences, cache.n_bytes) == (1, memory)


@pytest.mark.parametrize("sequences", [[1, 0], [0, 0], [3], [0, 3]])
def test_sequences_that_would_be_overwritten_or_do_not_exist_are_refused(
    sequences: list[int],
) -> None:
    with pytest.raises(ValueError, match="of 3 cannot be kept"):
        filled(1, 1, 1).keep(sequences)


def test_rows_of_a_sequence_follow_each_other() -> None:
    with pytest.raises(ValueError, match="do not follow"):
        filled(1, 1).of(0).commit([1])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_cache_for_nothing_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot hold anything"):
        BatchCache(*sizes)


@pytest.fixture(scope="module", params=ENGINES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(toys.save_rand(tmp_path_factory.mktemp("rand")), engine=request.param)


def prefilled(target: Target) -> BatchCache:
    cache = BatchCache(target.n_layers, 20, len(TEXTS))
    for b, ids in enumerate(TEXTS):
        one = cache.of(b)
        target.forward(ids, range(len(ids)), one)
        one.commit(range(len(ids)))
    return cache


def alone(target: Target, ids: list[int]) -> Tensor:
    """The last row of a text after its own pass and one token."""
    cache = target.new_cache(20)
    target.forward(ids[:-1], range(len(ids) - 1), cache)
    cache.commit(range(len(ids) - 1))
    return target.forward(ids[-1:], [len(ids) - 1], cache)[0]


def assert_same(target: Target, found: Tensor, expected: Tensor) -> None:
    """Bit for bit where the engine promises it."""
    if target.engine == "lean":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_batched_pass_is_the_pass_of_each_sequence(target: Target) -> None:
    cache = prefilled(target)
    hidden = target.forward_batch(NEXT, cache.lengths, cache)
    assert cache.lengths == [len(ids) for ids in TEXTS]
    for b, ids in enumerate(TEXTS):
        assert_same(target, hidden[b], alone(target, [*ids, NEXT[b]]))


def test_sequences_go_on_after_others_have_left(target: Target) -> None:
    cache = prefilled(target)
    target.forward_batch(NEXT, cache.lengths, cache)
    cache.commit()
    cache.keep([3, 1])
    hidden = target.forward_batch([6, 1], cache.lengths, cache)
    for row, (b, token) in enumerate([(3, 6), (1, 1)]):
        assert_same(target, hidden[row], alone(target, [*TEXTS[b], NEXT[b], token]))


def test_a_sequence_that_begins_anew_sees_nothing_of_the_one_before(target: Target) -> None:
    cache = prefilled(target)
    one = cache.of(0)
    one.reset()
    target.forward([8, 8], range(2), one)
    one.commit(range(2))
    hidden = target.forward_batch(NEXT, cache.lengths, cache)
    assert_same(target, hidden[0], alone(target, [8, 8, NEXT[0]]))


def test_a_position_outside_the_cache_is_one_line(target: Target) -> None:
    with pytest.raises(ModelError, match="position 20 is outside"):
        target.forward_batch([1], [20], BatchCache(target.n_layers, 20, 1))


def test_a_position_takes_the_memory_of_its_keys_and_values(target: Target) -> None:
    assert target.row_bytes == 2 * 2 * 2 * 8 * 4  # layers, keys and values, kv_heads, head_dim
