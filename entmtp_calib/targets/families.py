"""Can a family of models verify trees? Told from its configuration, before any weight is read.

A rejected token must leave no trace, so every layer has to be attention over keys and values that
can be taken back; and a node stands at its depth, not at its row, so positions have to be given
from outside. Families are not listed: transformers' classes say of themselves what they are. What
passes here is still tried at load (`selfcheck`).
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from entmtp_calib.errors import ModelError

_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE = "layers with a state, out of which a rejected token cannot be taken"


def check_family(config: Any) -> None:
    """Refuse a transformers configuration whose family cannot verify trees.

    Raises:
        ModelError: names the family and the reason.
    """
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ())
    model, base = (_class_of(config, table) for table in _TABLES)
    if getattr(config, "is_encoder_decoder", False):
        raise cannot_verify(config, "encoder and decoder")
    if getattr(model, "_is_stateful", False):
        raise cannot_verify(config, _STATE)
    if layers - _ATTENDING:
        names = ", ".join(sorted(layers - _ATTENDING))
        raise cannot_verify(config, f"layers {names}, which are no plain attention")
    if getattr(text, "is_heterogeneous", False):
        raise cannot_verify(config, "layers of different shapes, which no cache of ours can hold")
    if getattr(text, "alibi", False):
        raise cannot_verify(config, "ALiBi, which counts rows where trees have depths")
    if base is not None and cache_argument(base) is None:
        raise cannot_verify(config, "it takes no positions, or no cache of keys and values")


def check_verifies(network: Any) -> None:
    """Refuse a loaded model of a kind that cannot verify trees."""
    check_family(network.config)
    if getattr(network, "_is_stateful", False):
        raise cannot_verify(network.config, _STATE)
    implementation = network.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise cannot_verify(network.config, f"attention {implementation}")


def cache_argument(base: type) -> str | None:
    """How a base model's forward names its cache; None if it takes none, or no positions.

    transformers called it `past_key_values` before it was `cache`.
    """
    arguments = inspect.signature(base.forward).parameters  # type: ignore[attr-defined]
    if "position_ids" not in arguments:
        return None
    return next((name for name in ("cache", "past_key_values") if name in arguments), None)


def cannot_verify(config: Any, fact: str) -> ModelError:
    """The error that refuses a family."""
    return ModelError(
        f"model family '{config.model_type}' ({fact}) cannot verify trees",
        "a decoder with eager or sdpa attention in every layer",
        "use another target model",
    )


_TABLES = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING


def _class_of(config: Any, table: Any) -> Any:
    """The class that a table of transformers' has for a configuration, or None."""
    found = table.get(type(config), None)
    return found[0] if isinstance(found, list | tuple) else found
