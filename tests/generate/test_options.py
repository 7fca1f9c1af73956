"""Settings of `generate`: whose value counts, what it means, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from entmtp_calib.config import SamplingConfig
from entmtp_calib.errors import UsageError
from entmtp_calib.generate.options import Request, read_request
from entmtp_calib.sampling import log_probabilities


def read(
    given: GenerationConfig | None = None,
    models: GenerationConfig | None = None,
    n_prompt: int = 4,
    **options: Any,
) -> Request:
    return read_request(
        options,
        [given, models],
        n_prompt=n_prompt,
        eos_ids={2},
        tokenizer=toys.word_tokenizer(10),
        seed=0,
    )


def test_the_call_counts_before_its_config_and_that_before_the_models() -> None:
    models = GenerationConfig(do_sample=True, temperature=0.5, top_k=7, eos_token_id=[3, 4])
    given = GenerationConfig(temperature=0.6, max_length=24)
    request = read(given, models, temperature=0.7)
    assert request.config.sampling == SamplingConfig(0.7, top_k=7)
    assert request.config.max_new_tokens == 20
    assert request.eos_ids == {3, 4}
    assert read(given, models, do_sample=False).config.sampling == SamplingConfig()


def test_none_in_the_call_turns_a_setting_off() -> None:
    models = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.9, eos_token_id=3)
    request = read(None, models, temperature=None, top_k=None, top_p=None, eos_token_id=None)
    assert request.config.sampling == SamplingConfig(1.0)
    assert request.eos_ids == frozenset()


def test_without_settings_it_is_transformers_defaults_and_the_targets_ends() -> None:
    request = read()
    assert (request.config.max_new_tokens, request.eos_ids) == (20, {2})
    assert request.config.sampling == SamplingConfig()
    assert not request.returns_dict
    assert read(do_sample=True).config.sampling == SamplingConfig(1.0, top_k=50)


@pytest.mark.parametrize("settings", [(0.7, 5, 1.0), (1.3, 0, 0.8), (0.9, 6, 0.7)])
def test_the_distribution_is_transformers(settings: tuple[float, int, float]) -> None:
    temperature, top_k, top_p = settings
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(1)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = warpers(None, logits).double().softmax(-1)
    sampling = read(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    found = log_probabilities(logits, sampling.config.sampling).exp()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("repetition_penalty", 1.1),
        ("no_repeat_ngram_size", 3),
        ("min_new_tokens", 5),
        ("min_length", 9),
        ("bad_words_ids", [[1]]),
        ("suppress_tokens", [1]),
        ("forced_eos_token_id", 0),
        ("guidance_scale", 1.5),
        ("prompt_lookup_num_tokens", 10),
        ("output_scores", True),
        ("output_hidden_states", True),
        ("token_healing", True),
        ("sequence_bias", {(1,): 2.0}),
        ("logits_processor", [TemperatureLogitsWarper(0.5)]),
        ("prefix_allowed_tokens_fn", lambda *_: [1]),
        ("assistant_model", torch.nn.Linear(1, 1)),
        ("custom_generate", "someone/decoding"),
        ("negative_prompt_ids", torch.ones(1, 2)),
        ("inputs_embeds", torch.ones(1, 2, 3)),
        ("token_type_ids", torch.zeros(1, 2)),
        ("max_tokens", 5),
    ],
)
def test_what_would_change_the_text_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"generate with {name}") as caught:
        read(**{name: value})
    assert "\n" not in str(caught.value)


def test_a_penalty_that_comes_with_the_model_is_refused_until_the_call_lifts_it() -> None:
    models = GenerationConfig(repetition_penalty=1.05)
    with pytest.raises(UsageError, match=r"of a generation config.*repetition_penalty=1\.0"):
        read(None, models)
    assert read(None, models, repetition_penalty=1.0).config.sampling == SamplingConfig()


def test_settings_of_sampling_alone_matter_only_there() -> None:
    for options in ({"min_p": 0.1}, {"typical_p": 0.9}, {"epsilon_cutoff": 0.01}):
        read(**options)
        with pytest.raises(UsageError, match=next(iter(options))):
            read(do_sample=True, **options)


def test_neutral_values_are_no_reason_to_refuse() -> None:
    read(
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        typical_p=1.0,
        do_sample=True,
        logits_processor=LogitsProcessorList(),
        assistant_model=None,
        output_scores=False,
        synced_gpus=None,
        use_cache=True,
        pad_token_id=0,
        length_penalty=2.0,
    )


def test_a_config_with_fields_of_its_own_is_read() -> None:
    config = GenerationConfig(chat_format="chatml", max_new_tokens=3)
    assert read(config).config.max_new_tokens == 3


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens 0"),
        ({"max_length": 4}, "max_length=4 with a prompt of 4 tokens"),
        ({"do_sample": True, "top_p": 1.5}, "top-p"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
    ],
)
def test_values_that_never_work_are_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        read(**options)


def test_lengths_of_the_text_count_the_prompt_and_new_tokens_go_first() -> None:
    assert read(max_length=30).config.max_new_tokens == 26
    assert read(max_length=30, max_new_tokens=5).config.max_new_tokens == 5
