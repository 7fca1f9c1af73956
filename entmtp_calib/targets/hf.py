"""The forward through transformers' own model code: every family, every device, no speed tricks.

It hands the model our cache, explicit positions and a ready 4-D mask, calls the base model so that
logits are computed only where they are asked for, and repeats what a causal-LM class does to its
logits. Whether a family honours all this is not known here: `selfcheck` finds out at load.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.cache import TreeCache


class TransformersEngine:
    """One pass of a transformers causal language model over the rows of a step."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._softcap, self._scale = _logit_rule(model.config)
        arguments = inspect.signature(self._base.forward).parameters
        self._cache_argument = cache_argument(self._base)
        if self._base is model or self._head is None or "position_ids" not in arguments:
            raise ModelError(
                f"model family '{model.config.model_type}' cannot verify trees",
                "a decoder with explicit position ids and a separate output layer",
                "use another target model",
            )

    @property
    def n_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def embedding_weight(self) -> Tensor:
        """[V, h]"""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, h]"""
        return self._head.weight

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Tensor:
        """[n, h] after the final norm, for ids [n], positions [n] and a mask [n, n] or None."""
        output = self._base(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=self._attention_mask(len(ids), cache.length, mask),
            use_cache=True,
            **{self._cache_argument: _shared(cache)},
        )
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, V], as the causal-LM class itself would return them."""
        logits = self._head(hidden) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    def _attention_mask(self, n_rows: int, length: int, mask: Tensor | None) -> Tensor | None:
        """[1, 1, n, length + n]: boolean for sdpa, additive for eager; None where causal is all."""
        if mask is None and length == 0:
            return None
        device = self.model.device
        allowed = torch.ones(n_rows, length + n_rows, dtype=torch.bool, device=device)
        allowed[:, length:] = allowed[:, length:].tril() if mask is None else mask.to(device)
        if self.model.config._attn_implementation == "sdpa":
            return allowed[None, None]
        additive = torch.zeros(allowed.shape, dtype=self.model.dtype, device=device)
        return additive.masked_fill_(~allowed, torch.finfo(self.model.dtype).min)[None, None]


def cache_argument(base: Any) -> str:
    """What this release of transformers calls a base model's cache."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


def _logit_rule(config: Any) -> tuple[float | None, float]:
    """(soft cap or None, factor): what Gemma, Cohere and Granite do behind the output layer."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    factor = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return softcap, factor / divisor


def _shared(cache: TreeCache) -> Cache:
    return Cache(layers=[_SharedLayer(cache, layer) for layer in range(cache.n_layers)])


class _SharedLayer(CacheLayerMixin):
    """What transformers sees of one layer of a TreeCache."""

    is_sliding = False

    def __init__(self, cache: TreeCache, layer: int) -> None:
        super().__init__()
        self._cache, self._layer = cache, layer

    def lazy_initialization(self, *_args: Any) -> None:
        """Nothing to do: the TreeCache allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write states [1, kv_heads, n, head_dim]; views of all rows up to them."""
        keys, values = self._cache.write(self._layer, key_states[0], value_states[0])
        return keys[None], values[None]

    def get_seq_length(self, *_args: Any) -> int:
        return self._cache.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        n_rows = query_length if isinstance(query_length, int) else len(query_length)
        return self._cache.length + n_rows, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
