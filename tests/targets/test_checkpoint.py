"""Damaged, foreign and hostile model folders: one line each, never random weights, no code run."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toys
from published_heads import pickle_weights
from safetensors.torch import load_file, save_file

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.load import load_target

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = toys.save_rand(tmp_path / "rand", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def last_shard(folder: Path) -> Path:
    return max(folder.glob("model-*.safetensors"))


def header_size(path: Path) -> int:
    return struct.unpack("<Q", path.read_bytes()[:8])[0]


def delete(path: Path) -> None:
    path.unlink()


def cut_one_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_behind_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 8 + header_size(path)])


def cut_inside_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def claim_ten_terabytes(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 10**13) + path.read_bytes()[8:])


def garble_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"?" + data[9:])


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (delete, "No such file"),
        (cut_one_byte, "bytes by its header"),
        (cut_behind_header, "bytes by its header"),
        (cut_inside_header, "cut off"),
        (empty, "cut off"),
        (replace_by_pointer, "git lfs pull"),
        (claim_ten_terabytes, "header of 10000000000000 bytes"),
        (garble_header, "not valid JSON"),
    ],
)
def test_a_damaged_shard_is_named(sharded: Path, damage: Callable[[Path], None], fact: str) -> None:
    shard = last_shard(sharded)
    damage(shard)
    with pytest.raises(ModelError, match=fact) as caught:
        load_target(sharded)
    assert shard.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_missing_from_shard_and_index_is_never_initialized(sharded: Path) -> None:
    shard, index = last_shard(sharded), sharded / INDEX
    tensors = load_file(shard)
    dropped = min(tensors)
    save_file({k: v for k, v in tensors.items() if k != dropped}, shard, {"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 tensors of the index"):
        load_target(sharded)
    contents = json.loads(index.read_text())
    del contents["weight_map"][dropped]
    index.write_text(json.dumps(contents))
    with pytest.raises(ModelError, match="lacks 1 weights") as caught:
        load_target(sharded)
    assert dropped in str(caught.value)


def test_a_missing_untied_output_layer_is_not_taken_for_tied(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="lm_head"):
        load_target(folder)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_target(folder)


def test_the_index_wins_over_an_unrelated_single_file(sharded: Path, tmp_path: Path) -> None:
    expected = load_target(sharded).fingerprint
    other = toys.save_rand(tmp_path / "other", seed=1)
    (other / "model.safetensors").rename(sharded / "model.safetensors")
    assert load_target(sharded).fingerprint == expected


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_pickled_weights_are_read_as_tensors_alone(tmp_path: Path, max_shard_size: str) -> None:
    folder = toys.save_rand(tmp_path / "rand", max_shard_size=max_shard_size)
    expected = load_target(folder).fingerprint
    assert load_target(pickle_weights(folder)).fingerprint == expected


def test_pickled_weights_that_hold_more_are_never_opened(tmp_path: Path) -> None:
    folder = pickle_weights(toys.save_rand(tmp_path / "rand"))
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return (open, (str(marker), "w"))

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"weights may hold tensors alone; .*safetensors"):
        load_target(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (delete, "No such file"),
        (empty, "empty or cut off"),
        (cut_one_byte, "empty or cut off"),
        (replace_by_pointer, "git lfs pull"),
    ],
)
def test_a_damaged_pickled_shard_is_named(
    sharded: Path, damage: Callable[[Path], None], fact: str
) -> None:
    shard = max(pickle_weights(sharded).glob("pytorch_model-*.bin"))
    damage(shard)
    with pytest.raises(ModelError, match=rf"{shard.name}.*{fact}"):
        load_target(sharded)


def test_a_missing_pickled_weight_is_never_initialized(tmp_path: Path) -> None:
    file = pickle_weights(toys.save_rand(tmp_path / "rand")) / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    del tensors["model.norm.weight"]
    torch.save(tensors, file)
    with pytest.raises(ModelError, match=r"lacks 1 weights.*model.norm.weight"):
        load_target(tmp_path / "rand")


def test_weights_of_another_format_are_told(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path / "rand")
    (folder / "model.safetensors").rename(folder / "consolidated.00.pth")
    with pytest.raises(ModelError, match=r"consolidated.00.pth.*expected model.safetensors"):
        load_target(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, file: str) -> None:
    folder = toys.save_rand(tmp_path / "vicuna-7b-v1.3")
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: ...\n")
    contents = json.loads((folder / file).read_text())
    contents["auto_map"] = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    }
    contents.update({"model_type": "evil"} if file == "config.json" else {})
    (folder / file).write_text(json.dumps(contents))
    try:
        load_target(folder)
    except ModelError as error:
        assert "never run" in str(error)  # noqa: PT017 (a known family may load without its code)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("contents", "fact"),
    [
        ("", "not valid JSON"),
        ("[1]", "holds a JSON list"),
        ("{}", "names no model_type"),
        ('{"model_type": "nobody-knows"}', "nobody-knows"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "cannot be loaded"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantized weights"),
    ],
)
def test_a_wrong_configuration_is_told(tmp_path: Path, contents: str, fact: str) -> None:
    folder = toys.save_rand(tmp_path)
    (folder / "config.json").write_text(contents)
    with pytest.raises(ModelError, match=fact) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_model_or_tokenizer_is_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(ModelError, match=r"config.json: No such file"):
            load_target(folder)
        toys.save_rand(Path(folder))
        for file in Path(folder).glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ModelError, match="has no tokenizer"):
            load_target(folder)
