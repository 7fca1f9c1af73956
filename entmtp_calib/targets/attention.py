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
import torch.nn.functional as F
from torch import Tensor

from entmtp_calib.targets.cache import SPARE_ROWS
from entmtp_calib.targets.packed import pad, stable_rows

# No `from __future__ import annotations` here: TorchScript reads them.

_BLOCK_ROWS = 128
_KNOWN_POSITIONS = 1024
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
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads


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
        scale = torch.ones(shape.rotary_heads, 1)
        scale[: shape.heads] = score_scale
        self._scale = scale
        self._still = torch.ones(1, shape.kv_heads, len(frequencies), dtype=torch.complex64)
        self._turns = torch.zeros(0, len(frequencies), dtype=torch.complex64)

    def __call__(self, positions: list[int]) -> Tensor:
        """n positions -> complex [m, heads + 2 * kv_heads, head_dim / 2], m stable rows for n.

        The last heads, the values', do not turn: so rows are rotated whole.
        """
        count = stable_rows(len(positions))
        at = torch.tensor([*positions, *positions[:1] * (count - len(positions))])
        turns = self._known(max(positions) + 1)[at, None] * self._scale
        return torch.cat([turns, self._still.expand(count, -1, -1)], 1)

    def _known(self, n_positions: int) -> Tensor:
        """complex [at least so many positions, head_dim / 2]"""
        if len(self._turns) < n_positions:
            positions = torch.arange(-(-n_positions // _KNOWN_POSITIONS) * _KNOWN_POSITIONS)
            angles = positions[:, None].float() * self._frequencies
            self._turns = torch.complex(angles.cos(), angles.sin()) * self._turn_scale
        return self._turns


class Pass(NamedTuple):
    """What all layers of a pass share: m computed rows, `texts * rows` of which attend.

    Attributes:
        rotary: complex [m, heads + 2 * kv_heads, head_dim / 2].
        texts, rows: texts side by side, and rows of each.
        more_rows: of the m, those that do not attend.
        places: int64 [m * kv_heads], where keys and values go in a layer's flat store; a row of
            padding goes where the row goes that it repeats.
        start: columns before `mask`'s.
        mask: additive [texts * kv_heads or 1, queries or 1, columns - start]; None where every
            column is seen.
        widths: columns of each sum over keys.
        more_queries: that a matrix product needs beyond a group's own, see `stable_queries`.
    """

    rotary: Tensor
    texts: int
    rows: int
    more_rows: int
    places: Tensor
    start: int
    mask: Tensor | None
    widths: list[int]
    more_queries: int


class Views(NamedTuple):
    """What a pass writes and sees of the store, with g = texts * kv_heads.

    Attributes:
        flat: keys and values side by side [layers, all rows, 2 * head_dim].
        keys: [layers, g, head_dim, columns].
        sums: the values of each sum [layers, g, width, head_dim].
    """

    flat: Tensor
    keys: Tensor
    sums: list[Tensor]


def rows_pass(
    shape: AttentionShape,
    rotary: Tensor,
    positions: list[int],
    start: int,
    mask: Tensor | None,
    store: Tensor,
) -> tuple[Pass, Views]:
    """n rows that follow `start` committed ones of one text.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + 2 * kv_heads, head_dim / 2]; m - n rows are padding.
        positions: n absolute positions; column c < start holds position c.
        start: rows of the cache before these.
        mask: bool [n, n], row sees new row; None = causal.
        store: [layers, kv_heads, rows, 2 * head_dim].
    """
    n, m, stored = len(positions), len(rotary), store.shape[2]
    cuts = _cuts(positions, start)
    written = torch.arange(start, start + m)
    written[n:] = start
    places = (written[:, None] + torch.arange(shape.kv_heads) * stored).flatten()
    least = _least_queries(shape.kv_heads)
    # Rows of padding are there already, and cheaper than to add queries.
    rows = min(m, max(n, -(-least // shape.group)))
    more_queries = max(0, least - rows * shape.group)
    additive = _additive(mask, n, rows, cuts[-1] - start)
    if additive is not None:
        of_query = torch.arange(rows).repeat_interleave(shape.group)
        additive = additive[None, F.pad(of_query, (0, more_queries))]
    widths = _widths(cuts)
    step = Pass(rotary, 1, rows, m - rows, places, start, additive, widths, more_queries)
    return step, _views(store, cuts)


def texts_pass(
    shape: AttentionShape, rotary: Tensor, positions: list[int], store: Tensor
) -> tuple[Pass, Views]:
    """One row of each of B texts, which sees all of its own text.

    Args:
        shape: of the attention.
        rotary: complex [m, heads + 2 * kv_heads, head_dim / 2]; m - B rows are padding.
        positions: B absolute positions; column c of a text holds its position c.
        store: [layers, B, kv_heads, rows, 2 * head_dim].
    """
    n, m, stored = len(positions), len(rotary), store.shape[3]
    at, last = torch.tensor(positions)[:, None], max(positions)
    cuts = _cuts([last], last)
    heads = torch.arange(n * shape.kv_heads).view(n, -1) * stored
    mask = torch.zeros(n, 1, cuts[-1])
    mask.masked_fill_((torch.arange(cuts[-1]) > at)[:, None], float("-inf"))
    step = Pass(
        rotary=rotary,
        texts=n,
        rows=1,
        more_rows=m - n,
        places=pad(at + heads, m).flatten(),
        start=0,
        mask=mask.repeat_interleave(shape.kv_heads, 0),
        widths=_widths(cuts),
        more_queries=max(0, _least_queries(n * shape.kv_heads) - shape.group),
    )
    return step, _views(store.flatten(1, 2), cuts)


def row_blocks(
    shape: AttentionShape,
    rotary: Rotary,
    positions: Tensor,
    start: int,
    mask: Tensor | None,
    store: Tensor,
) -> Iterator[tuple[slice, Pass, Views]]:
    """Rows in blocks, to bound the memory that a long text takes; a masked pass is one block.

    Args:
        shape: of the attention.
        rotary: of the model.
        positions: [n] absolute positions.
        start: rows of the cache before these.
        mask: bool [n, n], or None = causal.
        store: see `rows_pass`.
    """
    size = len(positions) if mask is not None else _BLOCK_ROWS
    for begin in range(0, len(positions), size):
        rows = slice(begin, begin + size)
        at = positions[rows].tolist()
        yield rows, *rows_pass(shape, rotary(at), at, start + begin, mask, store)


def _views(store: Tensor, cuts: list[int]) -> Views:
    """Of a store [layers, g, rows, 2 * head_dim]."""
    keys, values = store.chunk(2, 3)
    return Views(
        store.flatten(1, 2),
        keys[:, :, : cuts[-1]].transpose(2, 3),
        [values[:, :, begin:end] for begin, end in itertools.pairwise(cuts)],
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
    """[n_padded, columns]: 0 where a row sees a new column, else -inf; padding sees as row 0."""
    if n_rows == 1 and columns == 1:
        return None
    allowed = torch.zeros(n_padded, columns, dtype=torch.bool)
    own = torch.ones(n_rows, n_rows, dtype=torch.bool).tril() if mask is None else mask
    allowed[:n_rows, :n_rows] = own
    allowed[n_rows:] = allowed[0]
    return torch.zeros(n_padded, columns).masked_fill_(~allowed, float("-inf"))
