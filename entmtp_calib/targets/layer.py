"""Decoder layers of a Llama-like model on a CPU, with packed weights.

Projections are fused, and rows are laid out for one complex product per rotation. Rows do not
influence each other's rounding: linear layers get `stable_rows`, and `attention` says what else it
takes. Steps of a small model are made of many small operations, so the layers run as TorchScript,
without Python between them; the same modules run as they are where torch cannot compile them. This
module knows no cache.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entmtp_calib.targets.attention import (
    AttentionShape,
    Pass,
    Rotary,
    Views,
    row_blocks,
    texts_pass,
)
from entmtp_calib.targets.packed import PackedLinear, pad

# No `from __future__ import annotations` here: TorchScript reads them.

Weights = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; five operations, where torch's takes ten."""

    weight: Tensor
    epsilon: Tensor
    share: Final[float]

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.register_buffer("epsilon", torch.full((1,), epsilon))
        self.share = 1 / weight.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]"""
        length = torch.linalg.vector_norm(x, 2.0, [-1], True)
        mean_square = torch.addcmul(self.epsilon, length, length, value=self.share)
        return x.mul(mean_square.rsqrt_()).mul_(self.weight)


class Layer(nn.Module):
    """One layer: norms, attention, MLP.

    Args:
        shape: of the attention.
        head_norm: over each query's and key's head before rotation; None where the family has none.
    """

    kv_heads: Final[int]
    head_dim: Final[int]
    rotary_heads: Final[int]
    query_width: Final[int]
    new_width: Final[int]

    def __init__(
        self,
        shape: AttentionShape,
        attention_norm: RMSNorm,
        query_key_value: PackedLinear,
        output: PackedLinear,
        mlp_norm: RMSNorm,
        gate_up: PackedLinear,
        down: PackedLinear,
        head_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.rotary_heads = shape.rotary_heads
        self.query_width = shape.query_width
        self.new_width = 2 * shape.kv_heads * shape.head_dim
        self.attention_norm, self.query_key_value = attention_norm, query_key_value
        self.output, self.mlp_norm = output, mlp_norm
        self.gate_up, self.down = gate_up, down
        self.head_norm = head_norm

    def forward(
        self, x: Tensor, step: Pass, flat: Tensor, keys: Tensor, sums: list[Tensor]
    ) -> Tensor:
        """[m, h] -> [m, h]; `Views` describes the last three, for one layer here."""
        projected = self.query_key_value(self.attention_norm(x))
        x = self.output(self.attend(projected, step, flat, keys, sums)).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, 1)
        return self.down(F.silu(gate).mul_(up)).add_(x)

    def attend(
        self, projected: Tensor, step: Pass, flat: Tensor, keys: Tensor, sums: list[Tensor]
    ) -> Tensor:
        """Queries, keys and values side by side [m, ...] to mixed values [m, heads * head_dim]."""
        if self.head_norm is not None:
            by_head = projected.view(len(projected), -1, self.head_dim)[:, : self.rotary_heads]
            by_head.copy_(self.head_norm(by_head))
        pairs = projected.view(len(projected), -1, self.head_dim // 2, 2)
        torch.view_as_complex(pairs).mul_(step.rotary)
        queries, new = projected.split([self.query_width, self.new_width], 1)
        new = new.view(len(projected), 2, self.kv_heads, self.head_dim).transpose(1, 2)
        flat.index_copy_(0, step.places, new.reshape(-1, 2 * self.head_dim))

        texts, rows = step.texts, step.rows
        if step.more_rows > 0:
            queries = queries[: texts * rows]
        queries = queries.view(texts, rows, self.kv_heads, -1, self.head_dim)
        queries = queries.transpose(1, 2).reshape(texts * self.kv_heads, -1, self.head_dim)
        if step.more_queries > 0:
            queries = torch.cat([queries, queries[:, :1].expand(-1, step.more_queries, -1)], 1)
        mixed = self.mix(torch.bmm(queries, keys), step, sums)
        if step.more_queries > 0:
            mixed = mixed[:, : -step.more_queries]
        mixed = mixed.view(texts, self.kv_heads, rows, -1).transpose(1, 2).reshape(texts * rows, -1)
        if step.more_rows > 0:
            mixed = torch.cat([mixed, mixed[:1].expand(step.more_rows, -1)])
        return mixed

    def mix(self, scores: Tensor, step: Pass, sums: list[Tensor]) -> Tensor:
        """Softmax of scores [g, queries, columns], times the values: [g, queries, head_dim]."""
        mask = step.mask
        if mask is not None:
            scores[:, :, step.start :].add_(mask)
        weights = scores.sub_(scores.amax(-1, True)).exp_()
        total = weights.sum(-1, True, dtype=torch.float64).float()
        parts = weights.split(step.widths, -1)
        mixed = torch.bmm(parts[0], sums[0])
        for index in range(1, len(sums)):
            mixed.baddbmm_(parts[index], sums[index])
        return mixed.div_(total)


class Layers(nn.Module):
    """All layers, one after the other, and the norm behind them."""

    def __init__(self, layers: Sequence[Layer], norm: RMSNorm) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(layers), norm

    def forward(self, x: Tensor, step: Pass, views: Views) -> Tensor:
        """[m, h] -> [m, h]"""
        flat, keys = views.flat.unbind(), views.keys.unbind()
        sums = [values.unbind() for values in views.sums]
        for index, layer in enumerate(self.layers):
            x = layer(x, step, flat[index], keys[index], [values[index] for values in sums])
        return self.norm(x)


def compiled(layers: Sequence[Layer], norm: RMSNorm) -> Any:
    """`Layers` as one TorchScript function, or as they are where torch cannot compile them."""
    module = Layers(layers, norm).eval()
    with warnings.catch_warnings():
        # TorchScript has no successor that needs no C++ compiler at run time.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return torch.jit.script(module)
        except (RuntimeError, TypeError, NotImplementedError):
            return module


class Stack:
    """Compiled layers with their rotation.

    They run in inference mode, in which small operations take a tenth less. What comes out is
    copied outside of it, so that it is a tensor like any other.
    """

    def __init__(
        self, shape: AttentionShape, rotary: Rotary, layers: Sequence[Layer], norm: RMSNorm
    ) -> None:
        self._shape, self._rotary = shape, rotary
        self._layers = compiled(layers, norm)

    def rows(
        self, x: Tensor, positions: Tensor, start: int, mask: Tensor | None, store: Tensor
    ) -> Tensor:
        """[n, h] for n rows x [n, h] of one text, long ones in blocks; see `rows_pass`."""
        with torch.inference_mode():
            blocks = row_blocks(self._shape, self._rotary, positions, start, mask, store)
            done = [self._run(x[rows], step, views) for rows, step, views in blocks]
        return torch.cat(done)

    def texts(self, x: Tensor, positions: Tensor, store: Tensor) -> Tensor:
        """[B, h] for one row x [B, h] of each of B texts; see `texts_pass`."""
        at = positions.tolist()
        with torch.inference_mode():
            done = self._run(x, *texts_pass(self._shape, self._rotary(at), at, store))
        return done.clone()

    def _run(self, x: Tensor, step: Pass, views: Views) -> Tensor:
        rows = pad(x, len(step.rotary))
        return self._layers(rows, step, views)[: len(x)]


def take_layer(layer: Any, shape: AttentionShape, epsilon: float) -> Layer:
    """A transformers decoder layer of the Llama family, packed."""
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        shape=shape,
        attention_norm=RMSNorm(layer.input_layernorm.weight, epsilon),
        query_key_value=fused(
            [
                paired(_weights(attention.q_proj), shape.head_dim),
                paired(_weights(attention.k_proj), shape.head_dim),
                _weights(attention.v_proj),
            ]
        ),
        output=PackedLinear(*_weights(attention.o_proj)),
        mlp_norm=RMSNorm(layer.post_attention_layernorm.weight, epsilon),
        gate_up=fused([_weights(mlp.gate_proj), _weights(mlp.up_proj)]),
        down=PackedLinear(*_weights(mlp.down_proj)),
        head_norm=_head_norm(attention, shape),
    )


def _head_norm(attention: Any, shape: AttentionShape) -> RMSNorm | None:
    """Qwen3's norms of queries and keys as one, [heads + kv_heads, head_dim]."""
    if not hasattr(attention, "q_norm"):
        return None
    query, _ = paired((attention.q_norm.weight, None), shape.head_dim)
    key, _ = paired((attention.k_norm.weight, None), shape.head_dim)
    weight = torch.cat([query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)])
    return RMSNorm(weight, attention.q_norm.variance_epsilon)


def _weights(linear: Any) -> Weights:
    return linear.weight, linear.bias


def fused(parts: Sequence[Weights]) -> PackedLinear:
    """Several linear layers of the same input as one; all have a bias or none."""
    biases = [bias for _, bias in parts if bias is not None]
    return PackedLinear(
        torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
    )


def paired(weights: Weights, head_dim: int) -> Weights:
    """Rows i and i + head_dim / 2 of each head, which rotate together, as neighbors."""
    weight, bias = weights
    order = torch.arange(len(weight)).view(-1, 2, head_dim // 2).transpose(1, 2).reshape(-1)
    return weight[order], None if bias is None else bias[order]
