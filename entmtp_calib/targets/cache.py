"""Keys and values of one sequence, preallocated, with rows that can be tried and taken back.

A forward writes the keys and values of its rows behind the committed ones and commits nothing;
`commit` then gathers the accepted rows to the front, so a rejected draft costs no copy and nothing
is ever recomputed. It does not know which model writes, what a tree is, or why rows were accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from entmtp_calib.transfer import send_index

SPARE_ROWS = 16
"""Rows that storage has at least beyond the capacity: an engine may read over so many more."""

_ROW_MULTIPLE = 64


def stored_rows(capacity: int) -> int:
    """Rows that storage has for a capacity."""
    return -(-(capacity + SPARE_ROWS) // _ROW_MULTIPLE) * _ROW_MULTIPLE


def empty_store(shape: Sequence[int], keys: Tensor, values: Tensor) -> Tensor:
    """Zeros [*shape, key_dim + value_dim] for such keys and values."""
    return keys.new_zeros((*shape, keys.shape[-1] + values.shape[-1]))


def parted(store: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values in a store, for keys of this width."""
    return store[..., : keys.shape[-1]], store[..., keys.shape[-1] :]


class TreeCache:
    """Committed rows `0 .. length`, then room for the rows of one step.

    Storage is one tensor [layers, kv_heads, rows, key_dim + value_dim], keys and values of a row
    side by side, made at the first write because only the model knows its shapes. It begins as
    zeros and has `stored_rows`, so an engine may read a little further than what was written.

    Args:
        n_layers: attention layers that write.
        capacity: most rows, committed and tried together.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        if n_layers < 1 or capacity < 1:
            raise ValueError(
                f"a cache of {n_layers} layers and {capacity} rows cannot hold anything"
            )
        self.n_layers = n_layers
        self.capacity = capacity
        self.length = 0
        self._store: Tensor | None = None

    @property
    def room(self) -> int:
        """Rows that can be tried now."""
        return self.capacity - self.length

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store n tried rows behind the committed ones; views of everything up to them.

        Args:
            layer: index of the attention layer.
            keys: [kv_heads, n, key_dim].
            values: [kv_heads, n, value_dim].

        Returns:
            keys [kv_heads, length + n, key_dim] and values likewise, without a copy.
        """
        end = self.length + keys.shape[1]
        all_keys, all_values = self.storage(layer, keys, values)
        if end > self.capacity:
            raise ValueError(f"{end} rows in a cache of {self.capacity}")
        all_keys[:, self.length : end] = keys
        all_values[:, self.length : end] = values
        return all_keys[:, :end], all_values[:, :end]

    def storage(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's tensors [kv_heads, rows, head_dim], shaped like the first rows written."""
        return parted(self.store(keys, values)[layer], keys)

    def store(self, keys: Tensor, values: Tensor) -> Tensor:
        """All layers' keys and values [layers, kv_heads, rows, key_dim + value_dim]."""
        if self._store is None:
            heads, _, _ = keys.shape
            shape = (self.n_layers, heads, stored_rows(self.capacity))
            self._store = empty_store(shape, keys, values)
        return self._store

    def move(self, store: Tensor) -> None:
        """Lie in this tensor [layers, kv_heads, rows >= capacity, both dims] from now on."""
        if self._store is not None:
            store[:, :, : self.length] = self._store[:, :, : self.length]
        self._store = store

    def commit(self, rows: Sequence[int] | Tensor) -> None:
        """Keep the given tried rows, in this order, and drop the others.

        Args:
            rows: row indices of the last forward, rising, for example [0, 2, 5].
        """
        kept = [int(row) for row in rows]
        if any(later <= earlier for earlier, later in itertools.pairwise(kept)):
            raise ValueError(f"rows to commit must rise: {kept}")
        if kept and not 0 <= kept[0] <= kept[-1] < self.capacity - self.length:
            raise ValueError(f"rows {kept} lie outside a cache of {self.capacity} rows")
        in_place = sum(row == index for index, row in enumerate(kept))
        if in_place < len(kept):
            self._gather(kept[in_place:], self.length + in_place)
        self.length += len(kept)

    def reset(self) -> None:
        """Forget every row; keep the memory."""
        self.length = 0

    def _gather(self, rows: list[int], start: int) -> None:
        if self._store is None:
            raise ValueError("nothing was written to this cache")
        source = send_index([self.length + row for row in rows], self._store.device)
        self._store[:, :, start : start + len(rows)] = self._store.index_select(2, source)
