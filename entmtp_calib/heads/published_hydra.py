"""Hydra heads as they are published: the architectures mlp and prefix-mlp (Hydra++).

`hydra_mlp.{head}.{index}` are the residual blocks, with Dropout modules between them in prefix-mlp
(so its blocks have odd indices), `hydra_lm_head.{head}` the projections, with bias, and
`prefix_embeding_layer` (so spelt) a Llama model of one layer. (zankner/Hydra.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import HeadsConfig
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.heads.published_files import TensorInfo, Weights
from entmtp_calib.heads.published_layout import (
    Base,
    FindBase,
    Layout,
    Part,
    assemble,
    collect,
    differences,
    matrix,
    unknown,
)

_BLOCK = re.compile(
    r"hydra_mlp\.(?P<head>\d+)\.(?P<index>\d+)\.(?P<role>(linear|res_connection)\.(weight|bias))"
)
_PROJECTION = re.compile(r"hydra_lm_head\.(?P<head>\d+)\.(1\.)?(?P<role>weight|bias)")
_PREFIX = "prefix_embeding_layer."
_INV_FREQ = f"{_PREFIX}layers.0.self_attn.rotary_emb.inv_freq"
IGNORED = ("input_embed_fn.weight", f"{_PREFIX}embed_tokens.weight", _INV_FREQ)
"""A rounded copy of the target's embeddings, a table that is never used, and what RoPE gives."""
_PREFIX_NAMES = {
    "layers.0.input_layernorm": "input_norm",
    "layers.0.self_attn.q_proj": "q",
    "layers.0.self_attn.k_proj": "k",
    "layers.0.self_attn.v_proj": "v",
    "layers.0.self_attn.o_proj": "o",
    "layers.0.post_attention_layernorm": "post_norm",
    "layers.0.mlp.gate_proj": "gate",
    "layers.0.mlp.up_proj": "up",
    "layers.0.mlp.down_proj": "down",
    "norm": "norm",
}


def is_hydra(weights: Weights) -> bool:
    """Whether any tensor is that of a Hydra head of residual blocks."""
    return any(name.startswith("hydra_mlp.") for name in weights.info)


def hydra_layout(
    weights: Weights, config: Mapping[str, Any], base: FindBase, where: object
) -> Layout:
    """Hydra heads of a file; the base model is asked for what its prefix layer shares with it."""
    offset = config.get("hidden_state_offset", 0)
    if offset:
        raise HeadsError(
            f"{where} wants hidden states {offset} layers before the last (hidden_state_offset)",
            "heads on the last one",
        )
    info = {name: found for name, found in weights.info.items() if name not in IGNORED}
    prefix = {name for name in info if name.startswith(_PREFIX)}
    parts = _parts(info.keys() - prefix, where)
    blocks = assemble(parts, where)
    hidden_size, width = matrix(info, parts.get(Part(0, 0, "linear.weight")), where)
    vocab_size, _ = matrix(info, parts.get(Part(0, None, "weight")), where)
    if width == hidden_size:
        raise HeadsError(
            f"{where} holds ungrounded Hydra heads, which see no drafted tokens",
            "grounded ones",
            "use Medusa heads for drafts that do not depend on each other",
        )
    tensors = {**blocks.tensors, **{_native_prefix(name, where): name for name in prefix}}
    name = "prefix-mlp" if prefix else "mlp"
    counted = {
        "hydra_head_arch": name,
        "hydra_num_heads": blocks.n_heads,
        "hydra_num_layers": blocks.n_layers,
        "grounded_heads": True,
    }
    return Layout(
        name=f"Hydra {name}",
        config=HeadsConfig(
            "hydra",
            blocks.n_heads,
            hidden_size,
            vocab_size,
            n_layers=blocks.n_layers,
            own_projection=True,
            projection_bias=True,
            prefix=_prefix_config(weights.info, base(), where) if prefix else None,
        ),
        tensors=tensors,
        zeros={},
        copies=blocks.copies,
        ignored=tuple(sorted(weights.info.keys() - info.keys())),
        notes=tuple(differences(config, counted)),
    )


def _parts(names: set[str], where: object) -> dict[Part, str]:
    matches = [match for name in names if (match := _BLOCK.fullmatch(name))]
    # Dropout modules have no tensors but count, so with them the blocks are 1, 3, 5, ...
    has_dropout = all(int(match["index"]) % 2 for match in matches)

    def part(name: str) -> Part | None:
        if match := _BLOCK.fullmatch(name):
            index = int(match["index"])
            block = (index - 1) // 2 if has_dropout else index
            return Part(int(match["head"]), block, match["role"])
        if match := _PROJECTION.fullmatch(name):
            return Part(int(match["head"]), None, match["role"])
        return None

    return collect(names, part, where, "Hydra")


def _native_prefix(name: str, where: object) -> str:
    module, _, kind = name.removeprefix(_PREFIX).rpartition(".")
    if module not in _PREFIX_NAMES:
        raise unknown(where, name, "Hydra prefix-mlp")
    return f"prefix.{_PREFIX_NAMES[module]}.{kind}"


def _prefix_config(info: Mapping[str, TensorInfo], base: Base, where: object) -> PrefixConfig:
    """Widths and constants: the layer was made from the base model's configuration."""
    config = base.config
    rope = getattr(config, "rope_parameters", None) or {}
    facts = {
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "hidden_act": (getattr(config, "hidden_act", "silu"), "silu"),
    }
    for fact, (value, known) in facts.items():
        if value != known or "rope_theta" not in rope:
            raise HeadsError(
                f"{where} has a prefix layer after {base.name}, whose {fact} is {value}",
                f"{known}, with one rope_theta",
                "a prefix layer of another form cannot be read",
            )
    n_heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // n_heads)
    if _INV_FREQ in info and info[_INV_FREQ].shape != (head_dim // 2,):
        raise HeadsError(
            f"{where} has attention heads of {2 * info[_INV_FREQ].shape[0]} dimensions",
            f"{head_dim}, those of {base.name}",
            "pass the model that the heads were trained for with --model",
        )
    width, _ = matrix(info, f"{_PREFIX}layers.0.mlp.gate_proj.weight", where)
    return PrefixConfig(
        intermediate_size=width,
        n_attention_heads=n_heads,
        n_key_value_heads=int(getattr(config, "num_key_value_heads", None) or n_heads),
        head_dim=head_dim,
        rope_theta=float(rope["rope_theta"]),
        rms_eps=float(config.rms_norm_eps),
    )
