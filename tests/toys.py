"""Tiny real transformers whose answers can be worked out by hand; no download, milliseconds.

CYCLE: the next token is always the current one plus 1 (mod 64), by a logit gap of 160.
MARKOV: the next token's distribution given the current token is exactly a known table.
RAND: random weights, large enough for attention to matter, small enough to check by brute force.

Each `save_*` writes an ordinary model folder; `cycle()`, `markov()` and `rand()` are those folders,
loaded once per process. No toy has an EOS unless one is given to its `save_*`.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.network import quiet

CYCLE_VOCAB = 64
MARKOV_VOCAB = 8
RAND_VOCAB = 10


def markov_table() -> np.ndarray:
    """Row t of [8, 8]: probabilities of the token after t; every entry is at least 0.01."""
    weights = np.random.default_rng(7).gamma(0.7, size=(MARKOV_VOCAB, MARKOV_VOCAB))
    table = weights / weights.sum(axis=1, keepdims=True)
    return 0.01 + (1 - 0.01 * MARKOV_VOCAB) * table


def cycle_layer(shift: int) -> Tensor:
    """Output layer [64, 64] that says token t + shift (mod 64) after token t; shift 1 = the target.

    A Medusa head with a zero residual block and `cycle_layer(depth + 1)` is always right.
    """
    return 20.0 * torch.eye(CYCLE_VOCAB).roll(shift, dims=0)


def save_cycle(folder: Path, **options: Any) -> Path:
    """CYCLE, with its tokenizer, as a model folder. Options: see `_save`."""
    model = LlamaForCausalLM(_config(CYCLE_VOCAB, CYCLE_VOCAB, n_layers=1, max_positions=512))
    _make_lookup(model, cycle_layer(1))
    return _save(model, folder, **options)


def save_markov(folder: Path, **options: Any) -> Path:
    """MARKOV, with its tokenizer, as a model folder. Options: see `_save`."""
    model = LlamaForCausalLM(_config(MARKOV_VOCAB, MARKOV_VOCAB, n_layers=1, max_positions=512))
    log_table = torch.from_numpy(np.log(markov_table())).float()
    _make_lookup(model, log_table.T / MARKOV_VOCAB**0.5)
    return _save(model, folder, **options)


def save_rand(folder: Path, seed: int = 0, **options: Any) -> Path:
    """RAND, with its tokenizer, as a model folder.

    Args:
        seed: of the weights.
        options: of `_save`; others change the Llama configuration (`tie_word_embeddings=True`).
    """
    saving = {key: options.pop(key) for key in _SAVE_OPTIONS & options.keys()}
    config = _config(RAND_VOCAB, 32, n_layers=2, max_positions=128, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return _save(model, folder, **saving)


@functools.cache
def cycle() -> Target:
    return load_target(save_cycle(_scratch() / "cycle"))


@functools.cache
def markov() -> Target:
    return load_target(save_markov(_scratch() / "markov"))


@functools.cache
def rand() -> Target:
    return load_target(save_rand(_scratch() / "rand"))


def word_tokenizer(vocab_size: int, eos_id: int | None = None) -> PreTrainedTokenizerFast:
    """Words t0, t1, ... separated by spaces."""
    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos = None if eos_id is None else f"t{eos_id}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token=eos)


_SAVE_OPTIONS = {"config_eos", "generation_eos", "tokenizer_eos", "dtype", "max_shard_size"}


def _save(
    model: LlamaForCausalLM,
    folder: Path,
    *,
    config_eos: int | list[int] | None = None,
    generation_eos: int | list[int] | None = None,
    tokenizer_eos: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    model.config.eos_token_id = config_eos
    model.generation_config = GenerationConfig(eos_token_id=generation_eos)
    with quiet():
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        word_tokenizer(model.config.vocab_size, tokenizer_eos).save_pretrained(folder)
    return folder


def _config(
    vocab: int, hidden: int, n_layers: int, max_positions: int, **options: Any
) -> LlamaConfig:
    facts = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**{**facts, **options})


@torch.no_grad()
def _make_lookup(model: LlamaForCausalLM, output_layer: Tensor) -> None:
    """Layers that add nothing and one-hot embeddings: logits are a column of the output layer."""
    model.model.embed_tokens.weight.copy_(torch.eye(len(output_layer)))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    model.lm_head.weight.copy_(output_layer)


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="entmtp-toys-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
