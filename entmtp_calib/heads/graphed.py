"""Heads on CUDA as recorded graphs: a level of drafting per depth and number of parents, and the
prefix layer's step.

Both are many small kernels, which the host would launch more slowly than the device runs them. The
prefix layer always gets as many rows as a step can commit; those behind the real ones are written
over by the next step. This module knows no files, no trees and no targets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from entmtp_calib.heads.packing import Past
from entmtp_calib.heads.prefix import PrefixLayer
from entmtp_calib.targets.graphs import USUAL_ROWS, Recorder, Recordings, Sizes, Slot, Slots

Best = Callable[[int, Tensor, Tensor, int | None], tuple[Tensor, Tensor]]
"""(depth, vector [h], paths [R, depth], n_probs) -> ids and probabilities [R, k]."""


class HeadGraphs:
    """Recordings of a set of heads.

    Args:
        best: drafts a level.
        vector: [h], of the size, type and device of what drafting is conditioned on.
        prefix: the prefix layer, if any.
        most_rows: that a step can commit.
        record: what records.
        sizes: the numbers of columns that the prefix layer's attention is padded to.
    """

    def __init__(
        self,
        best: Best,
        vector: Tensor,
        prefix: PrefixLayer | None,
        most_rows: int,
        record: Recorder,
        sizes: Sizes | None = None,
    ) -> None:
        self._best, self._vector, self._prefix = best, vector, prefix
        self._most_rows, self._sizes = most_rows, sizes or Sizes()
        self._recordings = Recordings(record, "drafting")
        self._levels: dict[Hashable, Any] = {}
        self._slots = Slots()

    def best(
        self, depth: int, vector: Tensor, paths: Tensor, n_probs: int | None
    ) -> tuple[Tensor, Tensor]:
        """A level's best children; the next level of this depth and as many paths overwrites it."""
        recorded = self._level(depth, len(paths))
        if recorded is None:
            return self._best(depth, vector, paths, n_probs)
        return recorded(vector, paths)

    def prepare_levels(self, levels: Iterable[tuple[int, int]]) -> None:
        """Record levels, given by depth and number of parents."""
        for depth, parents in levels:
            self._level(depth, parents)

    def follow(
        self, borrower: object, hidden: Tensor, positions: Tensor, past: Past | None
    ) -> tuple[Tensor, Past]:
        """The prefix layer over new rows behind `past`: its output [n, h], and the past with them.

        Args:
            borrower: whose text it is; while it lives, its keys and values are its own.
            hidden: [n, h] the target's hidden states.
            positions: [n], those that follow the past.
            past: None at the start of a text.
        """
        length, n_rows = past.length if past else 0, len(hidden)
        slot = self._slot(borrower, length + max(n_rows, self._most_rows), past)
        recorded = self._step(slot, length) if n_rows <= self._most_rows else None
        if recorded is not None:
            out = recorded(hidden, length)
        else:
            assert self._prefix is not None
            seen = (slot.keys[:, :, :length], slot.values[:, :, :length])
            rows, (keys, values) = self._prefix(hidden[None], positions, seen)
            slot.keys[:, :, length : length + n_rows] = keys
            slot.values[:, :, length : length + n_rows] = values
            out = rows[0]
        return out, Past(slot.store[0], length + n_rows)

    def prepare_steps(self, borrower: object, first: int, last: int) -> None:
        """Record the prefix layer's steps behind `first` to `last` rows of a text to come."""
        if self._prefix is None:
            return
        slot = self._slot(borrower, last + self._most_rows, None)
        for columns in self._sizes.between(first + self._most_rows, last + self._most_rows):
            self._step(slot, columns - self._most_rows)

    def _level(self, depth: int, n_paths: int) -> _Level | None:
        def build(record: Recorder) -> _Level:
            return _Level(self._best, depth, n_paths, self._vector, record)

        recorded: _Level | None = self._recordings.get(self._levels, (depth, n_paths), build)
        return recorded

    def _slot(self, borrower: object, rows: int, past: Past | None) -> Slot:
        """The borrower's slot; a larger one takes over the past."""
        slot = self._slots.of(borrower)
        if slot is None or slot.rows < rows:
            assert self._prefix is not None
            shape = self._prefix.config
            like = self._vector.new_empty(1, shape.n_key_value_heads, 0, shape.head_dim)
            slot = self._slots.lend(
                borrower, self._sizes.holding(max(rows, USUAL_ROWS)), like, like
            )
            if past:
                slot.store[0, :, : past.length] = past.store[:, : past.length]
        return slot

    def _step(self, slot: Slot, length: int) -> _Step | None:
        """The recording for a step behind so many rows."""
        columns = self._sizes.holding(length + self._most_rows)

        def build(record: Recorder) -> _Step:
            assert self._prefix is not None
            hidden = self._vector.new_zeros(self._most_rows, len(self._vector))
            return _Step(self._prefix, slot, hidden, columns, length, record)

        recorded: _Step | None = self._recordings.get(slot.recordings, columns, build)
        return recorded


class _Level:
    """A recorded level: ids and probabilities [R, k] of R paths' children."""

    def __init__(
        self, best: Best, depth: int, n_paths: int, vector: Tensor, record: Recorder
    ) -> None:
        self._vector = torch.zeros_like(vector)
        self._paths = torch.zeros(n_paths, depth, dtype=torch.long, device=vector.device)
        self._made, self._replay = record(lambda: best(depth, self._vector, self._paths, None))

    def __call__(self, vector: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
        self._vector.copy_(vector)
        self._paths.copy_(paths)
        self._replay()
        return self._made


class _Step:
    """A recorded step of the prefix layer, over so many columns of a slot."""

    def __init__(
        self,
        prefix: PrefixLayer,
        slot: Slot,
        hidden: Tensor,
        columns: int,
        length: int,
        record: Recorder,
    ) -> None:
        self._prefix, self._slot, self._hidden = prefix, slot, hidden
        n_rows, device = len(hidden), hidden.device
        self._length = torch.full((), length, device=device)
        self._rows = torch.arange(n_rows, device=device)
        self._columns = torch.arange(columns, device=device)
        self._causal = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device).tril()
        self._made, self._replay = record(self._work)

    def __call__(self, hidden: Tensor, length: int) -> Tensor:
        """[n, h] for n rows, at most as many as were recorded."""
        self._hidden[: len(hidden)] = hidden
        self._length.fill_(length)
        self._replay()
        return self._made[: len(hidden)].clone()  # the next step must not change this one's

    def _work(self) -> Tensor:
        positions = self._rows + self._length
        seen = (self._columns < self._length).expand(len(self._rows), -1)
        keep = torch.cat([seen, self._causal], dim=1)[None, None]
        stores, n = (self._slot.keys, self._slot.values), len(self._columns)
        past = stores[0][:, :, :n], stores[1][:, :, :n]
        out, new = self._prefix(self._hidden[None], positions, past, keep)
        for store, rows in zip(stores, new, strict=True):
            store.index_copy_(2, positions, rows)
        return out[0]
