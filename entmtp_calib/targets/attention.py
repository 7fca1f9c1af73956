"""Attention of a few rows over cached keys, in which no row's rounding depends on the others.

A token computed alone, in a prompt, as a node of a tree or beside other texts gets the same bits:
scores are sums over head_dim only; the softmax's sum is taken in float64; and the sum over keys is
cut where the *position* crosses a multiple of 128, never elsewhere, so masked columns in between
add exact zeros within one sum. Grouped keys are never repeated. This module knows no weights, no
models and no trees: only positions and a mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp_calib.targets.cache import SPARE_ROWS
from entmtp_calib.targets.packed import pad, stable_rows

Attend = Callable[[Tensor], Tensor]
"""Queries, keys and values side by side, [m, (heads + 2 kv_heads) * head_dim], to the mixed values
[m, heads * head_dim]. Rotation happens in place."""

Stores = tuple[Tensor, Tensor]
"""Keys and values of all layers, each [layers, ..., kv_heads, rows, head_dim]."""

_BLOCK_ROWS = 128
_SUM_POSITIONS = 128
_MEASURED_QUERIES = 64
_MEASURED_COLUMNS = (16, 64, 200)


@dataclass(frozen=True)
class AttentionShape:
    """Widths shared by all layers."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query_width(self) -> int:
        """heads * head_dim"""
        return self.heads * self.head_dim

    @property
    def rotary_heads(self) -> int:
        """Heads that are rotated: queries' and keys'."""
        return self.heads + self.kv_heads

    @property
    def rotary_width(self) -> int:
        """rotary_heads * head_dim"""
        return self.rotary_heads * self.head_dim


class Rotary:
    """Rotary embeddings (Su et al. 2021) with angles that depend on the position alone.

    Args:
        shape: of the attention.
        frequencies: [head_dim / 2] radians per position.
        turn_scale: factor on queries and keys that some rope scalings have.
        score_scale: factor on the scores; queries carry it.
    """

    def __init__(
        self, shape: AttentionShape, frequencies: Tensor, turn_scale: float, score_scale: float
    ) -> None:
        self._frequencies, self._turn_scale = frequencies.float(), turn_scale
        scale = torch.ones(shape.rotary_heads)
        scale[: shape.heads] = score_scale
        self._scale = scale[:, None]

    def __call__(self, positions: Tensor) -> Tensor:
        """Positions [n] -> complex [m, heads + kv_heads, head_dim / 2], m stable rows for n."""
        positions = pad(positions, stable_rows(len(positions)))
        angles = positions[:, None].float() * self._frequencies
        turns = torch.complex(angles.cos(), angles.sin()) * self._turn_scale
        return turns[:, None] * self._scale


class RowsAttention:
    """n rows that follow `start` committed ones of one text; m - n more are padding.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + kv_heads, head_dim / 2].
        positions: n absolute positions; column c < start holds position c.
        start: rows of the cache before these.
        mask: bool [n, n], row sees new row; None = causal.
        stores: [layers, kv_heads, rows, head_dim] each; the n new rows are written to them.
    """

    def __init__(
        self,
        shape: AttentionShape,
        rotary: Tensor,
        positions: list[int],
        start: int,
        mask: Tensor | None,
        stores: Stores,
    ) -> None:
        self._shape, self._rotary, self._start = shape, rotary, start
        self._n_rows = len(positions)
        cuts = _cuts(positions, start)
        self._mask = _additive(mask, self._n_rows, len(rotary), cuts[-1] - start)
        self._columns = _Columns(*stores, cuts)
        rows = slice(start, start + self._n_rows)
        self._new = [store[:, :, rows].unbind() for store in stores]

    def __call__(self, layer: int, projected: Tensor) -> Tensor:
        """See `Attend`."""
        shape, n_all = self._shape, len(projected)
        _rotate(projected, self._rotary, shape)
        new = projected[: self._n_rows, shape.query_width :]
        new = new.view(self._n_rows, 2, shape.kv_heads, shape.head_dim).permute(1, 2, 0, 3)
        for store, rows in zip(self._new, new.unbind(), strict=True):
            store[layer].copy_(rows)
        queries = projected[:, : shape.query_width].view(n_all, shape.kv_heads, -1, shape.head_dim)
        queries = queries.transpose(0, 1).flatten(1, 2)
        n_queries = queries.shape[1]
        scores = self._columns.scores(layer, queries)
        if self._mask is not None:
            by_row = scores[:, :n_queries].unflatten(1, (n_all, -1))
            by_row[..., self._start :] += self._mask
        mixed = self._columns.mix(layer, scores)[:, :n_queries].unflatten(1, (n_all, -1))
        return mixed.transpose(0, 1).reshape(n_all, -1)


