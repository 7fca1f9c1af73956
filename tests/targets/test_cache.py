"""TreeCache: try rows, keep some, forget the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entmtp_calib.targets.cache import TreeCache


def rows(*values: float) -> Tensor:
    """[2 heads, n, 3 dims] with row i filled with values[i]."""
    return torch.tensor(values)[None, :, None].expand(2, -1, 3)


def written(cache: TreeCache, layer: int = 0) -> list[float]:
    """The committed rows of one layer, one number each."""
    keys, values = cache.storage(layer, rows(0.0), rows(0.0))
    assert torch.equal(keys, -values)
    return keys[0, : cache.length, 0].tolist()


def test_rows_are_tried_behind_the_committed_ones_and_only_commit_counts() -> None:
    cache = TreeCache(n_layers=2, capacity=8)
    for layer in range(2):
        keys, values = cache.write(layer, rows(1.0, 2.0), -rows(1.0, 2.0))
        assert keys.shape == values.shape == (2, 2, 3)
    assert cache.length == 0
    cache.commit(range(2))
    keys, _ = cache.write(0, rows(3.0), -rows(3.0))
    assert keys[0, :, 0].tolist() == [1.0, 2.0, 3.0]


def test_commit_gathers_the_accepted_rows_in_every_layer() -> None:
    cache = TreeCache(n_layers=2, capacity=10)
    for layer in range(2):
        cache.write(layer, rows(0.0, 1.0, 2.0), -rows(0.0, 1.0, 2.0))
    cache.commit([0, 1, 2])
    for layer in range(2):
        cache.write(layer, rows(*range(10, 16)), -rows(*range(10, 16)))
    cache.commit(torch.tensor([0, 2, 5]))
    assert cache.length == 6
    assert [written(cache, layer) for layer in range(2)] == [[0, 1, 2, 10, 12, 15]] * 2


def test_committing_nothing_keeps_everything_as_it_was() -> None:
    cache = TreeCache(n_layers=1, capacity=4)
    cache.write(0, rows(1.0), -rows(1.0))
    cache.commit([0])
    cache.write(0, rows(5.0, 6.0), -rows(5.0, 6.0))
    cache.commit([])
    assert written(cache) == [1.0]


def test_reset_forgets_rows_and_keeps_the_memory() -> None:
    cache = TreeCache(n_layers=1, capacity=4)
    cache.write(0, rows(1.0, 2.0), -rows(1.0, 2.0))
    cache.commit([0, 1])
    before = cache.storage(0, rows(0.0), rows(0.0))[0].data_ptr()
    cache.reset()
    assert (cache.length, cache.room) == (0, 4)
    assert cache.storage(0, rows(0.0), rows(0.0))[0].data_ptr() == before


def test_a_write_beyond_capacity_is_refused() -> None:
    cache = TreeCache(n_layers=1, capacity=2)
    cache.write(0, rows(1.0, 2.0), -rows(1.0, 2.0))
    cache.commit([0, 1])
    with pytest.raises(ValueError, match="3 rows in a cache of 2"):
        cache.write(0, rows(3.0), -rows(3.0))


@pytest.mark.parametrize("kept", [[1, 0], [0, 0], [-1], [4]])
def test_rows_to_commit_must_rise_and_lie_inside(kept: list[int]) -> None:
    cache = TreeCache(n_layers=1, capacity=4)
    cache.write(0, rows(1.0, 2.0), -rows(1.0, 2.0))
    with pytest.raises(ValueError, match="rows"):
        cache.commit(kept)
