"""Files that are no heads we can draft with: each has its own line, and no code is run."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from published_heads import (
    HYDRA_CONFIG,
    HYDRA_PT,
    HYDRA_SAFE,
    MEDUSA_CONFIG,
    MEDUSA_PT,
    State,
    hydra_state,
    medusa_state,
    save_heads_file,
)

from entmtp_calib.errors import HeadsError, ModelError
from entmtp_calib.stages.import_heads import import_heads


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of RAND, the model that all heads here claim to be for."""
    return toys.save_rand(tmp_path_factory.mktemp("base") / "rand")


def hydra(folder: Path, **changes: Any) -> Path:
    return save_heads_file(folder, HYDRA_PT, hydra_state(**changes), HYDRA_CONFIG)


def medusa(folder: Path, **changes: Any) -> Path:
    return save_heads_file(folder, MEDUSA_PT, medusa_state(**changes), MEDUSA_CONFIG)


def changed(change: Callable[[State], Any], state: State | None = None) -> Callable[[Path], Path]:
    """Hydra heads, or others, after a change of their tensors."""

    def save(folder: Path) -> Path:
        tensors = hydra_state() if state is None else dict(state)
        change(tensors)
        return save_heads_file(folder, HYDRA_PT, tensors, HYDRA_CONFIG)

    return save


def untie(state: State) -> None:
    weight = state["hydra_mlp.2.7.linear.weight"].clone()
    weight[3, 4] += 1
    state["hydra_mlp.2.7.linear.weight"] = weight


def poison(state: State) -> None:
    state["hydra_lm_head.3.1.bias"][5] = torch.inf


def quantize(state: State) -> None:
    name = "hydra_lm_head.1.1.weight"
    state[name] = state[name].to(torch.int8)


def narrow(state: State) -> None:
    name = "hydra_lm_head.1.1.weight"
    state[name] = state[name][:, :30]


def plain_model(folder: Path) -> Path:
    return toys.save_rand(folder)


def sharded_model(folder: Path) -> Path:
    return toys.save_rand(folder, max_shard_size="10KB")


def empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def write(data: bytes) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        folder.mkdir()
        (folder / HYDRA_PT).write_bytes(data)
        return folder

    return save


def legacy_file() -> bytes:
    buffer = io.BytesIO()
    torch.save(medusa_state(), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def cut_file() -> bytes:
    buffer = io.BytesIO()
    torch.save(medusa_state(), buffer)
    return buffer.getvalue()[:-2000]


def cut_safetensors(folder: Path) -> Path:
    save_heads_file(folder, HYDRA_SAFE, hydra_state(), HYDRA_CONFIG)
    (folder / HYDRA_SAFE).write_bytes((folder / HYDRA_SAFE).read_bytes()[:-1])
    return folder


def nested(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"state_dict": medusa_state(), "step": 3}, folder / HYDRA_PT)
    return folder


def other_architecture(arch: str, names: list[str]) -> Callable[[Path], Path]:
    state = {name: torch.zeros(4, 4) for name in names}
    return lambda folder: save_heads_file(
        folder, HYDRA_PT, state, {**HYDRA_CONFIG, "hydra_head_arch": arch}
    )


CROSS = [
    "input_embed_fn.weight",
    "lm_head.weight",
    "cross_attn.q_proj.weight",
    "mlp.up_proj.weight",
]
EAGLE = ["input_embed_fn.weight", "lm_head.weight", "attn.self_attn.q_proj.weight", "fc.weight"]
ADAPTER = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("save", "fact"),
    [
        (empty_folder, "holds no heads; expected heads.json with heads.safetensors, hydra_lm_head"),
        (plain_model, "is a language model without heads.*--model"),
        (sharded_model, "is a language model without heads.*--model"),
        (
            lambda f: save_heads_file(f, HYDRA_PT, ADAPTER, None),
            "is a language model without heads",
        ),
        (
            lambda f: save_heads_file(f, HYDRA_PT, {"fc.weight": torch.zeros(2)}, None),
            r"\(fc.weight\)",
        ),
        (write(b""), "is empty or cut off"),
        (write(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (write(legacy_file()), r"legacy layout of torch.save.*weights_only=True"),
        (write(cut_file()), "is empty or cut off"),
        (cut_safetensors, "bytes by its header.*again"),
        (nested, "holds no named tensors; expected a state_dict"),
        (other_architecture("cross-attn", CROSS), "of the architecture cross-attn; expected mlp"),
        (other_architecture("eagle-attn", EAGLE), "of the architecture eagle-attn; expected mlp"),
        (other_architecture("cross-attn", ["x"]), "of the architecture cross-attn"),
        (changed(untie), r"hydra_mlp.2.3.linear.weight and hydra_mlp.2.7.linear.weight differ"),
        (changed(poison), r"hydra_lm_head.3.1.bias holds values that are not finite"),
        (changed(quantize), r"hydra_lm_head.1.1.weight is torch.int8; expected torch.float32"),
        (changed(narrow), r"hydra_lm_head.1.1.weight has shape \[10, 30\]; expected .*\[10, 32\]"),
        (changed(lambda s: s.pop("hydra_mlp.1.1.linear.bias")), "heads.1.first.linear.bias.*miss"),
        (changed(lambda s: s.pop("hydra_mlp.1.5.linear.bias")), "heads 0, 1, 2, 3 of 0 or 4 whole"),
        (changed(lambda s: s.pop("hydra_lm_head.0.1.weight")), "lacks a weight of its first head"),
        (changed(lambda s: s.pop("prefix_embeding_layer.norm.weight")), "prefix.norm.weight"),
        (changed(lambda s: s.update(extra=torch.zeros(2))), "no place for the tensor extra"),
        (
            changed(lambda s: s.update({"hydra_mlp.0.1.gate.weight": torch.zeros(2)})),
            "no place for the tensor hydra_mlp.0.1.gate.weight",
        ),
        (
            changed(lambda s: s.pop("1.1.weight"), medusa_state()),
            "lacks the tensor that is heads.1.projection.weight here",
        ),
        (
            changed(lambda s: s.update({"2.2.weight": s.pop("2.1.weight")}), medusa_state()),
            "projection at index 2 of a head; expected index 1",
        ),
        (
            changed(lambda s: [s.pop(n) for n in list(s) if n[0] == "1"], medusa_state()),
            "heads 0, 2, 3, 4 of 1 whole layers; expected heads from 0 on",
        ),
        (
            changed(lambda s: s.update(h=torch.zeros(1)), medusa_state()),
            "no place for the tensor h; expected those of Medusa",
        ),
        (lambda f: hydra(f, h=16), "heads for hidden size 16; expected hidden size 32"),
        (lambda f: hydra(f, v=12), "heads for vocabulary size 12; expected vocabulary size 10"),
        (lambda f: medusa(f, h=16), "heads for hidden size 16; expected hidden size 32"),
        (lambda f: medusa(f, v=12), "heads for vocabulary size 12; expected vocabulary size 10"),
    ],
)
def test_what_cannot_be_read_has_its_own_line(
    save: Callable[[Path], Path], fact: str, base: Path, tmp_path: Path
) -> None:
    source = save(tmp_path / "published")
    with pytest.raises(HeadsError, match=fact) as caught:
        import_heads(str(source), tmp_path / "out", str(base))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "heads.json").exists()
    assert not (tmp_path / "out" / "heads.safetensors").exists()


