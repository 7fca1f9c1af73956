"""Keys and values of several sequences that grow side by side, preallocated.

Column c of a sequence holds its position c, so sequences of different lengths lie in one tensor and
a step writes one row of each. A sequence can be emptied and written anew, and the ended ones leave
without new memory. It does not know which model writes, or what the rows say.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from entmtp_calib.targets.cache import TreeCache, empty_store, parted, stored_rows


class BatchCache:
    """Committed rows `0 .. lengths[b]` of every sequence b, then room up to `capacity`.

    Storage is one tensor [layers, sequences, kv_heads, rows, key_dim + value_dim], zeros at first,
    made at the first write because only the model knows its shapes.

    Args:
        n_layers: attention layers that write.
        capacity: most rows of a sequence; storage has `stored_rows` of them.
        n_sequences: sequences, all of them empty.
    """

    def __init__(self, n_layers: int, capacity: int, n_sequences: int) -> None:
        if min(n_layers, capacity, n_sequences) < 1:
            raise ValueError(
                f"a cache of {n_layers} layers, {capacity} rows and {n_sequences} sequences"
                " cannot hold anything"
            )
        self.n_layers = n_layers
        self.capacity = capacity
        self.lengths = [0] * n_sequences
        self._store: Tensor | None = None

    @property
    def n_sequences(self) -> int:
        return len(self.lengths)

    @property
    def n_rows(self) -> int:
        """Rows of a sequence in memory."""
        return stored_rows(self.capacity)

    @property
    def n_bytes(self) -> int:
        """Memory held; 0 before the first write."""
        return 0 if self._store is None else self._store.nbytes

    def of(self, sequence: int) -> TreeCache:
        """One sequence as a cache of its own, with the same memory and length, until `keep`."""
        return _Sequence(self, sequence)

    def storage(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys [B, kv_heads, rows, key_dim], and its values likewise.

        Args:
            layer: index of the attention layer.
            keys: [any, kv_heads, key_dim], whose shape, dtype and device count at the first use.
            values: [any, kv_heads, value_dim].
        """
        return parted(self.store(keys, values)[layer], keys)

    def store(self, keys: Tensor, values: Tensor) -> Tensor:
        """All layers' tensor [layers, B, kv_heads, rows, key_dim + value_dim]; see `storage`."""
        if self._store is None:
            _, heads, _ = keys.shape
            shape = (self.n_layers, self.n_sequences, heads, self.n_rows)
            self._store = empty_store(shape, keys, values)
        return self._store[:, : self.n_sequences]

    def commit(self) -> None:
        """Every sequence has one row more."""
        self.lengths[:] = [length + 1 for length in self.lengths]

    def keep(self, sequences: Sequence[int]) -> None:
        """Keep these sequences, numbered anew in this order, and drop the others.

        Only those whose number changes are copied. Memory is kept.

        Args:
            sequences: distinct, each at least its new number, so that none is overwritten.
        """
        if len(set(sequences)) < len(sequences) or not all(
            new <= old < self.n_sequences for new, old in enumerate(sequences)
        ):
            raise ValueError(f"sequences {list(sequences)} of {self.n_sequences} cannot be kept")
        for new, old in enumerate(sequences):
            if new != old and self._store is not None:
                rows = slice(0, self.lengths[old])
                self._store[:, new, :, rows] = self._store[:, old, :, rows]
        self.lengths[:] = [self.lengths[old] for old in sequences]


class _Sequence(TreeCache):
    """A view of one sequence."""

    def __init__(self, batch: BatchCache, index: int) -> None:
        self._batch, self._index = batch, index
        length = self.length
        super().__init__(batch.n_layers, batch.capacity)  # makes it empty
        self.length = length

    @property
    def length(self) -> int:
        return self._batch.lengths[self._index]

    @length.setter
    def length(self, value: int) -> None:
        self._batch.lengths[self._index] = value

    def store(self, keys: Tensor, values: Tensor) -> Tensor:
        """All layers' tensor [layers, kv_heads, rows, key_dim + value_dim]."""
        store = self._batch.store(keys.transpose(0, 1), values.transpose(0, 1))
        return store[:, self._index]

    def _gather(self, rows: list[int], start: int) -> None:
        """A sequence of a batch grows row by row, in order."""
        raise ValueError(f"rows {rows} of a sequence in a batch do not follow its committed rows")
