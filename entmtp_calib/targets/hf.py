"""The forward through transformers' own model code: every family, every device, no speed tricks.

It hands the model our cache, explicit positions and ready 4-D masks, calls the base model so that
logits are computed only where they are asked for, and repeats what a causal-LM class does to its
logits. Whether a family honours all this is not known here: `selfcheck` finds out at load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.facts import sliding_window
from entmtp_calib.targets.families import cache_argument
from entmtp_calib.targets.verify import Verifying

Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes a layer's index and new keys and values [B, kv_heads, n, ...]; returns all up to them."""

Masks = Tensor | dict[str, Tensor]
"""A mask [B, 1, n, columns] for all layers, or one for each kind of layer."""

_SLIDING = "sliding_attention"


class TransformersEngine(Verifying):
    """One pass of a transformers causal language model over the rows of a step."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        self._softcap, self._scale = _logit_rule(model.config)
        self.window = sliding_window(model.config)
        self._layer_kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        argument = cache_argument(type(self._base))
        if self._base is model or self._head is None or argument is None:
            raise ModelError(
                f"model family '{model.config.model_type}' cannot verify trees",
                "a decoder with explicit position ids and a separate output layer",
                "use another target model",
            )
        self._cache_argument = argument

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
        allowed = _allowed(len(ids), cache.length, mask, self.model.device)
        masks = None
        if allowed is not None:
            committed = torch.arange(cache.length, device=positions.device)
            columns = torch.cat([committed, positions])
            masks = self._masks(allowed, positions[None], columns)

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            all_keys, all_values = cache.write(layer, keys[0], values[0])
            return all_keys[None], all_values[None]

        return self._run(ids[None], positions[None], masks, write, cache.length)[0]

    def hidden_batch(self, ids: Tensor, positions: Tensor, cache: BatchCache) -> Tensor:
        """[B, h] after the final norm, for one row of each sequence: ids [B], positions [B]."""
        n_columns = int(positions.max()) + 1
        columns = torch.arange(n_columns, device=positions.device)
        sequences = torch.arange(len(ids), device=positions.device)

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            all_keys, all_values = cache.storage(layer, keys[:, :, 0], values[:, :, 0])
            all_keys[sequences, :, positions] = keys[:, :, 0]
            all_values[sequences, :, positions] = values[:, :, 0]
            return all_keys[:, :, :n_columns], all_values[:, :, :n_columns]

        rows = positions[:, None]
        masks = self._masks((columns <= rows)[:, None, None], rows, columns)
        return self._run(ids[:, None], rows, masks, write, n_columns - 1)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, V], as the causal-LM class itself would return them."""
        logits = self._head(hidden) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    def _run(
        self, ids: Tensor, positions: Tensor, masks: Masks | None, write: Write, length: int
    ) -> Tensor:
        """[B, n, h] for ids [B, n] behind `length` columns; without masks, causal."""
        layers = [_Layer(partial(write, layer), length) for layer in range(self.n_layers)]
        output = self._base(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            **{self._cache_argument: Cache(layers=layers)},
        )
        return output.last_hidden_state

    def _masks(self, allowed: Tensor, positions: Tensor, columns: Tensor) -> Masks:
        """What the layers take: one mask, or one for each kind, as `generate` gives them itself.

        Args:
            allowed: bool [B, 1, n, columns], without regard to a sliding window.
            positions: [B, n] of the rows.
            columns: [columns] positions of the columns.
        """
        full = self._attention_mask(allowed)
        if self.window is None or len(columns) <= self.window:
            return full
        near = positions[:, None, :, None] - columns < self.window
        sliding = self._attention_mask(allowed & near)
        if self._layer_kinds <= {_SLIDING}:
            return sliding
        return {kind: sliding if kind == _SLIDING else full for kind in self._layer_kinds}

    def _attention_mask(self, allowed: Tensor) -> Tensor:
        """The mask as the model's attention wants it: boolean for sdpa, additive for eager."""
        if self.model.config._attn_implementation == "sdpa":
            return allowed
        additive = torch.zeros(allowed.shape, dtype=self.model.dtype, device=allowed.device)
        return additive.masked_fill_(~allowed, torch.finfo(self.model.dtype).min)


def _allowed(n_rows: int, length: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """bool [1, 1, n, length + n]: what each new row sees; None where causal is all."""
    if mask is None and length == 0:
        return None
    allowed = torch.ones(n_rows, length + n_rows, dtype=torch.bool, device=device)
    allowed[:, length:] = allowed[:, length:].tril() if mask is None else mask.to(device)
    return allowed[None, None]


def _logit_rule(config: Any) -> tuple[float | None, float]:
    """(soft cap or None, factor): what Gemma, Cohere and Granite do behind the output layer."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    factor = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return softcap, factor / divisor


class _Layer(CacheLayerMixin):
    """What transformers sees of one layer of our cache.

    Args:
        write: stores new keys and values [B, kv_heads, n, ...]; returns all up to them.
        length: columns before the new ones.
    """

    is_sliding = False

    def __init__(
        self, write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], length: int
    ) -> None:
        super().__init__()
        self._write, self._length = write, length

    def lazy_initialization(self, *_args: Any) -> None:
        """Nothing to do: our cache allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states; views of all rows up to them."""
        return self._write(key_states, value_states)

    def get_seq_length(self, *_args: Any) -> int:
        return self._length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        n_rows = query_length if isinstance(query_length, int) else len(query_length)
        return self._length + n_rows, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
