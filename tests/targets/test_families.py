"""Families of models: those that verify trees, and those that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import transformers

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.network import quiet
from entmtp_calib.targets.packed import can_pack

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.3,
}


def save(folder: Path, family: str, **config: Any) -> Path:
    """A model of a family with random weights, and a tokenizer of words."""
    made = transformers.AutoConfig.for_model(family, **config)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
        toys.word_tokenizer(32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("cohere", {**SMALL, "logit_scale": 0.25}),
        ("gemma2", {**SMALL, "final_logit_softcapping": 5.0, "sliding_window": 32}),
        ("gpt2", GPT2),
        ("gpt_neox", SMALL),
        ("granite", {**SMALL, "logits_scaling": 4.0}),
        ("mistral", {**SMALL, "sliding_window": 32}),
        ("phi3", SMALL),
        ("qwen2", SMALL),
        ("qwen3", SMALL),
    ],
)
def test_a_family_verifies_trees_and_keeps_its_own_logits(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    target = load_target(save(tmp_path, family, **config))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    found = target.logits(target.forward(ids, range(8), target.new_cache(8)))
    expected = target.model(input_ids=torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() < 1e-3
    assert target.facts.family == family


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bloom", {"vocab_size": 32, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
        ("mamba", {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1}),
        ("rwkv", {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2}),
    ],
)
def test_a_family_that_cannot_verify_trees_is_refused_by_name(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=f"model family '{family}'"):
        load_target(save(tmp_path, family, **config))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    with quiet():
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model family 't5' \(encoder and decoder\)"):
        load_target(tmp_path)


def test_a_sliding_window_bounds_the_positions_only_of_an_engine_without_windows(
    tmp_path: Path,
) -> None:
    mistral = save(tmp_path / "m", "mistral", **SMALL, sliding_window=32)
    qwen = save(tmp_path / "q", "qwen2", **SMALL, sliding_window=32, use_sliding_window=False)
    assert load_target(mistral, engine="transformers").max_positions == 64
    if can_pack():
        assert load_target(mistral, engine="lean").max_positions == 32
        assert load_target(qwen, engine="lean").max_positions == 64


def test_rotary_embeddings_that_depend_on_length_end_at_the_original_length(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    target = load_target(save(tmp_path, "llama", **SMALL, rope_parameters=rope))
    assert target.max_positions == 32


def test_attention_sinks_fall_back_to_eager(tmp_path: Path) -> None:
    config = {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}
    target = load_target(save(tmp_path, "gpt_oss", **config))
    assert (target.facts.attention, target.max_positions) == ("eager", 64)
