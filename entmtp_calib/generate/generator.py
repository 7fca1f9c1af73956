"""transformers' `generate` over a bank: the same call, the same text, fewer passes.

Greedy text is what the target's own `generate` writes, as far as both compute the same logits.
Sampled text has transformers' distribution but not its random numbers: it is what our plain
decoding with the same seed writes. The loop is `decoding`'s; here are only its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from entmtp_calib.bank import Bank
from entmtp_calib.decoding import Decoding
from entmtp_calib.errors import DataError
from entmtp_calib.generate.options import Request, read_request
from entmtp_calib.heads.model import Heads
from entmtp_calib.stages.decode import AUTO, session_of
from entmtp_calib.steps import Generation
from entmtp_calib.targets.model import Target


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns with `return_dict_in_generate=True`.

    Attributes:
        sequences: int64 [1, n + m], the prompt and the new tokens.
        generation: the new tokens, why they end, and the record of each step.
    """

    sequences: Tensor
    generation: Generation


class EntmtpGenerator:
    """Generates as `model.generate` does, one text at a time.

    Args:
        target: of `load_target` or `wrap_model`.
        heads: of `load_heads`.
        bank: made for them; raises `HeadsError` where its sizes are others.
        policy: a policy's name, a tree's id, auto or none, as in `Session.policy`.
    """

    def __init__(self, target: Target, heads: Heads, bank: Bank, policy: str = AUTO) -> None:
        self.session = session_of(bank, target, heads)
        self.policy = self.session.policy(policy)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        stopping_criteria: Sequence[Any] | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> Tensor | GenerateOutput:
        """Continue a prompt; it also ends at the model's last position.

        Args:
            input_ids: int64 [1, n] on any device.
            attention_mask: [1, n], zeros on the left alone; without it every token counts.
            generation_config: transformers' settings; where it says nothing, the model's own do.
            stopping_criteria: transformers' criteria, asked after each token in order; the text
                ends with the first token for which one of them says so.
            streamer: gets `put` with the prompt, then with each token, and `end`.
            tokenizer: for `stop_strings`; the target's unless given.
            seed: of the draws with `do_sample`; None takes one from torch's generator, so that
                `torch.manual_seed` fixes it.
            options: max_new_tokens (20 where nobody names a length), max_length, max_time,
                stop_strings, eos_token_id, do_sample, temperature, top_k, top_p,
                return_dict_in_generate.

        Returns:
            int64 [1, n + m] on the device of `input_ids`, or a `GenerateOutput`.

        Raises:
            UsageError: naming a setting that would change the text in another way.
            DataError: several prompts, an empty one, or one that fills the model's positions.
        """
        target = self.session.target
        prompt = _prompt(input_ids, attention_mask)
        configs = [generation_config, target.facts.generation_config]
        request = read_request(
            options,
            configs,
            n_prompt=input_ids.shape[1],
            eos_ids=target.eos_ids,
            tokenizer=tokenizer or target.tokenizer,
            criteria=stopping_criteria,
            seed=seed,
        )
        if streamer is not None:
            streamer.put(input_ids.cpu())
        decoder = self.session.decoder(request.config.sampling)
        state = decoder.start(prompt, self.policy, request.config.max_new_tokens)
        state.eos_ids = request.eos_ids
        text = _Text(input_ids, state.room, request.criteria, streamer)
        generation = _run(state, text, request)
        if streamer is not None:
            streamer.end()
        return GenerateOutput(text.ids, generation) if request.returns_dict else text.ids


class _Text:
    """The text so far, as criteria and streamers see it: token by token.

    Args:
        prompt: int64 [1, n].
        room: tokens that may follow.
    """

    def __init__(
        self, prompt: Tensor, room: int, criteria: StoppingCriteriaList, streamer: Any
    ) -> None:
        self._length = prompt.shape[1]
        self._rows = torch.cat([prompt, prompt.new_zeros(1, room)], dim=1)
        self._criteria, self._streamer = criteria, streamer
        self.is_stopped = False

    @property
    def ids(self) -> Tensor:
        """int64 [1, n + m]."""
        return self._rows[:, : self._length].clone()

    def take(self, tokens: Sequence[int]) -> int:
        """Append tokens up to one at which a criterion ends the text; how many."""
        for count, token in enumerate(tokens, 1):
            self._rows[0, self._length] = token
            self._length += 1
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token]))
            if self._criteria and bool(self._criteria(self._rows[:, : self._length], None).all()):
                self.is_stopped = True
                return count
        return len(tokens)


def _run(state: Decoding, text: _Text, request: Request) -> Generation:
    """Step until the text ends; a step's tokens behind the end of the text are dropped."""
    tokens: list[int] = []
    reason = None
    while reason is None:
        stepped = state.step()
        kept = text.take(stepped)
        tokens += stepped[:kept]
        if kept < len(stepped):
            last = replace(state.steps[-1], emitted_tokens=kept, accepted_draft_tokens=kept - 1)
            state.steps[-1] = last
        by_criterion = text.is_stopped and (kept < len(stepped) or state.reason is None)
        reason = "criterion" if by_criterion else state.reason
    if reason == "length" and state.room < request.config.max_new_tokens:
        reason = "positions"
    return Generation(tokens, reason, state.steps, state.prefill_seconds)


def _prompt(input_ids: Any, attention_mask: Any) -> list[int]:
    """The tokens that count, without padding on the left."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or len(input_ids) != 1:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise DataError(
            f"input_ids of shape {shape}", "a tensor [1, n]", "generate for one prompt at a time"
        )
    ids = input_ids[0].tolist()
    if attention_mask is None:
        return ids
    mask = attention_mask.tolist()
    n_padded = max(0, len(ids) - int(attention_mask.sum()))
    if mask != [[0] * n_padded + [1] * (len(ids) - n_padded)]:
        raise DataError(
            "an attention_mask with zeros behind ones, or of another shape than input_ids",
            "ones, or zeros on the left alone",
            "tokenize one prompt without padding",
        )
    return ids[n_padded:]