class TextsAttention:
    """One row of each of B texts, which sees all of its own text; rows beyond B are padding.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + kv_heads, head_dim / 2].
        positions: [B] absolute positions; column c of a text holds its position c.
        stores: [layers, B, kv_heads, rows, head_dim] each; a new row of each text is written.
    """

    def __init__(
        self, shape: AttentionShape, rotary: Tensor, positions: Tensor, stores: Stores
    ) -> None:
        self._shape, self._rotary, self._positions = shape, rotary, positions
        self._texts = torch.arange(len(positions))
        last = int(positions.max())
        cuts = _cuts([last], last)
        beyond = torch.arange(cuts[-1]) > positions[:, None]
        self._mask = torch.zeros(len(positions), 1, 1, cuts[-1])
        self._mask.masked_fill_(beyond[:, None, None], float("-inf"))
        self._stores = stores
        keys, values = stores
        self._columns = _Columns(keys.flatten(1, 2), values.flatten(1, 2), cuts)

    def __call__(self, layer: int, projected: Tensor) -> Tensor:
        """See `Attend`."""
        shape, n_texts = self._shape, len(self._texts)
        _rotate(projected, self._rotary, shape)
        new = projected[:n_texts, shape.query_width :]
        new = new.view(n_texts, 2, shape.kv_heads, shape.head_dim)
        for store, rows in zip(self._stores, new.unbind(1), strict=True):
            store[layer, self._texts, :, self._positions] = rows
        queries = projected[:n_texts, : shape.query_width]
        queries = queries.reshape(n_texts * shape.kv_heads, -1, shape.head_dim)
        scores = self._columns.scores(layer, queries)
        scores.unflatten(0, (n_texts, -1)).add_(self._mask)
        mixed = self._columns.mix(layer, scores)[:, : queries.shape[1]].reshape(n_texts, -1)
        return torch.cat([mixed, mixed[:1].expand(len(projected) - n_texts, -1)])


class _Columns:
    """What a pass sees of the keys and values of all layers, cut as its sums are.

    The views of all layers are taken at once, which is cheaper than layer by layer.

    Args:
        keys, values: [layers, g, rows, dim].
        cuts: column bounds of the sums over keys.
    """

    def __init__(self, keys: Tensor, values: Tensor, cuts: list[int]) -> None:
        bounds = list(itertools.pairwise(cuts))
        self._keys = keys[:, :, : cuts[-1]].transpose(2, 3).unbind()
        self._values = [values[:, :, begin:end].unbind() for begin, end in bounds]
        self._widths = [end - begin for begin, end in bounds]
        # With as many groups as threads or more, each thread has whole groups.
        self._queries = stable_queries(min(keys.shape[1], torch.get_num_threads()))

    def scores(self, layer: int, queries: Tensor) -> Tensor:
        """[g, R, columns] from queries [g, r, dim]; the last R - r rows are padding."""
        missing = self._queries - queries.shape[1]
        if missing > 0:
            queries = torch.cat([queries, queries[:, :1].expand(-1, missing, -1)], dim=1)
        return torch.bmm(queries, self._keys[layer])

    def mix(self, layer: int, scores: Tensor) -> Tensor:
        """Softmax of scores [g, r, columns] by the values -> [g, r, dim]; scores are lost."""
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        parts = weights.split(self._widths, dim=-1)
        mixed = torch.bmm(parts[0], self._values[0][layer])
        for part, values in zip(parts[1:], self._values[1:], strict=True):
            mixed.baddbmm_(part, values[layer])
        return mixed.div_(total.float())


