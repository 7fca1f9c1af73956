"""Attention of a few rows over cached keys, in which no row's rounding depends on the others.

A token computed alone, in a prompt, as a node of a tree or beside other texts gets the same bits:
scores are sums over head_dim only; the softmax's sum is taken in float64; and the sum over keys is
cut where the *position* crosses a multiple of 128, never elsewhere, so masked columns in between
add exact zeros within one sum. Grouped keys are never repeated. This module knows no weights, no
models and no trees: only positions and a mask.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from entmtp_calib.targets.cache import SPARE_ROWS
from entmtp_calib.targets.packed import pad, stable_rows

# No `from __future__ import annotations` here: TorchScript reads them.

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


class Pass(NamedTuple):
    """What all layers of a pass share: m computed rows, `texts * rows` of which attend.

    Attributes:
        rotary: complex [m, heads + kv_heads, head_dim / 2].
        texts, rows: texts side by side, and rows of each.
        new_rows: of the m, those whose keys and values are kept.
        places: int64 [new_rows * kv_heads], where they go in a layer's flat store.
        start: columns before `mask`'s.
        mask: additive [texts or 1, 1, rows, 1, columns - start]; None where every column is seen.
        widths: columns of each sum over keys.
        queries: as many a matrix product must have at least, see `stable_queries`.
    """

    rotary: Tensor
    texts: int
    rows: int
    new_rows: int
    places: Tensor
    start: int
    mask: Tensor | None
    widths: list[int]
    queries: int


class Views(NamedTuple):
    """What a pass writes and sees of each layer's store, with g = texts * kv_heads.

    The views of all layers are taken at once, which is cheaper than layer by layer.

    Attributes:
        keys, values: per layer, the flat store [all rows, head_dim].
        seen: per layer, the keys [g, head_dim, columns].
        sums: per layer, the values of each sum [g, width, head_dim].
    """

    keys: list[Tensor]
    values: list[Tensor]
    seen: list[Tensor]
    sums: list[list[Tensor]]


def rows_pass(
    shape: AttentionShape,
    rotary: Tensor,
    positions: list[int],
    start: int,
    mask: Tensor | None,
    stores: Stores,
) -> tuple[Pass, Views]:
    """n rows that follow `start` committed ones of one text.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + kv_heads, head_dim / 2]; m - n rows are padding.
        positions: n absolute positions; column c < start holds position c.
        start: rows of the cache before these.
        mask: bool [n, n], row sees new row; None = causal.
        stores: [layers, kv_heads, rows, head_dim] each.
    """
    n, m, stored = len(positions), len(rotary), stores[0].shape[2]
    cuts = _cuts(positions, start)
    heads = torch.arange(shape.kv_heads) * stored
    places = (torch.arange(start, start + n)[:, None] + heads).flatten()
    additive = _additive(mask, n, m, cuts[-1] - start)
    queries = _least_queries(shape.kv_heads)
    step = Pass(rotary, 1, m, n, places, start, additive, _widths(cuts), queries)
    return step, _views(*stores, cuts)


def texts_pass(
    shape: AttentionShape, rotary: Tensor, positions: Tensor, stores: Stores
) -> tuple[Pass, Views]:
    """One row of each of B texts, which sees all of its own text.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + kv_heads, head_dim / 2]; m - B rows are padding.
        positions: [B] absolute positions; column c of a text holds its position c.
        stores: [layers, B, kv_heads, rows, head_dim] each.
    """
    n, stored = len(positions), stores[0].shape[3]
    last = int(positions.max())
    cuts = _cuts([last], last)
    heads = torch.arange(n * shape.kv_heads).view(n, -1) * stored
    places = (positions[:, None] + heads).flatten()
    beyond = torch.arange(cuts[-1]) > positions[:, None]
    mask = torch.zeros(n, 1, 1, 1, cuts[-1])
    mask.masked_fill_(beyond[:, None, None, None], float("-inf"))
    queries = _least_queries(n * shape.kv_heads)
    step = Pass(rotary, n, 1, n, places, 0, mask, _widths(cuts), queries)
    keys, values = (store.flatten(1, 2) for store in stores)
    return step, _views(keys, values, cuts)


def row_blocks(
    shape: AttentionShape,
    rotary: Rotary,
    positions: Tensor,
    start: int,
    mask: Tensor | None,
    stores: Stores,
) -> Iterator[tuple[slice, Pass, Views]]:
    """Rows in blocks, to bound the memory that a long text takes; a masked pass is one block.

    Args:
        shape: of the attention.
        rotary: of the model.
        positions: [n] absolute positions.
        start: rows of the cache before these.
        mask: bool [n, n], or None = causal.
        stores: see `rows_pass`.
    """
    size = len(positions) if mask is not None else _BLOCK_ROWS
    for begin in range(0, len(positions), size):
        rows = slice(begin, begin + size)
        at = positions[rows]
        yield rows, *rows_pass(shape, rotary(at), at.tolist(), start + begin, mask, stores)


def _views(keys: Tensor, values: Tensor, cuts: list[int]) -> Views:
    """Of stores [layers, g, rows, head_dim]."""
    bounds = itertools.pairwise(cuts)
    sums = zip(*(values[:, :, begin:end].unbind() for begin, end in bounds), strict=True)
    return Views(
        list(keys.flatten(1, 2).unbind()),
        list(values.flatten(1, 2).unbind()),
        list(keys[:, :, : cuts[-1]].transpose(2, 3).unbind()),
        [list(parts) for parts in sums],
    )


def _widths(cuts: list[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def _least_queries(groups: int) -> int:
    # With as many groups as threads or more, each thread has whole groups.
    return stable_queries(min(groups, torch.get_num_threads()))


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
    """[1, 1, m, 1, columns]: 0 where a row sees a new column, else -inf; padding sees as row 0."""
    if n_rows == 1 and columns == 1:
        return None
    allowed = torch.zeros(n_padded, columns, dtype=torch.bool)
    own = torch.ones(n_rows, n_rows, dtype=torch.bool).tril() if mask is None else mask
    allowed[:n_rows, :n_rows] = own
    allowed[n_rows:] = allowed[0]
    additive = torch.zeros(1, 1, n_padded, 1, columns)
    return additive.masked_fill_(~allowed[:, None], float("-inf"))
