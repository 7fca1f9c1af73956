"""What Hydra and Medusa heads compute, written down directly, one vector at a time, in float64.

The definitions of the two papers and their published code, for checks; from the tensors as they lie
in a published file, and with nothing of the library.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def linear(state: State, name: str, x: Tensor) -> Tensor:
    y = state[f"{name}.weight"].double() @ x
    bias = state.get(f"{name}.bias")
    return y if bias is None else y + bias.double()


def hydra_logits(state: State, head: int, vector: Tensor, embeddings: list[Tensor]) -> Tensor:
    """Scores [V] of head `head` (0-based), which sees a vector and head + 1 embeddings."""
    x = torch.cat([vector.double(), *(e.double() for e in embeddings)])
    blocks = sorted(
        int(name.split(".")[2])
        for name in state
        if name.startswith(f"hydra_mlp.{head}.") and name.endswith(".linear.weight")
    )
    for index in blocks:
        name = f"hydra_mlp.{head}.{index}"
        skips = f"{name}.res_connection.weight" in state
        passed = linear(state, f"{name}.res_connection", x) if skips else x
        x = passed + silu(linear(state, f"{name}.linear", x))
    inner = f"hydra_lm_head.{head}.1"
    return linear(state, inner if f"{inner}.weight" in state else f"hydra_lm_head.{head}", x)


def medusa_logits(state: State, head: int, vector: Tensor, lm_head: Tensor) -> Tensor:
    """Scores [V] of head `head` (0-based), with the file's projection or the target's."""
    x, layer = vector.double(), 0
    while f"{head}.{layer}.linear.weight" in state:
        x = x + silu(linear(state, f"{head}.{layer}.linear", x))
        layer += 1
    own = state.get(f"{head}.{layer}.weight")
    return (lm_head if own is None else own).double() @ x


def prefix_vectors(
    state: State, hidden: Tensor, n_heads: int, n_kv_heads: int, theta: float, eps: float
) -> list[Tensor]:
    """The prefix layer's output at each row of hidden [n, h]: a decoder layer and a final norm."""
    root = "prefix_embeding_layer"
    layer = f"{root}.layers.0"

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x**2).mean() + eps) * state[f"{name}.weight"].double()

    def rotated(x: Tensor, position: int) -> Tensor:
        d = len(x)
        y = torch.empty_like(x)
        for j in range(d // 2):
            angle = position * theta ** (-2 * j / d)
            a, b = x[j], x[j + d // 2]
            y[j] = a * math.cos(angle) - b * math.sin(angle)
            y[j + d // 2] = b * math.cos(angle) + a * math.sin(angle)
        return y

    out, keys, values = [], [], []
    for position, row in enumerate(hidden.double()):
        x = norm(row, f"{layer}.input_layernorm")
        q = linear(state, f"{layer}.self_attn.q_proj", x).chunk(n_heads)
        k = linear(state, f"{layer}.self_attn.k_proj", x).chunk(n_kv_heads)
        keys.append([rotated(head, position) for head in k])
        values.append(linear(state, f"{layer}.self_attn.v_proj", x).chunk(n_kv_heads))
        mixed = []
        for i, query in enumerate(q):
            group = i // (n_heads // n_kv_heads)
            query = rotated(query, position)
            scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(len(query))
            shares = torch.softmax(scores, 0)
            mixed.append(sum(s * v[group] for s, v in zip(shares, values, strict=True)))
        row = row + linear(state, f"{layer}.self_attn.o_proj", torch.cat(mixed))
        x = norm(row, f"{layer}.post_attention_layernorm")
        gate = silu(linear(state, f"{layer}.mlp.gate_proj", x))
        inner = gate * linear(state, f"{layer}.mlp.up_proj", x)
        row = row + linear(state, f"{layer}.mlp.down_proj", inner)
        out.append(norm(row, f"{root}.norm"))
    return out
