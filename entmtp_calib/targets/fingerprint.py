"""One hash by which heads and banks recognise the target they were made for.

It covers the configuration facts that change the computation, the tokenizer's vocabulary (so that
two tokens swapped make another target), and every weight's name, shape and sampled values. Values
are compared after rounding to float16, so one checkpoint gives one hash whether it is loaded as
float32, as float16, or as the bfloat16 it is stored in; a float32 checkpoint forced to bfloat16 is
another target. Small weights are hashed whole; of large ones an evenly spaced sample, so a change
of single values inside a large matrix can pass unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_SAMPLE = 4096
_FACTS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "rope_parameters",
    "tie_word_embeddings",
)


def fingerprint(config: Any, tokenizer: Any, weights: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 hex of a transformers configuration, a tokenizer, and named weights."""
    text = config.get_text_config()
    facts = {name: getattr(text, name, None) for name in _FACTS}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    vocabulary = sorted(tokenizer.get_vocab().items())
    digest.update(json.dumps(vocabulary, ensure_ascii=True).encode())
    for name, weight in sorted(weights, key=lambda item: item[0]):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(_sampled(weight).numpy().tobytes())
    return digest.hexdigest()


def _sampled(weight: Tensor) -> Tensor:
    """float16 [at most 2 * _SAMPLE], evenly spaced through the flattened weight."""
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].to(device="cpu", dtype=torch.float16)
