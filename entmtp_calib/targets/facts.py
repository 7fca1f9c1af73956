"""What identifies a loaded model and bounds its use: stop tokens, positions, fingerprint.

It reads transformers' configuration objects, where families say the same things in different
places, and does not know what is done with the answers.
"""

from __future__ import annotations

from typing import Any

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.fingerprint import fingerprint
from entmtp_calib.targets.model import TargetFacts

# Their rotary frequencies depend on the longest position of a pass, so a tree would change them.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def facts_of(name: str, network: Any, tokenizer: Any) -> TargetFacts:
    """The facts of a transformers model and its tokenizer."""
    return TargetFacts(
        name=name,
        family=network.config.model_type,
        fingerprint=fingerprint(network.config, tokenizer, network.named_parameters()),
        eos_ids=eos_ids(network, tokenizer),
        max_positions=max_positions(network.config),
        attention=network.config._attn_implementation,
    )


def eos_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Union of every id that configuration, generation configuration or tokenizer calls EOS."""
    owners = (
        network.config.get_text_config(),
        getattr(network, "generation_config", None),
        tokenizer,
    )
    named = [getattr(owner, "eos_token_id", None) for owner in owners]
    lists = [value if isinstance(value, list | tuple) else [value] for value in named]
    return frozenset(int(value) for values in lists for value in values if value is not None)


def max_positions(config: Any) -> int:
    """Positions that every layer sees entirely, with the same rotary frequencies throughout."""
    text = config.get_text_config()
    limits = [
        getattr(text, "max_position_embeddings", None),
        _window(text),
        getattr(text, "attention_chunk_size", None),
    ]
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        limits.append(rope.get("original_max_position_embeddings"))
    known = [int(limit) for limit in limits if limit]
    if not known:
        raise ModelError(
            f"model family '{config.model_type}' states no max_position_embeddings",
            action="add it to config.json",
        )
    return min(known)


def _window(text: Any) -> int | None:
    """The sliding window, where the configuration uses one."""
    if getattr(text, "use_sliding_window", True) is False:
        return None
    layers = getattr(text, "layer_types", None)
    if layers and "sliding_attention" not in layers:
        return None
    return getattr(text, "sliding_window", None)
