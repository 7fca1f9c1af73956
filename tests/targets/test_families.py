"""Families of models: those that verify trees, and those that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import published_configs
import pytest
import torch
import toys
import transformers

from entmtp_calib.errors import DataError, ModelError
from entmtp_calib.targets.facts import position_limit, rope_theta
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
        ("gpt2", GPT2),
        ("gpt_neox", SMALL),
        ("granite", {**SMALL, "logits_scaling": 4.0}),
        ("olmo3", {**SMALL, "sliding_window": 4}),
    ],
)
def test_a_family_verifies_trees_and_keeps_its_own_logits(
    tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """Some that `test_lossless_families` does not have."""
    target = load_target(save(tmp_path, family, **config))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    cache = target.new_cache(8)
    hidden = [target.forward(ids[:3], range(3), cache)]
    cache.commit(range(3))
    hidden.append(target.forward(ids[3:], range(3, 8), cache))
    found = target.logits(torch.cat(hidden))
    expected = target.model(input_ids=torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() < 1e-3
    assert target.facts.family == family


STATE = "layers with a state, out of which a rejected token cannot be taken"
NO_POSITIONS = "it takes no positions, or no cache of keys and values"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # state spaces and other recurrences, alone or between attention layers
    "mamba": ({}, STATE),
    "mamba2": ({}, STATE),
    "falcon_mamba": ({}, STATE),
    "rwkv": ({}, STATE),
    "xlstm": ({}, STATE),
    "recurrent_gemma": ({}, STATE),
    "jamba": ({}, STATE),
    "bamba": ({}, STATE),
    "zamba2": ({}, STATE),
    "falcon_h1": ({}, STATE),
    "nemotron_h": ({}, STATE),
    "granitemoehybrid": ({}, STATE),
    # linear attention and convolutions
    "qwen3_next": ({}, STATE),
    "qwen3_5_text": ({}, STATE),
    "kimi_linear": ({}, STATE),
    "olmo_hybrid": ({}, STATE),
    "minimax": ({}, "layers linear_attention, which are no plain attention"),
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "layers conv, which are no plain attention",
    ),
    # attention that chooses what it sees, under the names of two releases
    "deepseek_v32": ({}, "layers (indexed|deepseek_sparse)_attention, which are no plain"),
    # a cache that cannot hold their layers
    "gemma4_text": ({}, "layers of different shapes"),
    # positions that cannot be given
    "bloom": ({}, NO_POSITIONS),
    "mpt": ({}, NO_POSITIONS),
    "falcon": ({"alibi": True}, "ALiBi, which counts rows where trees have depths"),
    "xlnet": ({}, NO_POSITIONS),
    "openai-gpt": ({}, NO_POSITIONS),
    # no decoder alone
    "t5": ({}, "encoder and decoder"),
    "bart": ({}, "encoder and decoder"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_verify_trees_is_refused_by_its_configuration_alone(
    tmp_path: Path, family: str
) -> None:
    config, reason = REFUSED[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **config}))
    with pytest.raises(ModelError, match=rf"^model family '{family}' \({reason}"):
        load_target(tmp_path)


def test_of_a_family_that_is_refused_nothing_but_the_configuration_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    fetched: list[list[str]] = []

    def download(_: str, **options: Any) -> str:
        fetched.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match="model family 'mamba'"):
        load_target("state-spaces/mamba-130m-hf")
    assert fetched == [["config.json"]]


def test_attention_in_both_directions_is_found_out_at_load(tmp_path: Path) -> None:
    config = {**SMALL, "pad_token_id": 0}
    with pytest.raises(ModelError, match=r"model family 'bert'.*computes other logits"):
        load_target(save(tmp_path, "bert", **config))


def test_a_model_whose_code_fails_under_a_tree_is_refused_by_name(tmp_path: Path) -> None:
    """XLM counts the tokens of a mask that has four dimensions here."""
    config = {"vocab_size": 32, "emb_dim": 32, "n_layers": 1, "n_heads": 4, "causal": True}
    with pytest.raises(ModelError, match=r"model family 'xlm' \(.*\) cannot verify trees"):
        load_target(save(tmp_path, "xlm", **config))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss", "phi3"])
def test_a_sliding_window_is_no_limit_of_positions(tmp_path: Path, name: str) -> None:
    target = load_target(published_configs.save(name, tmp_path), engine="transformers")
    text = target.config.get_text_config()
    assert text.sliding_window == published_configs.WINDOW  # as before the check at load
    assert (target.max_positions, target.facts.limited_by) == (
        published_configs.MAX_POSITIONS,
        None,
    )


@pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
def test_a_sliding_window_limits_the_positions_of_the_lean_engine(tmp_path: Path) -> None:
    target = load_target(published_configs.save("mistral", tmp_path), engine="lean")
    assert target.max_positions == published_configs.WINDOW
    window = (
        r"1 to 11 tokens .*\(limited by its sliding window, which .*or use --engine transformers"
    )
    with pytest.raises(DataError, match=window):
        target.room([1] * 12)


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    options = {**SMALL, "sliding_window": 32, "use_sliding_window": False}
    target = load_target(save(tmp_path, "qwen2", **options))
    assert (target.max_positions, target.facts.limited_by) == (64, None)


@pytest.mark.parametrize("kinds", [False, True], ids=["one rope", "a rope for each kind of layer"])
def test_rotary_embeddings_that_depend_on_length_end_at_the_original_length(kinds: bool) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    plain = {"rope_type": "default"}
    parameters = {"full_attention": rope, "sliding_attention": plain} if kinds else rope
    config = transformers.LlamaConfig(**SMALL)
    config.rope_parameters = parameters
    limit, reason = position_limit(config, windows=True)
    assert (limit, reason) == (32, "its rotary embeddings, which change for longer texts")


@pytest.mark.parametrize(
    ("name", "theta"), [("llama3", 500_000.0), ("gemma3", 1_000_000.0), ("mistral", 10_000.0)]
)
def test_the_rope_of_layers_that_see_every_position_is_found(name: str, theta: float) -> None:
    config = transformers.AutoConfig.for_model(**json.loads(published_configs.MODELS[name].json()))
    assert rope_theta(config.get_text_config()) == theta


def test_a_longrope_model_is_limited_to_its_short_range(tmp_path: Path) -> None:
    target = load_target(published_configs.save("phi3-long", tmp_path))
    assert target.max_positions == published_configs.MAX_POSITIONS
    assert target.config.max_position_embeddings == 32 * published_configs.MAX_POSITIONS
    with pytest.raises(DataError, match=r"1 to 95 tokens .*\(limited by its rotary embeddings"):
        target.room([1] * 96)


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_soft_caps_and_attention_sinks_fall_back_to_eager(tmp_path: Path, name: str) -> None:
    assert load_target(published_configs.save(name, tmp_path)).facts.attention == "eager"
