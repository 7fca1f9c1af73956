"""The transformers forward with static shapes on CUDA: a step's pass is one recorded graph.

Launching a pass kernel by kernel takes the host longer than the device needs to run it. So passes
of each number of rows are recorded once and replayed: tokens, depths, mask and the committed length
are inputs in memory, keys and values go to rows that are computed on the device, and attention runs
over a padded number of columns. Switching trees is replaying another graph, or the same one with
another mask. Prompts run as they do in the engine that this one is built on. It knows no trees, no
heads and no sampling.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.facts import position_limit
from entmtp_calib.targets.graphs import USUAL_ROWS, Recorder, Recordings, Sizes, Slot, Slots
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.verify import Verified


def why_not_graphed(model: Any) -> str | None:
    """What keeps the graphed engine from serving this transformers model; None if it can."""
    if model.device.type != "cuda":
        return f"it runs on cuda, not {model.device.type}"
    return None


class GraphedEngine(TransformersEngine):
    """A transformers engine whose steps are recorded.

    Args:
        model: a transformers causal language model.
        record: what records the passes.
        sizes: the numbers of columns that they are padded to.
    """

    name = "graphed"

    def __init__(self, model: Any, record: Recorder, sizes: Sizes | None = None) -> None:
        super().__init__(model)
        self.recorder = record
        self._sizes = sizes or Sizes()
        self._slots, self._recordings = Slots(), Recordings(record, "the target")
        positions, _ = position_limit(model.config, windows=True)
        self._usual_rows = min(positions + self._sizes.margin, USUAL_ROWS)

    def verify(
        self, ids: Tensor, depths: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Verified:
        """One replay; the results are overwritten by the next pass of as many rows."""
        if len(ids) > cache.room:
            raise ValueError(f"{len(ids)} rows in a cache with room for {cache.room}")
        columns = self._sizes.holding(cache.length + len(ids))
        recorded = self._pass(cache, len(ids), columns)
        if recorded is None:
            return super().verify(ids, depths, cache, mask)
        return recorded(ids, depths, mask, cache.length)

    def prepare(self, cache: TreeCache, rows: Iterable[int], first: int, last: int) -> None:
        """Record the passes that a text may need."""
        for n_rows in rows:
            for columns in self._sizes.between(first + n_rows, last + n_rows):
                self._pass(cache, n_rows, columns)

    def _pass(self, cache: TreeCache, n_rows: int, columns: int) -> _Pass | None:
        """The recording for so many rows and columns in the cache's slot; None without graphs."""
        found = self._slots.of(cache) or self._recordings.attempt(lambda: self._lend(cache))
        if found is None:
            return None
        slot, columns = found, min(columns, found.rows)

        def build(record: Recorder) -> _Pass:
            return _Pass(self, slot, n_rows, columns, cache.length, record)

        recorded: _Pass | None = self._recordings.get(slot.recordings, (n_rows, columns), build)
        return recorded

    def _lend(self, cache: TreeCache) -> Slot:
        """A slot for a cache, which moves into it."""
        rows = self._sizes.holding(max(cache.capacity, self._usual_rows))
        slot = self._slots.lend(cache, rows, *self._one_row)
        cache.move(slot.store)
        return slot

    @cached_property
    def _one_row(self) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, kv_heads, 1, head_dim] of some token."""
        rows: list[tuple[Tensor, Tensor]] = []

        def keep(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            rows.append((keys[0], values[0]))
            return keys, values

        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        self._run(token, token, None, keep, 0)
        keys, values = zip(*rows, strict=True)
        return torch.stack(keys), torch.stack(values)

    def _attention_mask(self, allowed: Tensor) -> Tensor:
        """Additive for every attention: sdpa would make a boolean one so again in each layer."""
        dtype = self.model.dtype
        additive = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return additive.masked_fill_(~allowed, torch.finfo(dtype).min)


class _Pass:
    """A recorded pass of n rows over so many columns of a slot.

    Args:
        engine: whose pass.
        length: committed rows at the time of recording; what stands behind them is overwritten.
    """

    def __init__(
        self,
        engine: GraphedEngine,
        slot: Slot,
        n_rows: int,
        columns: int,
        length: int,
        record: Recorder,
    ) -> None:
        self._engine, self._slot = engine, slot
        device = slot.keys.device
        self._ids = torch.zeros(n_rows, dtype=torch.long, device=device)
        self._depths = torch.zeros_like(self._ids)
        self._length = torch.full((), length, device=device)
        self._causal = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device).tril()
        self._mask = self._causal.clone()
        self._rows = torch.arange(n_rows, device=device)
        self._columns = torch.arange(columns, device=device)
        self._shape_of: tuple[Tensor, Tensor | None] | None = None
        self._made, self._replay = record(self._work)

    def __call__(self, ids: Tensor, depths: Tensor, mask: Tensor | None, length: int) -> Verified:
        """What the pass gives for these inputs, in memory that the next call overwrites."""
        self._ids.copy_(ids)
        self._length.fill_(length)
        # A tree's own tensors never change, so the same tree again needs no copies.
        if (
            self._shape_of is None
            or self._shape_of[0] is not depths
            or self._shape_of[1] is not mask
        ):
            self._depths.copy_(depths)
            self._mask.copy_(self._causal if mask is None else mask)
            self._shape_of = (depths, mask)
        self._replay()
        return self._made

    def _work(self) -> Verified:
        n_rows, n_columns = len(self._rows), len(self._columns)
        written = self._rows + self._length
        behind = self._columns - self._length  # which of the pass's rows a column belongs to
        own = self._mask.index_select(1, behind.clamp(0, n_rows - 1))
        allowed = (behind < 0) | ((behind < n_rows) & own & (behind >= 0))
        positions = self._depths + self._length
        # Of columns behind the rows' own, which nobody sees, any position will do.
        new = positions.index_select(0, behind.clamp(0, n_rows - 1))
        at = torch.where(behind < 0, self._columns, new)

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            stores = self._slot.keys[layer], self._slot.values[layer]
            for store, new in zip(stores, (keys, values), strict=True):
                store.index_copy_(1, written, new[0])
            all_keys, all_values = (store[None, :, :n_columns] for store in stores)
            return all_keys, all_values

        hidden = self._engine._run(
            self._ids[None],
            positions[None],
            self._engine._masks(allowed[None, None], positions[None], at),
            write,
            n_columns - n_rows,  # a wrong length, were a family to use it, shows in the self-check
        )[0]
        return Verified.of(self._ids, hidden, self._engine.logits(hidden))
