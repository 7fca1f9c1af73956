"""Checkpoints in exactly the form that Hydra and Medusa heads are published in, small.

Names, nesting, types, tying, and config.json with its wrong numbers are those of the published
repositories (zankner/Hydra, FasterDecoding/Medusa, vLLM's conversions); sizes are RAND's. Each
`save_*` returns the tensors that it wrote, by the names in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import toys
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceTrainer
from torch import Tensor

from entmtp_calib.heads.model import Heads
from entmtp_calib.heads.native import load_heads
from entmtp_calib.stages.import_heads import Imported, import_heads

State = dict[str, Tensor]
HYDRA_PT, HYDRA_SAFE = "hydra_lm_head.pt", "hydra_lm_head.safetensors"
MEDUSA_PT, MEDUSA_SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
H, V, INNER = 32, toys.RAND_VOCAB, 24
VICUNA_VOCAB = 320
HYDRA_CONFIG = {
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_head_arch": "prefix-mlp",
    "hydra_num_heads": 4,
    "hydra_num_layers": 4,
    "transformers_version": "4.33.2",
}
MEDUSA_CONFIG = {  # the number of heads is wrong in the published file too
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}


class _Maker:
    """Random tensors, the same ones every time."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, scale: float = 0.3) -> Tensor:
        values = scale * torch.randn(*shape, generator=self._generator)
        return values.to(self._dtype)

    def norm(self) -> Tensor:
        return 1 + self(H)


def hydra_state(
    arch: str = "prefix-mlp",
    n_heads: int = 4,
    n_layers: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    h: int = H,
    v: int = V,
) -> State:
    """The state_dict that Hydra's training saves; later blocks are one storage under all names."""
    make = _Maker(0, dtype)
    has_prefix = arch == "prefix-mlp"
    state = prefix_state(make) if has_prefix else {}
    state["input_embed_fn.weight"] = make(v, h)
    for i in range(n_heads):
        step, first = (2, 1) if has_prefix else (1, 0)  # indices of Dropout modules are left out
        for name in ("linear", "res_connection"):
            state[f"hydra_mlp.{i}.{first}.{name}.weight"] = make(h, (i + 2) * h, scale=0.1)
            state[f"hydra_mlp.{i}.{first}.{name}.bias"] = make(h)
        weight, bias = make(h, h), make(h)
        for layer in range(1, n_layers):
            state[f"hydra_mlp.{i}.{first + step * layer}.linear.weight"] = weight
            state[f"hydra_mlp.{i}.{first + step * layer}.linear.bias"] = bias
        projection = f"hydra_lm_head.{i}{'.1' if has_prefix else ''}"
        state[f"{projection}.weight"], state[f"{projection}.bias"] = make(v, h), make(v)
    return state


def prefix_state(make: _Maker) -> State:
    """A whole LlamaModel of one layer, with a table of embeddings that is never used."""
    layer = "prefix_embeding_layer.layers.0"
    head_dim = H // 4
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    return {
        "prefix_embeding_layer.embed_tokens.weight": make(V, H),
        f"{layer}.self_attn.q_proj.weight": make(H, H),
        f"{layer}.self_attn.k_proj.weight": make(2 * head_dim, H),
        f"{layer}.self_attn.v_proj.weight": make(2 * head_dim, H),
        f"{layer}.self_attn.o_proj.weight": make(H, H),
        f"{layer}.self_attn.rotary_emb.inv_freq": frequencies.bfloat16(),
        f"{layer}.mlp.gate_proj.weight": make(INNER, H),
        f"{layer}.mlp.up_proj.weight": make(INNER, H),
        f"{layer}.mlp.down_proj.weight": make(H, INNER),
        f"{layer}.input_layernorm.weight": make.norm(),
        f"{layer}.post_attention_layernorm.weight": make.norm(),
        "prefix_embeding_layer.norm.weight": make.norm(),
    }


def medusa_state(
    n_heads: int = 5,
    n_layers: int = 1,
    own_projection: bool = True,
    biases: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    h: int = H,
    v: int = V,
) -> State:
    """The state_dict that Medusa's training saves; with more layers one block under all names."""
    make = _Maker(1, dtype)
    state: State = {}
    for i in range(n_heads):
        weight, bias = make(h, h), make(h)
        for layer in range(n_layers):
            state[f"{i}.{layer}.linear.weight"] = weight
            if biases:
                state[f"{i}.{layer}.linear.bias"] = bias
        if own_projection:
            state[f"{i}.{n_layers}.weight"] = make(v, h)
    return state


def in_vllm_names(state: State) -> State:
    """What vLLM's conversions call the tensors of Medusa heads."""
    renamed = {}
    for name, value in state.items():
        head, layer, *rest = name.split(".")
        if rest[0] == "linear":
            renamed[f"blocks.{head}.layers.{layer}.{rest[1]}"] = value
        else:
            renamed[f"lm_heads.{head}.weight"] = value
    return renamed


def save_heads_file(folder: Path, name: str, state: State, config: dict[str, Any] | None) -> Path:
    """One file of heads, as .pt or safetensors (which wants every tensor to be its own)."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file({key: value.clone() for key, value in state.items()}, folder / name)
    else:
        torch.save(state, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_medusa2(folder: Path, state: State, pickled: bool) -> Path:
    """A fine-tuned model in shards, with the heads among its weights; half precision throughout."""
    toys.save_rand(folder, dtype=torch.float16, max_shard_size="10KB")
    index_file = folder / "model.safetensors.index.json"
    weight_map = json.loads(index_file.read_text())["weight_map"]
    heads = {f"medusa_head.{name}": value.clone() for name, value in state.items()}
    half = len(heads) // 2
    shards = {
        "model-heads-1.safetensors": dict(list(heads.items())[:half]),
        "model-heads-2.safetensors": dict(list(heads.items())[half:]),
    }
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if pickled:
        pickle_weights(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pickle_weights(folder: Path) -> Path:
    """Turn a model's safetensors files into pytorch_model*.bin, as older repositories have them."""
    names = {}
    for file in sorted(folder.glob("*.safetensors")):
        names[file.name] = file.name.replace("model", "pytorch_model", 1).replace(
            ".safetensors", ".bin"
        )
        torch.save(load_file(file), folder / names[file.name])
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        contents = json.loads(index.read_text())
        contents["weight_map"] = {n: names[f] for n, f in contents["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(contents))
        index.unlink()
    return folder


def save_vicuna(folder: Path) -> Path:
    """A small model in the files of lmsys/vicuna-7b-v1.3: .bin shards, and no tokenizer.json."""
    toys.save_rand(
        folder,
        vocab_size=VICUNA_VOCAB,
        max_position_embeddings=2048,
        dtype=torch.float16,
        max_shard_size="30KB",
        config_eos=2,
        generation_eos=2,
    )
    pickle_weights(folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    for added_since in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias", "dtype"):
        config.pop(added_since, None)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    sentences = ["The assistant gives helpful answers to the USER", "0123456789 .,:?!' ASSISTANT"]
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 9),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=VICUNA_VOCAB,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({**ends, "pad_token": "<unk>"}))
    described = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **ends}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def imported(source: Path | str, out: Path, base: Path | None) -> tuple[Imported, Heads]:
    """The heads through import-heads and their files, computing in float32 for RAND."""
    found = import_heads(str(source), out, None if base is None else str(base))
    with mock.patch.object(Heads, "pack"):  # float16 would hide small differences
        return found, load_heads(out, toys.rand())
