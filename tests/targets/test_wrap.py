"""A transformers model that is loaded already, as a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from toy_heads import random_heads, save_for
from transformers import AutoModelForCausalLM

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import ModelError
from entmtp_calib.heads.native import load_heads
from entmtp_calib.policy import Static
from entmtp_calib.targets.load import load_target, wrap_model
from entmtp_calib.targets.network import quiet
from entmtp_calib.tree import chain

PROMPT = [1, 2, 3, 4]


def network(folder: Path, **options: Any) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(toys.save_rand(folder), **options)


def test_it_is_the_target_that_loading_its_folder_gives(tmp_path: Path) -> None:
    model = network(tmp_path / "model")
    loaded = load_target(tmp_path / "model")
    wrapped = wrap_model(model, loaded.tokenizer)
    assert wrapped.facts == loaded.facts
    assert wrapped.model is model
    heads = load_heads(save_for(random_heads(loaded), loaded, tmp_path / "heads"), wrapped)
    generated = Decoder(wrapped, heads, [chain(3)]).generate(PROMPT, Static(0), 30)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=30, pad_token_id=0)
    assert generated.tokens == plain[0, 4:].tolist()


@pytest.mark.parametrize("engine", ["transformers", "lean"])
def test_the_model_stays_as_it_was(tmp_path: Path, engine: str) -> None:
    model = network(tmp_path / "model")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        wrapped = wrap_model(model, toys.word_tokenizer(10), engine=engine)
    except ModelError as error:
        pytest.skip(str(error))
    assert wrapped.engine == engine
    Decoder(wrapped, None, [chain(0)]).generate(PROMPT, Static(0), 5)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_training_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.eval"):
        wrap_model(network(tmp_path / "model").train(), toys.word_tokenizer(10))


def test_attention_that_takes_no_mask_of_ours_is_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "model")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="flash_attention_2"):
        wrap_model(model, toys.word_tokenizer(10))


def test_a_model_that_is_spread_or_not_there_is_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "model")
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="cpu, meta"):
        wrap_model(model, toys.word_tokenizer(10))
    with pytest.raises(ModelError, match="on meta"):
        wrap_model(model.to("meta"), toys.word_tokenizer(10))