def row_blocks(
    shape: AttentionShape,
    rotary: Rotary,
    positions: Tensor,
    start: int,
    mask: Tensor | None,
    stores: Stores,
) -> Iterator[tuple[slice, RowsAttention]]:
    """Rows in blocks, to bound the memory that a long text takes; a masked pass is one block.

    Args:
        shape: of the attention.
        rotary: of the model.
        positions: [n] absolute positions.
        start: rows of the cache before these.
        mask: bool [n, n], or None = causal.
        stores: see `RowsAttention`.
    """
    size = len(positions) if mask is not None else _BLOCK_ROWS
    for begin in range(0, len(positions), size):
        rows = slice(begin, begin + size)
        at = positions[rows]
        yield rows, RowsAttention(shape, rotary(at), at.tolist(), start + begin, mask, stores)


def _rotate(projected: Tensor, rotary: Tensor, shape: AttentionShape) -> None:
    """Turn queries and keys in place; the pairs that turn together are neighbors."""
    pairs = projected[:, : shape.rotary_width].view(*rotary.shape, 2)
    torch.view_as_complex(pairs).mul_(rotary)


@functools.cache
def stable_queries(n_groups: int) -> int:
    """Queries per group from which on each has the bits of a large batch: measured, not assumed.

    A matrix product of very few rows goes through other kernels, and so may the few that are left
    over for a thread where there are fewer groups than threads.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (n_groups, _MEASURED_QUERIES, 64)
    unstable = [0]
    for columns in _MEASURED_COLUMNS:
        queries = torch.randn(shape, generator=generator)
        keys = torch.randn(n_groups, columns, 64, generator=generator)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        mixed = torch.bmm(scores, keys)
        for n in range(1, _MEASURED_QUERIES):
            some = torch.bmm(queries[:, :n], keys.transpose(1, 2))
            if not torch.equal(some, scores[:, :n]) or not torch.equal(
                torch.bmm(scores[:, :n], keys), mixed[:, :n]
            ):
                unstable.append(n)
    return 1 + max(unstable)


def _cuts(positions: list[int], start: int) -> list[int]:
    """Column bounds of the sums over keys: 0, where positions cross multiples of 128, and the end.

    Column c < start holds position c; the columns after it hold `positions`, which never fall. The
    last sum reaches over at least `SPARE_ROWS` columns, seen or not: a shorter one would go through
    another kernel.
    """
    full = range(0, start + 1, _SUM_POSITIONS)
    crossings = [
        start + sum(position < bound for position in positions)
        for bound in range(full[-1] + _SUM_POSITIONS, max(positions) + 1, _SUM_POSITIONS)
    ]
    cuts = sorted({*full, *crossings} - {start + len(positions)})
    return [*cuts, max(start + len(positions), cuts[-1] + SPARE_ROWS)]


def _additive(mask: Tensor | None, n_rows: int, n_padded: int, columns: int) -> Tensor | None:
    """[m, 1, columns]: 0 where a row sees a new column, else -inf; padding sees what row 0 sees."""
    if n_rows == 1 and columns == 1:
        return None
    allowed = torch.zeros(n_padded, columns, dtype=torch.bool)
    own = torch.ones(n_rows, n_rows, dtype=torch.bool).tril() if mask is None else mask
    allowed[:n_rows, :n_rows] = own
    allowed[n_rows:] = allowed[0]
    return torch.zeros(n_padded, 1, columns).masked_fill_(~allowed[:, None], float("-inf"))
