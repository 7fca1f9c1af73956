"""GGUF files: the same tokens and logits as the folder they came from, or one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import toys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.network import convert_gguf

SPECIAL = ["<s>", "</s>"]
WORDS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ll", "Ġw", "or", "ld"]
MERGES = [("l", "l"), ("Ġ", "w"), ("o", "r"), ("l", "d")]
TEXTS = ["Hello world! Café déjà vu — 123 😊", "  two spaces\n\nand lines", "a <s>literal</s> b"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Query or key weights with rotary pairs as neighbors, as GGUF keeps them for Llama."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, target: Target, architecture: str = "llama") -> Path:
    """RAND and the byte tokenizer as a float32 GGUF file."""
    config = target.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if word in SPECIAL else normal for word in WORDS])
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in target.model.state_dict().items():
        if name.endswith("q_proj.weight"):
            weight = interleaved(weight, config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            weight = interleaved(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toys.save_rand(tmp_path_factory.mktemp("original"), vocab_size=len(WORDS))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    byte_tokenizer().save_pretrained(folder)
    return load_target(folder)


@pytest.fixture(scope="module")
def file(original: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "rand.gguf", original)


def logits(target: Target) -> Tensor:
    ids = [7 * i % 250 for i in range(20)]
    return target.logits(target.forward(ids, range(20), target.new_cache(20)))


def encoded(target: Target) -> list[list[int]]:
    return [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]


def test_a_file_has_the_ids_and_logits_of_its_folder(original: Target, file: Path) -> None:
    target = load_target(file)
    assert target.name == "rand"
    assert target.max_positions == 128
    assert encoded(target) == encoded(original)
    assert target.tokenizer.chat_template == TEMPLATE
    assert target.eos_ids == {1}
    assert (logits(target) - logits(original)).abs().max() < 1e-4


def test_a_converted_file_is_an_ordinary_folder(file: Path, tmp_path: Path) -> None:
    convert_gguf(file, tmp_path / "made")
    direct, made = load_target(file), load_target(tmp_path / "made")
    assert made.fingerprint == direct.fingerprint
    assert torch.equal(logits(made), logits(direct))
    assert encoded(made) == encoded(direct)


def cut(file: Path, folder: Path) -> Path:
    path = folder / "half.gguf"
    path.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return path


def replace(_file: Path, folder: Path) -> Path:
    path = folder / "text.gguf"
    path.write_text("not a model at all, only a few words that someone renamed to this file name")
    return path


def split(file: Path, folder: Path) -> Path:
    path = folder / "rand-00001-of-00002.gguf"
    path.write_bytes(file.read_bytes())
    return path


def missing(_file: Path, folder: Path) -> Path:
    return folder / "nowhere.gguf"


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (cut, "cannot be loaded"),
        (replace, "not a GGUF file"),
        (split, "llama-gguf-split --merge"),
        (missing, "No such file"),
    ],
)
def test_a_bad_file_is_one_line(file: Path, tmp_path: Path, make: Any, fact: str) -> None:
    path = make(file, tmp_path)
    with pytest.raises(ModelError, match=fact) as caught:
        load_target(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_one_line(original: Target, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", original, architecture="nobody-knows")
    with pytest.raises(ModelError, match="nobody-knows"):
        load_target(path)
