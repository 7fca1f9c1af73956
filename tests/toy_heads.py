"""Heads for the toy targets: right by construction, wrong by construction, or random."""

from __future__ import annotations

from pathlib import Path

import torch

from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.heads.native import load_heads, save_heads
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.targets.model import Target

SMALL_PREFIX = PrefixConfig(
    intermediate_size=24, n_attention_heads=4, n_key_value_heads=2, head_dim=8
)


def perfect_cycle_heads(target: Target, n_heads: int = 4, shift: int = 0) -> Heads:
    """Medusa heads for CYCLE: head d scores token t + 1 + d + shift highest, given hidden of t."""
    config = HeadsConfig("medusa", n_heads, 64, 64, own_projection=True)
    heads = Heads(config, target.embedding_weight, target.lm_head_weight)
    for depth, head in enumerate(heads.heads, start=1):
        torch.nn.init.zeros_(head.first.linear.weight)
        torch.nn.init.zeros_(head.first.linear.bias)
        rows = (torch.arange(64) + 1 + depth + shift) % 64
        head.projection.weight.data.zero_()
        head.projection.weight.data[rows, torch.arange(64)] = 20.0
    return heads.eval().requires_grad_(False)


def random_heads(
    target: Target,
    kind: str = "hydra",
    n_heads: int = 3,
    prefix: bool = False,
    draft_ids: list[int] | None = None,
    seed: int = 0,
    **options: object,
) -> Heads:
    """Untrained heads of any architecture."""
    torch.manual_seed(seed)
    config = HeadsConfig(
        kind,
        n_heads,
        target.hidden_size,
        target.vocab_size,
        draft_vocab_size=len(draft_ids) if draft_ids else None,
        prefix=SMALL_PREFIX if prefix else None,
        **options,  # type: ignore[arg-type]
    )
    ids = torch.tensor(draft_ids) if draft_ids else None
    heads = Heads(config, target.embedding_weight, target.lm_head_weight, ids)
    return heads.eval().requires_grad_(False)


def save_for(heads: Heads, target: Target, folder: Path) -> Path:
    """Write heads as `train-heads` would, made for `target`."""
    facts = {"name": target.name, "fingerprint": target.fingerprint}
    save_heads(heads, folder, facts, {"note": "a toy"})
    return folder


def saved_and_loaded(heads: Heads, target: Target, folder: Path) -> Heads:
    """The heads after a round trip through their files (half precision)."""
    return load_heads(save_for(heads, target, folder), target)
