"""What a call of `generate` asks for, in our terms; what we cannot honour is refused by name.

A setting is the call's own, else that of the call's generation config, else that of the one which
comes with the model, else transformers' default: the order of transformers' `generate`. Settings
that cannot change a single text (those of beams, caches, compilation) are let through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from entmtp_calib.config import DecodeConfig, SamplingConfig
from entmtp_calib.errors import UsageError

NEW_TOKENS, TOP_K = 20, 50
"""transformers' defaults where nobody names a length, and for sampling."""

_HONOURED = set(
    """
    max_new_tokens max_length max_time stop_strings eos_token_id do_sample temperature top_k top_p
    return_dict_in_generate
    """.split()
)
_WITHOUT_EFFECT = set(
    """
    pad_token_id bos_token_id decoder_start_token_id transformers_version trust_remote_code
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size low_memory
    compile_config disable_compile continuous_batching_config
    early_stopping length_penalty renormalize_logits remove_invalid_values
    encoder_repetition_penalty encoder_no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_lookbehind target_lookbehind assistant_ensemble_weight max_matching_ngram_size
    speculation_type
    """.split()
)
_ONLY_SAMPLING = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
_NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "min_p": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
}
"""Values, other than None, that change nothing."""


@dataclass(frozen=True)
class Request:
    """A call of `generate` in our terms.

    Attributes:
        config: length and sampling.
        eos_ids: tokens that end the text.
        criteria: asked after each token whether the text ends there.
        returns_dict: whether an object is wanted instead of ids.
    """

    config: DecodeConfig
    eos_ids: frozenset[int]
    criteria: StoppingCriteriaList
    returns_dict: bool


def read_request(
    options: Mapping[str, Any],
    configs: Iterable[Any],
    *,
    n_prompt: int,
    eos_ids: Set[int],
    tokenizer: Any,
    criteria: Sequence[Any] | None = None,
    seed: int | None = None,
) -> Request:
    """Read a call's settings.

    Args:
        options: keyword arguments of the call, by transformers' names; None counts as given.
        configs: transformers' generation configs, the first one first; their None says nothing.
        n_prompt: tokens of the prompt, which `max_length` counts.
        eos_ids: what ends a text where nobody says so.
        tokenizer: for stop strings.
        criteria: transformers' stopping criteria.
        seed: of the draws; None takes one from torch's generator.

    Raises:
        UsageError: a setting that we cannot honour, or a value that can never work.
    """
    asked = _merged(options, configs)
    _refuse_others(asked, options)
    if "eos_token_id" in asked:
        eos_ids = _ids(asked["eos_token_id"])
    return Request(
        DecodeConfig(_new_tokens(asked, n_prompt), _sampling(asked, seed)),
        frozenset(eos_ids),
        _criteria(asked, criteria or (), tokenizer),
        bool(asked.get("return_dict_in_generate")),
    )


def _merged(options: Mapping[str, Any], configs: Iterable[Any]) -> dict[str, Any]:
    """Settings by name; a config's own inventions are dropped, as transformers does."""
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    merged = dict(options)
    for config in configs:
        for name in known:
            value = getattr(config, name, None)
            if value is not None:
                merged.setdefault(name, value)
    return merged


def _refuse_others(asked: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """UsageError for the first setting that would change the text and is not ours to honour."""
    allowed = _HONOURED | _WITHOUT_EFFECT | (set() if asked.get("do_sample") else _ONLY_SAMPLING)
    for name, value in asked.items():
        if name in allowed or _is_neutral(name, value):
            continue
        shown = f"{name}={value!r}" if isinstance(value, bool | int | float | str) else name
        origin = "" if name in options else " of a generation config"
        raise UsageError(
            f"generate with {shown}{origin}",
            "greedy decoding, or sampling by temperature, top_k and top_p",
            f"pass {name}={_NEUTRAL.get(name)}, or use transformers' generate",
        )


def _is_neutral(name: str, value: Any) -> bool:
    if value is None or value is False:
        return True
    if name in _NEUTRAL:
        return bool(value == _NEUTRAL[name])
    return isinstance(value, list | tuple | dict) and not value


def _ids(value: Any) -> frozenset[int]:
    """Token ids given as None, one, several, or a tensor."""
    return frozenset(() if value is None else torch.as_tensor(value).reshape(-1).tolist())


def _new_tokens(asked: Mapping[str, Any], n_prompt: int) -> int:
    new_tokens, length = asked.get("max_new_tokens"), asked.get("max_length")
    if new_tokens is not None:
        return int(new_tokens)
    if length is None:
        return NEW_TOKENS
    if length <= n_prompt:
        raise UsageError(
            f"max_length={length} with a prompt of {n_prompt} tokens",
            f"more than {n_prompt}",
            "pass max_new_tokens",
        )
    return int(length) - n_prompt


def _sampling(asked: Mapping[str, Any], seed: int | None) -> SamplingConfig:
    if not asked.get("do_sample"):
        return SamplingConfig()
    temperature, top_p = asked.get("temperature"), asked.get("top_p")
    return SamplingConfig(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=asked.get("top_k", TOP_K) or 0,
        seed=int(torch.randint(2**63 - 1, ())) if seed is None else seed,
    )


def _criteria(
    asked: Mapping[str, Any], given: Sequence[Any], tokenizer: Any
) -> StoppingCriteriaList:
    criteria = [*given]
    if asked.get("max_time") is not None:
        criteria.append(MaxTimeCriteria(max_time=asked["max_time"]))
    if asked.get("stop_strings"):
        criteria.append(StopStringCriteria(tokenizer, asked["stop_strings"]))
    return StoppingCriteriaList(criteria)
