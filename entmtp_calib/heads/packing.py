"""Heads on a CPU with weights packed to float16: drafting then reads half the memory.

Rows are computed in counts that give every row the same bits whatever rides along, so a rank in a
trace, taken over many positions at once, is the rank that live drafting sees. This module knows no
files and no training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from entmtp_calib.heads.prefix import PrefixLayer
from entmtp_calib.targets.attention import AttentionShape, Rotary
from entmtp_calib.targets.cache import SPARE_ROWS
from entmtp_calib.targets.layer import Layer, RMSNorm, Stack, fused, paired
from entmtp_calib.targets.packed import PackedLinear, fits_half, pad, stable_rows

_ROOM = 256


class PackedHead:
    """One head, drafting only: residual blocks and projection.

    Args:
        linear, skip: weight and bias of the first block; skip None passes the vector on.
        again: weight and bias of the block applied `n_again` times behind it, or None.
        projection: [Vd, h] and bias [Vd] or None.
    """

    def __init__(
        self,
        linear: tuple[Tensor, Tensor],
        skip: tuple[Tensor, Tensor] | None,
        again: tuple[Tensor, Tensor] | None,
        n_again: int,
        projection: PackedLinear,
    ) -> None:
        both = [linear] if skip is None else [linear, skip]
        weights, biases = zip(*both, strict=True)
        self._first = PackedLinear(torch.cat(weights), torch.cat(biases))
        self._is_skipping = skip is not None
        self._again = PackedLinear(*again) if again else None
        self._n_again = n_again
        self._projection = projection

    def __call__(self, vectors: Tensor, embeddings: Tensor | None) -> Tensor:
        """vectors [h] or [R, h], embeddings [R, depth * h] or None -> draft logits [R, Vd]."""
        vectors = vectors if vectors.dim() == 2 else vectors.expand(_rows(embeddings), -1)
        x = vectors if embeddings is None else torch.cat([vectors, embeddings], dim=1)
        n = len(x)
        x = pad(x, stable_rows(n))
        inner = self._first(x)
        if self._is_skipping:
            inner, passed = inner.chunk(2, dim=1)
        else:
            passed = x
        x = passed + F.silu(inner)
        if self._again is not None:
            for _ in range(self._n_again):
                x = x + F.silu(self._again(x))
        return self._projection(x)[:n]


@dataclass(frozen=True, eq=False)
class Past:
    """Rows that the prefix layer has seen; those behind `length` are free to be written.

    Attributes:
        store: [kv_heads, rows, 2 * head_dim], each row's key and value side by side.
    """

    store: Tensor
    length: int

    def with_room(self, n_rows: int) -> Past:
        """The same rows with room for more, in other memory where there was none."""
        missing = self.length + n_rows - self.store.shape[1]
        if missing <= 0:
            return self
        more = (0, 0, 0, max(missing, self.length) + _ROOM)
        return Past(F.pad(self.store, more), self.length)


class PackedPrefix:
    """The prefix layer with packed weights; a row has the same bits in whatever pass it comes."""

    def __init__(self, prefix: PrefixLayer) -> None:
        config = prefix.config
        dim, epsilon = config.head_dim, config.rms_eps
        shape = AttentionShape(config.n_attention_heads, config.n_key_value_heads, dim)
        layer = Layer(
            shape=shape,
            attention_norm=RMSNorm(prefix.input_norm.weight, epsilon),
            query_key_value=fused(
                [
                    paired((prefix.q.weight, None), dim),
                    paired((prefix.k.weight, None), dim),
                    (prefix.v.weight, None),
                ]
            ),
            output=PackedLinear(prefix.o.weight),
            mlp_norm=RMSNorm(prefix.post_norm.weight, epsilon),
            gate_up=fused([(prefix.gate.weight, None), (prefix.up.weight, None)]),
            down=PackedLinear(prefix.down.weight),
        )
        rotary = Rotary(shape, prefix.frequencies(), 1.0, dim**-0.5)
        self._stack = Stack(shape, rotary, [layer], RMSNorm(prefix.norm.weight, epsilon))
        self._nothing = torch.zeros(shape.kv_heads, 0, 2 * dim)

    def __call__(self, hidden: Tensor, positions: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """New rows behind `past`: the layer's output [n, h], and the past with them.

        Args:
            hidden: [n, h] the target's hidden states.
            positions: [n] absolute positions.
            past: None at the start of a text.
        """
        past = past or Past(self._nothing, 0)
        past = past.with_room(len(hidden) + SPARE_ROWS)
        out = self._stack.rows(hidden, positions, past.length, None, past.store[None])
        return out, Past(past.store, past.length + len(hidden))


def _rows(embeddings: Tensor | None) -> int:
    return 1 if embeddings is None else len(embeddings)


def can_pack_all(weights: list[Tensor]) -> bool:
    """Whether every weight is float32 on the CPU and has a float16 form."""
    return all(
        weight.device.type == "cpu" and weight.dtype == torch.float32 and fits_half(weight)
        for weight in weights
    )
