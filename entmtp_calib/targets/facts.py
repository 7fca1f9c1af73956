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
_USUAL_THETA = 10000.0


def facts_of(name: str, network: Any, tokenizer: Any, windows: bool) -> TargetFacts:
    """The facts of a transformers model and its tokenizer; `windows` as for `position_limit`."""
    limit, limited_by = position_limit(network.config, windows)
    return TargetFacts(
        name=name,
        family=network.config.model_type,
        fingerprint=fingerprint(network.config, tokenizer, network.named_parameters()),
        eos_ids=eos_ids(network, tokenizer),
        max_positions=limit,
        attention=network.config._attn_implementation,
        n_weights=sum(weight.numel() for weight in network.parameters()),
        generation_config=getattr(network, "generation_config", None),
        limited_by=limited_by,
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


def position_limit(config: Any, windows: bool) -> tuple[int, str | None]:
    """Positions that can be computed, and what keeps them below the model's own number, or None.

    Args:
        config: transformers' configuration.
        windows: whether sliding layers see their windows; where not, all positions lie in one.
    """
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None)
    limits = {
        "its sliding window, which its engine does not know": (
            None if windows else sliding_window(config)
        ),
        "its attention in chunks": getattr(text, "attention_chunk_size", None),
        "its rotary embeddings, which change for longer texts": _same_rope(text),
    }
    known = [(int(limit), reason) for reason, limit in limits.items() if limit]
    limit, reason = min(known, default=(own, None))
    if limit is None:
        raise ModelError(
            f"model family '{config.model_type}' states no max_position_embeddings",
            action="add it to config.json",
        )
    return (limit, reason) if own is None or limit < own else (int(own), None)


def sliding_window(config: Any) -> int | None:
    """Positions that a sliding layer sees, its own included; None where no layer slides."""
    text = config.get_text_config()
    if getattr(text, "use_sliding_window", True) is False:
        return None
    layers = getattr(text, "layer_types", None)
    if layers and "sliding_attention" not in layers:
        return None
    return getattr(text, "sliding_window", None) or None


def rope_theta(text: Any) -> float:
    """The base of the rotary embeddings of a text configuration; of several, the one that layers
    use which see every position; 10000, as in Su et al. 2021, where none is named.
    """
    kinds = _ropes(text)
    rope = kinds.get("full_attention") or next(iter(kinds.values()))
    return float(rope.get("rope_theta") or _USUAL_THETA)


def _ropes(text: Any) -> dict[str, dict[str, Any]]:
    """Rotary parameters for each kind of layer; models with one set have one kind, ''."""
    rope = getattr(text, "rope_parameters", None) or {}
    return {kind: each for kind, each in rope.items() if isinstance(each, dict)} or {"": rope}


def _same_rope(text: Any) -> int | None:
    """Positions up to which rotary frequencies stay the same; None where they always do."""
    ends = [
        kind.get("original_max_position_embeddings")
        for kind in _ropes(text).values()
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    return min((int(end) for end in ends if end), default=None)
