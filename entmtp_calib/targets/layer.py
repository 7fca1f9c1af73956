"""One decoder layer of a Llama-like model on a CPU, with packed weights: norms, projections, MLP.

Projections are fused, and rows are laid out for one complex product per rotation. Rows do not
influence each other's rounding as long as there are `stable_rows` of them. How rows attend is given
from outside (`attention`); this module knows no cache and no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from entmtp_calib.targets.attention import Attend, AttentionShape
from entmtp_calib.targets.packed import PackedLinear

Weights = tuple[Tensor, Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""


class RMSNorm:
    """Root-mean-square norm over the last dimension; five operations, where torch's takes ten."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight = weight.detach()
        self._epsilon = torch.full((1,), epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]"""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1])
        return x.mul(mean_square.rsqrt_()).mul_(self._weight)


@dataclass(frozen=True)
class Layer:
    """A layer's packed weights.

    Attributes:
        head_norm: over each query's and key's head before rotation; None where the family has none.
    """

    shape: AttentionShape
    attention_norm: RMSNorm
    query_key_value: PackedLinear
    output: PackedLinear
    mlp_norm: RMSNorm
    gate_up: PackedLinear
    down: PackedLinear
    head_norm: RMSNorm | None = None

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """[m, h] -> [m, h]"""
        projected = self.query_key_value(self.attention_norm(x))
        if self.head_norm:
            self._norm_heads(projected)
        x = self.output(attend(projected)).add_(x)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=1)
        return self.down(F.silu(gate).mul_(up)).add_(x)

    def _norm_heads(self, projected: Tensor) -> None:
        assert self.head_norm is not None
        heads = projected[:, : self.shape.rotary_width]
        by_head = heads.view(len(heads), -1, self.shape.head_dim)
        by_head.copy_(self.head_norm(by_head))


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
