"""A recorded trace: what the heads and the target said at every position of generated texts.

Decoding is lossless, so a text does not depend on the tree that it is decoded with. One recording
of it is therefore all that growth, replay and fitting ever need: each row is a position as a
possible step start, its root is the row's token, and its ranks say which choice of each head the
true next tokens are. A trace whose rows are not whole texts in order would be counted wrongly
without notice, so it is refused when it is made. This module knows no trees, no policies, no
models and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from entmtp_calib import records
from entmtp_calib.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_COLUMNS = {
    "prompt": np.int32,
    "position": np.int32,
    "context": np.int32,
    "token": np.int32,
    "ranks": np.int16,
    "chain_probs": np.float32,
    "base_top1": np.float32,
    "entropy": np.float32,
}


@dataclass(frozen=True, eq=False)
class Trace:
    """N generated positions of P prompts, D heads deep; a prompt's rows stand together, in order.

    Attributes:
        prompt: int32 [N], the prompt's number.
        position: int32 [N], 0-based in the prompt's generated text.
        context: int32 [N], tokens before the root, those of the prompt included.
        token: int32 [N], the generated token: the root of a step that starts here.
        ranks: int16 [N, D], the rank of the token d + 1 further on under head d + 1, given the
            true tokens before it; -1 beyond the rank cap and past the end of the text.
        chain_probs: float32 [N, D], the greedy chain's probabilities, each given those before it.
        base_top1: float32 [N], the target's top-1 probability where it chose `token`.
        entropy: float32 [N], the entropy there, in nats.
    """

    prompt: NDArray[np.int32]
    position: NDArray[np.int32]
    context: NDArray[np.int32]
    token: NDArray[np.int32]
    ranks: NDArray[np.int16]
    chain_probs: NDArray[np.float32]
    base_top1: NDArray[np.float32]
    entropy: NDArray[np.float32]

    def __post_init__(self) -> None:
        for name, kind in _COLUMNS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=kind))
        problems = _problems(self)
        if problems:
            raise DataError(
                f"the trace has {'; '.join(problems)}",
                "whole prompts, row after row",
                "record the trace again with `entmtp rollout`",
            )

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def max_depth(self) -> int:
        """How many heads the trace recorded (D)."""
        return int(self.ranks.shape[1])

    @property
    def n_prompts(self) -> int:
        """P."""
        return len(self.starts)

    @cached_property
    def starts(self) -> Ints:
        """[P], the first row of each prompt."""
        return np.flatnonzero(np.diff(self.prompt, prepend=self.prompt[0] - 1))

    @cached_property
    def ends(self) -> Ints:
        """[P], one past the last row of each prompt."""
        return np.append(self.starts[1:], len(self))

    @property
    def lengths(self) -> Ints:
        """[P], the tokens of each prompt."""
        return self.ends - self.starts

    @cached_property
    def terminal(self) -> Bools:
        """[N], the last row of each prompt: a step there needs no target pass."""
        last = np.zeros(len(self), dtype=np.bool_)
        last[self.ends - 1] = True
        return last

    @cached_property
    def remaining(self) -> Ints:
        """[N], tokens from each row to its text's end, itself included."""
        return np.repeat(self.ends, self.lengths) - np.arange(len(self))

    def rows_of(self, prompts: Sequence[int]) -> Ints:
        """Rows of the given prompts (0 is the trace's first), in the order given."""
        return np.concatenate([np.arange(self.starts[p], self.ends[p]) for p in prompts])

    def select(self, prompts: Sequence[int]) -> Trace:
        """The trace of some prompts (0 is the trace's first), which keep their numbers."""
        rows = self.rows_of(prompts)
        return Trace(**{name: getattr(self, name)[rows] for name in _COLUMNS})

    @classmethod
    def joined(cls, traces: Sequence[Trace]) -> Trace:
        """Several traces as one; no two may have a prompt number in common."""
        return cls(
            **{name: np.concatenate([getattr(t, name) for t in traces]) for name in _COLUMNS}
        )

    def to_table(self, split: str) -> pa.Table:
        """The rows as an Arrow table of `records.TRACE_SCHEMA`."""
        import pyarrow as pa

        columns = {"split": pa.array([split] * len(self), pa.string())}
        for name in _COLUMNS:
            values = getattr(self, name)
            flat = pa.array(values.ravel())
            if values.ndim == 2:
                offsets = np.arange(len(self) + 1, dtype=np.int32) * values.shape[1]
                flat = pa.ListArray.from_arrays(pa.array(offsets), flat)
            columns[name] = flat
        return pa.table(columns).select(records.TRACE_SCHEMA.names).cast(records.TRACE_SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table, split: str) -> Trace:
        """One split's rows of an Arrow table."""
        import pyarrow.compute as pc

        rows = table.filter(pc.equal(table["split"], split))
        if not rows.num_rows:
            raise DataError(
                f"the trace has no row of split {split!r}", action="record it with `entmtp rollout`"
            )
        columns = {}
        for name in _COLUMNS:
            column = rows[name].combine_chunks()
            is_nested = name in ("ranks", "chain_probs")
            values = (column.flatten() if is_nested else column).to_numpy(zero_copy_only=False)
            columns[name] = values.reshape(rows.num_rows, -1) if is_nested else values
        return cls(**columns)


def _problems(trace: Trace) -> list[str]:
    """What makes a trace unusable; counts on it would be wrong without notice."""
    n_rows = len(trace.prompt)
    if not n_rows:
        return ["no rows"]
    shapes = {name: getattr(trace, name).shape for name in _COLUMNS}
    width = trace.ranks.shape[-1]
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(_COLUMNS, (n_rows,))
    expected |= dict.fromkeys(("ranks", "chain_probs"), (n_rows, width))
    if shapes != expected:
        return [f"columns of shapes {shapes}"]
    problems = []
    if len(np.unique(trace.prompt)) != trace.n_prompts:
        problems.append("prompts whose rows do not stand together")
    elif (trace.position != np.arange(n_rows) - np.repeat(trace.starts, trace.lengths)).any():
        problems.append("positions that do not count up from 0")
    past_end = np.arange(1, width + 1) >= trace.remaining[:, None]
    if (trace.ranks < -1).any() or (trace.ranks[past_end] != -1).any():
        problems.append("ranks below -1 or past the end of a text")
    return problems
