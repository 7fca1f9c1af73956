"""Linear layers with weights packed to float16 once, inputs and outputs in float32 (FBGEMM, x86).

Half the memory traffic of float32 is what makes one-token passes fast on a CPU. The kernels take
rows in tiles, and a leftover tile of one or two rows rounds differently from the larger ones; so
`stable_rows` says how many rows to compute (the extra ones are thrown away) for every row to come
out with the same bits whatever rides along. That count is measured, not assumed.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

_LARGEST_HALF = 65504.0
_MEASURED_ROWS = 160
_TILE_ROWS = 12


def can_pack() -> bool:
    """Whether this build of torch has the float16 kernels for this CPU."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def fits_half(weight: Tensor) -> bool:
    """Whether every value is finite in float16."""
    low, high = torch.aminmax(weight)
    return bool(low >= -_LARGEST_HALF and high <= _LARGEST_HALF)


class PackedLinear(torch.nn.Module):
    """y = x W^T + b with W kept as packed float16; the outputs are shared among all cores.

    Args:
        weight: float32 [out, in].
        bias: float32 [out] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        bias = None if bias is None else bias.detach().float().contiguous()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.packed = torch.ops.quantized.linear_prepack_fp16(
                weight.detach().float().contiguous(), bias
            )

    def forward(self, x: Tensor) -> Tensor:
        """float32 [n, out] for float32 [n, in]."""
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


def pad(rows: Tensor, count: int) -> Tensor:
    """`count` rows: these, then copies of the first."""
    if len(rows) == count:
        return rows
    return torch.cat([rows, rows[:1].expand(count - len(rows), *rows.shape[1:])])


def stable_rows(n_rows: int) -> int:
    """Smallest count >= n_rows at which the first n_rows rows have the bits of a large batch."""
    if n_rows <= _MEASURED_ROWS:
        return _measured()[n_rows]
    return -(-n_rows // _TILE_ROWS) * _TILE_ROWS


@functools.cache
def _measured() -> list[int]:
    """Index = rows wanted, value = rows to compute."""
    generator = torch.Generator().manual_seed(0)
    linear = PackedLinear(torch.randn(64, 256, generator=generator))
    x = torch.randn(_MEASURED_ROWS + _TILE_ROWS, 256, generator=generator)
    whole = linear(x)
    same = [bool((linear(x[:n]) == whole[:n]).all()) for n in range(len(x) + 1)]
    counts = [len(x)] * (len(x) + 1)
    for n in reversed(range(len(x))):
        counts[n] = n if n and same[n] else counts[n + 1]
    return counts
