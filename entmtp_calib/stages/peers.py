"""Peers: transformers' own generation loops over the weights of a target, to compare with.

The lean engine frees the transformers model that it was made from, so a second copy is loaded then,
in float32, which is another arithmetic: near-ties may fall otherwise, and texts may differ. This
module knows no bank and no tree.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from entmtp_calib.errors import ModelError
from entmtp_calib.stages.bench_figures import Written
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.network import quiet
from entmtp_calib.timing import Clock

LOOKUP_TOKENS = 10
"""Candidates per step of prompt lookup, the figure in transformers' documentation."""


class Peers:
    """transformers' generation for one target; the network is looked for at first use.

    Args:
        target: whose weights they are.
        model: what the target was loaded from, as `load_target` takes it.
    """

    def __init__(self, target: Target, model: str | None) -> None:
        self._target, self._model = target, model
        self._clock = Clock(str(target.device))

    @cached_property
    def network(self) -> Any:
        """The transformers model: the target's own, or a second copy of it."""
        network = copy.copy(self._target.model or self._second_copy())
        # A checkpoint's own settings (penalties, sampling) would change the text. Only the shallow
        # copy forgets them; the weights are shared.
        network.generation_config = GenerationConfig()
        return network

    def generate(self, prompt_ids: Sequence[int], n_tokens: int, **options: Any) -> Written:
        """Exactly `n_tokens` greedy tokens after a prompt, whatever they are.

        EOS ends nothing here: plain decoding has said how long the text is, and its last token may
        well be an EOS.

        Args:
            prompt_ids: at least one.
            n_tokens: at least 1.
            options: of transformers' `GenerationConfig`.
        """
        network, started = self.network, self._clock.now()
        passes = _Passes(self._clock)
        ids = torch.tensor([list(prompt_ids)], device=network.device)
        settings = GenerationConfig(
            max_new_tokens=n_tokens,
            min_new_tokens=n_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=self._pad_id,
            **options,
        )
        with quiet(), torch.inference_mode():
            text = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # else a prompt's pad tokens would be masked
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([passes]),
            )
        tokens = text[0, len(prompt_ids) :].tolist()
        ended = self._clock.now()
        return Written(
            tokens=tokens,
            steps=passes.count,
            passes=passes.count - 1,
            switches=None,
            prefill_seconds=passes.first - started,
            decode_seconds=ended - passes.first,
        )

    @property
    def _pad_id(self) -> int:
        """Never written, since there is one text in a batch; without it transformers warns."""
        return int(getattr(self._target.tokenizer, "pad_token_id", None) or 0)

    def _second_copy(self) -> Any:
        target = self._target
        again = load_target(
            self._model, device=str(target.device), dtype="float32", engine="transformers"
        )
        if again.fingerprint != target.fingerprint:
            raise ModelError(
                f"{again.name} has changed since it was loaded",
                "the weights that the other methods decode with",
                "run the same command again",
            )
        return again.model


class _Passes(StoppingCriteria):
    """Asked after each pass whether to stop, it never says so; it counts, and times the first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.count, self.first = 0, 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if not self.count:
            self.first = self._clock.now()
        self.count += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
