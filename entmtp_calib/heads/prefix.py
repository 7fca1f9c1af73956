"""The prefix layer of Hydra++: one causal decoder layer over the target's hidden states.

It lets a draft see the whole text before it, not the last hidden state alone (Ankner et al. 2024).
It has keys and values of its own and runs once per step over the newly committed rows. This module
knows neither heads nor targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KeysValues = tuple[Tensor, Tensor]
"""Rotated keys and values, each [B, kv_heads, n, head_dim]."""


@dataclass(frozen=True)
class PrefixConfig:
    """Widths of the prefix layer: one Llama decoder layer with a final norm, over hidden states."""

    intermediate_size: int
    n_attention_heads: int
    n_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class PrefixLayer(nn.Module):
    """One causal decoder layer over the target's hidden states, with a final norm (Hydra++)."""

    def __init__(self, hidden_size: int, config: PrefixConfig) -> None:
        super().__init__()
        self.config = config
        q_width = config.n_attention_heads * config.head_dim
        kv_width = config.n_key_value_heads * config.head_dim
        self.input_norm = RMSNorm(hidden_size, config.rms_eps)
        self.q = nn.Linear(hidden_size, q_width, bias=False)
        self.k = nn.Linear(hidden_size, kv_width, bias=False)
        self.v = nn.Linear(hidden_size, kv_width, bias=False)
        self.o = nn.Linear(q_width, hidden_size, bias=False)
        self.post_norm = RMSNorm(hidden_size, config.rms_eps)
        self.gate = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden_size, bias=False)
        self.norm = RMSNorm(hidden_size, config.rms_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """Normed input [B, n, h] -> rotated keys and values, each [B, kv_heads, n, head_dim]."""
        return self._rotate(self._split(self.k(x)), positions), self._split(self.v(x))

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        past: KeysValues | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Run the layer over new rows that follow `past`.

        Args:
            hidden: [B, n, h] hidden states of the target after its final norm.
            positions: [B, n] or [n] absolute positions.
            past: keys and values of earlier rows, each [B, kv_heads, m, head_dim].
            keep: bool [B, 1, n, m + n]; None means causal.

        Returns:
            The layer's output [B, n, h], and the keys and values of the new rows.
        """
        x = self.input_norm(hidden)
        new = self.keys_values(x, positions)
        keys, values = appended(past, new)
        if keep is None:
            n, m = hidden.shape[1], keys.shape[2]
            keep = torch.ones(n, m, dtype=torch.bool, device=hidden.device).tril(m - n)
        queries = self._rotate(self._split(self.q(x)), positions)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=keep, enable_gqa=True
        )
        hidden = hidden + self.o(mixed.transpose(1, 2).flatten(2))
        x = self.post_norm(hidden)
        hidden = hidden + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.norm(hidden), new

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """[head_dim / 2] radians per position."""
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        return self.config.rope_theta**-exponents

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary position embedding (Su et al. 2021), half-split, on [B, heads, n, head_dim]."""
        dim = self.config.head_dim
        angles = positions[..., None].float() * self.frequencies(x.device)
        angles = torch.cat([angles, angles], dim=-1)
        if angles.dim() == 3:
            angles = angles[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cos + half * sin


def appended(past: KeysValues | None, new: KeysValues) -> KeysValues:
    """The keys and values of earlier rows and of new ones behind them."""
    if past is None:
        return new
    return torch.cat([past[0], new[0]], dim=2), torch.cat([past[1], new[1]], dim=2)
