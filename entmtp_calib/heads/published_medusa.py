"""Medusa heads as they are published: V1, V2, inside a Medusa-2 model, and in vLLM's names.

`{head}.{layer}.linear.{weight,bias}` are the residual blocks, `{head}.{n_layers}.weight` is V1's
projection; V2 has none and uses the target's. A Medusa-2 model has the same names behind
`medusa_head.`. vLLM's conversions call them `blocks.{head}.layers.{layer}` and `lm_heads.{head}`,
and some have dropped the biases. (FasterDecoding/Medusa, vllm-project/vllm.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import HeadsConfig
from entmtp_calib.heads.published_files import Weights
from entmtp_calib.heads.published_layout import (
    FindBase,
    Layout,
    Part,
    assemble,
    collect,
    differences,
    matrix,
)

_BLOCK = re.compile(
    r"((medusa_head\.)?(?P<head>\d+)\.(?P<block>\d+)\.linear"
    r"|blocks\.(?P<vllm_head>\d+)\.layers\.(?P<vllm_block>\d+))\.(?P<kind>weight|bias)"
)
_PROJECTION = re.compile(
    r"((medusa_head\.)?(?P<head>\d+)\.(?P<layers>\d+)|lm_heads\.(?P<vllm_head>\d+))\.weight"
)


def is_medusa(weights: Weights) -> bool:
    """Whether any tensor is that of a Medusa head."""
    return is_inside_model(weights) or any(_BLOCK.fullmatch(name) for name in weights.info)


def is_inside_model(weights: Weights) -> bool:
    """Whether the heads are part of a model that was trained with them (Medusa-2)."""
    return any(name.startswith("medusa_head.") for name in weights.info)


def medusa_layout(
    weights: Weights, config: Mapping[str, Any], base: FindBase, where: object
) -> Layout:
    """Medusa heads of a file; the base model is asked for its vocabulary by V2 alone."""
    parts = collect(weights.info, _part, where, "Medusa")
    blocks = assemble(parts, where, may_lack_biases=True)
    _check_order(weights.info, blocks.n_layers, where)
    hidden_size, _ = matrix(weights.info, parts.get(Part(0, 0, "linear.weight")), where)
    has_projections = any(part.block is None for part in parts)
    if has_projections:
        vocab_size, _ = matrix(weights.info, parts.get(Part(0, None, "weight")), where)
    else:
        vocab_size = base().vocab_size
    counted = {
        "medusa_num_heads": blocks.n_heads,
        "num_heads": blocks.n_heads,
        "medusa_num_layers": blocks.n_layers,
    }
    notes = differences(config, counted)
    if blocks.zeros:
        notes.append("the blocks' biases were dropped from the file and are zero")
    return Layout(
        name="Medusa V1" if has_projections else "Medusa V2",
        config=HeadsConfig(
            "medusa",
            blocks.n_heads,
            hidden_size,
            vocab_size,
            n_layers=blocks.n_layers,
            own_projection=has_projections,
        ),
        tensors=blocks.tensors,
        zeros=blocks.zeros,
        copies=blocks.copies,
        ignored=(),
        notes=tuple(notes),
    )


def _part(name: str) -> Part | None:
    if match := _BLOCK.fullmatch(name):
        head, block = match["head"] or match["vllm_head"], match["block"] or match["vllm_block"]
        return Part(int(head), int(block), f"linear.{match['kind']}")
    if match := _PROJECTION.fullmatch(name):
        return Part(int(match["head"] or match["vllm_head"]), None, "weight")
    return None


def _check_order(names: Iterable[str], n_layers: int, where: object) -> None:
    """A projection has the number behind the last layer's, where it has a number."""
    matches = [match for name in names if (match := _PROJECTION.fullmatch(name))]
    wrong = {match["layers"] for match in matches if match["layers"]} - {str(n_layers)}
    if wrong:
        raise HeadsError(
            f"{where} has a projection at index {min(wrong)} of a head",
            f"index {n_layers}, behind all layers",
            "download or copy the heads again",
        )
