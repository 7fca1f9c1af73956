"""The target: the language model whose output counts, as the rest of the toolkit sees it.

One forward over the rows of a step (a prompt, one token, or a tree), logits only where asked for,
embeddings for the heads, and the facts by which heads and banks recognise their model. It does not
know how the forward is computed (an engine does), what a tree is, or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from entmtp_calib.errors import DataError, ModelError
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.graphs import Recorder
from entmtp_calib.targets.verify import Verified


class Engine(Protocol):
    """How a forward is computed."""

    name: str
    config: Any
    recorder: Recorder | None
    window: int | None

    @property
    def n_layers(self) -> int: ...

    @property
    def embedding_weight(self) -> Tensor: ...

    @property
    def lm_head_weight(self) -> Tensor: ...

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Tensor: ...

    def hidden_batch(self, ids: Tensor, positions: Tensor, cache: BatchCache) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def verify(
        self, ids: Tensor, depths: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Verified: ...

    def prepare(self, cache: TreeCache, rows: Iterable[int], first: int, last: int) -> None: ...


@dataclass(frozen=True)
class TargetFacts:
    """What identifies a target and bounds its use.

    Attributes:
        family: transformers' model type.
        max_positions: positions beyond are never computed.
        fingerprint: sha256 of configuration, vocabulary and weights (see `fingerprint`).
        eos_ids: union of what configuration, generation configuration and tokenizer name.
        attention: "eager", "sdpa", or "lean" for our own.
        n_weights: all numbers in its weights, those of tied ones once.
        generation_config: transformers' settings of `generate` that come with the model, or None.
        limited_by: what keeps `max_positions` below the model's own number; None: nothing does.
    """

    name: str
    family: str
    fingerprint: str
    eos_ids: frozenset[int]
    max_positions: int
    attention: str
    n_weights: int
    generation_config: Any = None
    limited_by: str | None = None


class Target:
    """A loaded causal language model; see `load.load_target`."""

    def __init__(self, engine: Engine, tokenizer: Any, facts: TargetFacts) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self.facts = facts

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def fingerprint(self) -> str:
        return self.facts.fingerprint

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.facts.eos_ids

    @property
    def max_positions(self) -> int:
        return self.facts.max_positions

    @property
    def engine(self) -> str:
        """ "transformers", "lean" or "graphed"."""
        return self._engine.name

    @property
    def recorder(self) -> Recorder | None:
        """What records work on the device, to be run again; None where passes are not recorded."""
        return self._engine.recorder

    @property
    def model(self) -> Any:
        """The transformers model; None where the lean engine has replaced it."""
        return getattr(self._engine, "model", None)

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self._engine.config

    @property
    def n_layers(self) -> int:
        return self._engine.n_layers

    @property
    def embedding_weight(self) -> Tensor:
        """Token embeddings [V, h]."""
        return self._engine.embedding_weight

    @property
    def lm_head_weight(self) -> Tensor:
        """Output layer [V, h]."""
        return self._engine.lm_head_weight

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values."""
        return self.embedding_weight.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.lm_head_weight.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; may exceed what the tokenizer knows."""
        return int(self.lm_head_weight.shape[0])

    def new_cache(self, capacity: int) -> TreeCache:
        """An empty cache for `capacity` rows, tried rows included."""
        return TreeCache(self.n_layers, capacity)

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Tokens that can follow a prompt; `DataError` for an empty one, or where none can."""
        room = self.max_positions - len(prompt_ids)
        if not prompt_ids or room < 1:
            limited = self.facts.limited_by
            limit = f" (limited by {limited})" if limited else ""
            # What limits the lean engine are windows, and those the general one knows.
            other = ", or use --engine transformers" if limited and self.engine == "lean" else ""
            raise DataError(
                f"a prompt of {len(prompt_ids)} tokens",
                f"1 to {self.max_positions - 1} tokens for {self.name}{limit}",
                f"shorten the prompt{other}",
            )
        return room

    @cached_property
    def row_bytes(self) -> int:
        """Keys and values of one position, measured by a pass of one token."""
        cache = BatchCache(self.n_layers, 1, 1)
        self.forward([0], [0], cache.of(0))
        return cache.n_bytes // cache.n_rows

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor | Sequence[int],
        positions: Tensor | Sequence[int],
        cache: TreeCache,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of n rows, whose keys and values are written behind the committed rows.

        Args:
            ids: token ids [n].
            positions: absolute positions [n].
            cache: read and written; its length does not change, `cache.commit` does that.
            mask: bool [n, n], row attends column; None = causal. All rows see all committed rows.

        Returns:
            [n, h] after the final norm.
        """
        ids, positions = torch.as_tensor(ids), torch.as_tensor(positions)
        _check_range(ids, self.embedding_weight.shape[0], "token id")
        _check_range(positions, self.max_positions, "position")
        return self._engine.hidden(ids.to(self.device), positions.to(self.device), cache, mask)

    @torch.no_grad()
    def verify(
        self, ids: Tensor, depths: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Verified:
        """A step's pass over root and drafted nodes, behind the committed rows.

        The ids are trusted: they come from the target and its heads.

        Args:
            ids: token ids [n] on the target's device, the root first.
            depths: [n] on the device, positions behind the committed rows.
            cache: as in `forward`.
            mask: bool [n, n] on the device, row attends column; None = causal.
        """
        return self._engine.verify(ids, depths, cache, mask)

    @torch.no_grad()
    def prepare(self, cache: TreeCache, rows: Iterable[int], first: int, last: int) -> None:
        """Make ready for passes of so many rows, behind `first` to `last` committed rows.

        It can be left out; an engine then prepares at the first pass of each kind.
        """
        self._engine.prepare(cache, rows, first, last)

    @torch.no_grad()
    def forward_batch(
        self, ids: Tensor | Sequence[int], positions: Tensor | Sequence[int], cache: BatchCache
    ) -> Tensor:
        """Hidden states of one row per sequence, whose keys and values become column `position`.

        Args:
            ids: token ids [B].
            positions: [B], at most what each sequence has committed; a row sees the columns up to
                its own.
            cache: read and written; its lengths do not change, `cache.commit` does that.

        Returns:
            [B, h] after the final norm.
        """
        ids, positions = torch.as_tensor(ids), torch.as_tensor(positions)
        _check_range(ids, self.embedding_weight.shape[0], "token id")
        _check_range(positions, min(self.max_positions, cache.capacity), "position")
        return self._engine.hidden_batch(ids.to(self.device), positions.to(self.device), cache)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, V] for hidden [n, h]: exactly what the model's own class returns."""
        return self._engine.logits(hidden)

    def hidden_states(self, ids: Tensor) -> Tensor:
        """[b, n, h] after the final norm for b whole texts, ids [b, n]; pad them on the right."""
        cache = self.new_cache(ids.shape[1])
        rows = []
        for text in ids:
            cache.reset()
            rows.append(self.forward(text, torch.arange(len(text)), cache))
        return torch.stack(rows)

    def embed(self, ids: Tensor) -> Tensor:
        """[..., h] rows of the embedding table, as heads see tokens."""
        return torch.nn.functional.embedding(ids.to(self.device), self.embedding_weight)


def _check_range(values: Tensor, limit: int, what: str) -> None:
    """Values already on the accelerator are trusted: looking at them would wait for it."""
    if values.device.type != "cpu" or values.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(values))
    if low < 0 or high >= limit:
        raise ModelError(
            f"{what} {low if low < 0 else high} is outside the model",
            f"0 to {limit - 1}",
            "use the model's own tokenizer and shorter text",
        )
