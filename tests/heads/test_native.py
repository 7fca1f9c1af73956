"""The native format: strict, complete, and bound to its target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file
from toy_heads import random_heads, save_for, saved_and_loaded

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.native import heads_fingerprint, load_heads, save_heads
from entmtp_calib.policy import Static
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import EMPTY, chain

VARIANTS = [
    {"kind": "hydra"},
    {"kind": "hydra", "prefix": True, "n_layers": 2, "draft_ids": [1, 4, 6]},
    {"kind": "medusa", "own_projection": True},
    {"kind": "medusa", "own_projection": True, "projection_bias": True, "n_layers": 2},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_heads_come_back_from_their_files(variant: dict, tmp_path: Path) -> None:
    target = toys.rand()
    heads = random_heads(target, **variant)
    loaded = saved_and_loaded(heads, target, tmp_path)
    assert loaded.config == heads.config
    for name, value in heads.state_dict().items():
        torch.testing.assert_close(
            loaded.state_dict()[name].float(), value.half().float(), atol=0, rtol=0
        )


def test_the_fingerprint_is_of_the_tensors(tmp_path: Path) -> None:
    target = toys.rand()
    a = heads_fingerprint(save_for(random_heads(target), target, tmp_path / "a"))
    b = heads_fingerprint(save_for(random_heads(target), target, tmp_path / "b"))
    c = heads_fingerprint(save_for(random_heads(target, seed=1), target, tmp_path / "c"))
    assert a == b != c


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    target = toys.rand()
    folder = save_for(random_heads(target), target, tmp_path / "heads")
    other = load_target(toys.save_rand(tmp_path / "other", seed=5))
    with pytest.raises(HeadsError, match="made for the target rand with fingerprint"):
        load_heads(folder, other)
    with pytest.raises(HeadsError, match="hidden size 32; expected hidden size 64"):
        load_heads(folder, toys.cycle())


def test_heads_whose_targets_fingerprint_nobody_knows_fit_by_their_sizes(tmp_path: Path) -> None:
    target = toys.rand()
    heads = random_heads(target, "medusa", own_projection=True)
    save_heads(heads, tmp_path, {"name": "theirs", "fingerprint": None}, {})
    assert load_heads(tmp_path, target).n_heads == heads.n_heads
    with pytest.raises(HeadsError, match=r"made for the target theirs with hidden size 32"):
        load_heads(tmp_path, toys.cycle())


def test_the_file_has_the_bytes_of_safetensors_own_writer(tmp_path: Path) -> None:
    target = toys.rand()
    heads = random_heads(target, prefix=True, draft_ids=[1, 2, 5], n_layers=2)
    folder = save_for(heads, target, tmp_path / "ours")
    tensors = {
        name: value.half() if value.is_floating_point() else value.int()
        for name, value in heads.state_dict().items()
    }
    save_file(tensors, tmp_path / "theirs.safetensors")
    ours = (folder / "heads.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_weights_that_the_targets_type_cannot_hold_are_refused(tmp_path: Path) -> None:
    target = load_target(toys.save_rand(tmp_path / "rand"), dtype="float16")
    folder = save_for(random_heads(target), target, tmp_path / "heads")
    tensors = {
        name: value.float() for name, value in load_file(folder / "heads.safetensors").items()
    }
    tensors["heads.0.first.linear.bias"][0] = 1e6
    save_file(tensors, folder / "heads.safetensors")
    with pytest.raises(HeadsError, match=r"not finite in torch.float16.*--dtype"):
        load_heads(folder, target)


def break_description(folder: Path) -> None:
    (folder / "heads.json").write_text("{")


def break_version(folder: Path) -> None:
    path = folder / "heads.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


def break_length(folder: Path) -> None:
    path = folder / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def break_values(folder: Path) -> None:
    tensors = load_file(folder / "heads.safetensors")
    tensors["heads.0.first.linear.bias"][0] = torch.nan
    save_file(tensors, folder / "heads.safetensors")


def break_names(folder: Path) -> None:
    tensors = load_file(folder / "heads.safetensors")
    tensors["surplus"] = tensors.pop("heads.0.first.linear.bias")
    save_file(tensors, folder / "heads.safetensors")


def break_shape(folder: Path) -> None:
    tensors = load_file(folder / "heads.safetensors")
    tensors["heads.0.first.linear.bias"] = torch.zeros(3)
    save_file(tensors, folder / "heads.safetensors")


def remove_everything(folder: Path) -> None:
    (folder / "heads.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_description, "heads.json cannot be read"),
        (break_version, "format version 99"),
        (break_length, "heads.safetensors cannot be read"),
        (break_values, "not finite"),
        (break_names, r"lacks \['heads.0.first.linear.bias'\] and has \['surplus'\]"),
        (break_shape, r"has shape \[3\]; expected shape \[32\]"),
        (remove_everything, "has no heads.json.*entmtp train-heads"),
    ],
)
def test_each_damage_has_its_line(damage, message: str, tmp_path: Path) -> None:
    target = toys.rand()
    folder = save_for(random_heads(target), target, tmp_path)
    damage(folder)
    with pytest.raises(HeadsError, match=message):
        load_heads(folder, target)


def damage_architecture(folder: Path) -> None:
    path = folder / "heads.json"
    description = json.loads(path.read_text())
    description["architecture"]["widths"] = 3
    path.write_text(json.dumps(description))


def replace_draft_ids(folder: Path, ids: list[int]) -> None:
    tensors = load_file(folder / "heads.safetensors")
    tensors["draft_ids"] = torch.tensor(ids, dtype=torch.int32)
    save_file(tensors, folder / "heads.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "heads.json").write_text("[]"), "format version None"),
        (lambda folder: (folder / "heads.json").write_text('{"format_version": 1}'), "describe"),
        (damage_architecture, "does not describe heads.*widths"),
        (lambda folder: replace_draft_ids(folder, [1, 2]), r"shape \[2\]; expected 3 token ids"),
        (lambda folder: replace_draft_ids(folder, [1, 2, 99_999]), "not 3 different tokens"),
        (lambda folder: replace_draft_ids(folder, [1, 2, 2]), "not 3 different tokens"),
    ],
)
def test_a_description_that_does_not_fit_has_its_line(damage, message: str, tmp_path: Path) -> None:
    target = toys.rand()
    folder = save_for(random_heads(target, draft_ids=[1, 4, 6]), target, tmp_path)
    damage(folder)
    with pytest.raises(HeadsError, match=message):
        load_heads(folder, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", [*VARIANTS, {"kind": "hydra", "prefix": True}], ids=str)
def test_heads_draft_for_a_target_of_any_type(variant: dict, dtype: str, tmp_path: Path) -> None:
    target = load_target(toys.save_rand(tmp_path / "rand"), dtype=dtype)
    heads = saved_and_loaded(random_heads(target, **variant), target, tmp_path / "heads")
    assert heads.dtype == target.dtype
    plain = Decoder(target, None, [EMPTY]).generate([2, 7, 1], Static(0), 12)
    drafted = Decoder(target, heads, [chain(2)]).generate([2, 7, 1], Static(0), 12)
    assert drafted.tokens == plain.tokens