def test_hydra_heads_on_other_hidden_states_are_refused(base: Path, tmp_path: Path) -> None:
    config = {**HYDRA_CONFIG, "hidden_state_offset": 1}
    source = save_heads_file(tmp_path / "h", HYDRA_PT, hydra_state(), config)
    with pytest.raises(HeadsError, match="hidden states 1 layers before the last"):
        import_heads(str(source), tmp_path / "out", str(base))


def test_ungrounded_hydra_heads_are_refused_whatever_config_json_says(tmp_path: Path) -> None:
    state = hydra_state("mlp", n_layers=2)
    for i in range(4):
        for kind in ("weight", "bias"):
            del state[f"hydra_mlp.{i}.0.res_connection.{kind}"]
            state[f"hydra_mlp.{i}.0.linear.{kind}"] = state[f"hydra_mlp.{i}.1.linear.{kind}"]
    source = save_heads_file(tmp_path / "published", HYDRA_PT, state, HYDRA_CONFIG)
    with pytest.raises(HeadsError, match="ungrounded"):
        import_heads(str(source), tmp_path / "out")


def test_a_prefix_layer_after_a_model_with_scaled_positions_is_refused(tmp_path: Path) -> None:
    scaled = toys.save_rand(
        tmp_path / "rand",
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    )
    with pytest.raises(HeadsError, match="rope_type is linear"):
        import_heads(str(hydra(tmp_path / "h")), tmp_path / "out", str(scaled))


def test_a_prefix_layer_needs_the_attention_heads_of_its_model(tmp_path: Path) -> None:
    other = toys.save_rand(tmp_path / "rand", num_attention_heads=2)
    with pytest.raises(HeadsError, match="attention heads of 8 dimensions; expected 16"):
        import_heads(str(hydra(tmp_path / "h")), tmp_path / "out", str(other))


def test_a_pickle_that_could_run_code_is_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
            return (open, (str(marker), "w"))

    torch.save({"0.0.linear.weight": Evil()}, tmp_path / MEDUSA_PT)
    with pytest.raises(HeadsError, match="holds more than tensors, which could run code"):
        import_heads(str(tmp_path), tmp_path / "out")
    (tmp_path / MEDUSA_PT).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(HeadsError, match="legacy layout"):
        import_heads(str(tmp_path), tmp_path / "out")
    assert not marker.exists()


def test_heads_without_a_named_model_ask_for_one(tmp_path: Path) -> None:
    source = save_heads_file(tmp_path / "p", HYDRA_PT, hydra_state(), None)
    with pytest.raises(HeadsError, match=r"does not name the model.*pass --model"):
        import_heads(str(source), tmp_path / "out")
    config = {**HYDRA_CONFIG, "base_model_name_or_path": "/home/them/vicuna"}
    save_heads_file(source, HYDRA_PT, hydra_state(), config)
    with pytest.raises(ModelError, match=r"/home/them/vicuna.* names it as the model.*--model"):
        import_heads(str(source), tmp_path / "out")


def test_the_configuration_alone_of_their_model_is_enough(base: Path, tmp_path: Path) -> None:
    source = save_heads_file(tmp_path / "p", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((base / "config.json").read_bytes())
    assert import_heads(str(source), tmp_path / "out", str(model)).n_heads == 4
