"""Heads on a CPU with weights packed to float16: drafting then reads half the memory.

Rows are computed in counts that give every row the same bits whatever rides along, so a rank in a
trace, taken over many positions at once, is the rank that live drafting sees. This module knows no
files and no training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from entmtp_calib.targets.packed import PackedLinear, fits_half, stable_rows


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
        x = F.pad(x, (0, 0, 0, stable_rows(n) - n))
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


def _rows(embeddings: Tensor | None) -> int:
    return 1 if embeddings is None else len(embeddings)


def can_pack_all(weights: list[Tensor]) -> bool:
    """Whether every weight is float32 on the CPU and has a float16 form."""
    return all(
        weight.device.type == "cpu" and weight.dtype == torch.float32 and fits_half(weight)
        for weight in weights
    )
