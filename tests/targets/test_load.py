"""load_target: choices, limits and identity of what is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import toys
from published_heads import pickle_weights
from safetensors.torch import load_file, save_file

from entmtp_calib.errors import ModelError
from entmtp_calib.targets import load
from entmtp_calib.targets.load import load_config, load_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save_rand(tmp_path_factory.mktemp("models") / "rand")


@pytest.mark.parametrize(
    ("choice", "fact"),
    [
        ({"device": "cuda:7"}, "device 'cuda:7' is not available"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"engine": "fast"}, "engine 'fast'"),
        ({"attention": "flash_attention_2"}, "attention 'flash_attention_2'.*eager or sdpa"),
        ({"engine": "lean", "dtype": "bfloat16"}, "lean engine cannot run"),
    ],
)
def test_a_choice_that_cannot_work_is_told(folder: Path, choice: dict[str, str], fact: str) -> None:
    with pytest.raises(ModelError, match=fact):
        load_target(folder, **choice)


@pytest.mark.parametrize("name", ["/no/such/folder", "no such model", "a/b/c", "model.safetensors"])
def test_a_model_that_is_nowhere_is_told_without_a_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=name.replace("/", ".")):
        load_target(name)


def refuse(*_arguments: Any, **_options: Any) -> str:
    raise ConnectionError("no route to the hub\nsecond line")


def test_a_hub_model_that_cannot_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"'org/model' is no local folder.*no route") as caught:
        load_target("org/model")
    assert "second line" not in str(caught.value)


def test_a_hub_model_is_fetched_at_its_revision_without_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    target = load_target("org/model@refs/pr/1")
    assert (asked["repo"], asked["revision"]) == ("org/model", "refs/pr/1")
    assert not any("bin" in pattern or "*.py" in pattern for pattern in asked["allow_patterns"])
    assert target.name == "org/model@refs/pr/1"


def test_pickled_weights_are_fetched_only_where_there_are_no_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []
    whole = pickle_weights(toys.save_rand(tmp_path / "whole"))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(_: str, **options: Any) -> str:
        fetched.append(options["allow_patterns"])
        for file in whole.iterdir():
            if file.suffix == ".json" or "pytorch_model*.bin" in fetched[-1]:
                shutil.copy(file, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_target("org/model").fingerprint == load_target(folder).fingerprint
    # The configuration, which may refuse the model; the usual weights; then the pickled ones.
    assert ["pytorch_model*.bin" in patterns for patterns in fetched] == [False, False, True]


def test_a_configuration_is_fetched_without_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []

    def download(_: str, **options: Any) -> str:
        fetched.append(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    name, config = load_config("org/model")
    assert (name, config.hidden_size, fetched) == ("org/model", 32, [["config.json"]])


def test_the_name_of_a_folder_is_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_target(".").name == "rand"


def test_every_stop_id_of_every_file_counts(tmp_path: Path) -> None:
    path = toys.save_cycle(tmp_path, config_eos=30, generation_eos=[40, 40], tokenizer_eos=4)
    assert load_target(path).eos_ids == {4, 30, 40}


def test_no_stop_id_anywhere_is_an_empty_set() -> None:
    assert toys.cycle().eos_ids == frozenset()


def test_a_tokenizer_from_elsewhere_can_be_given(folder: Path, tmp_path: Path) -> None:
    toys.word_tokenizer(12).save_pretrained(tmp_path)
    assert len(load_target(folder, tokenizer=tmp_path).tokenizer) == 12


def test_threads_never_exceed_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(load, "usable_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    load.limit_threads()
    monkeypatch.setattr(load, "usable_cores", lambda: 65)
    load.limit_threads()
    monkeypatch.undo()
    assert asked == [1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fingerprint_does_not_depend_on_how_weights_are_loaded(
    tmp_path: Path, stored: torch.dtype
) -> None:
    path = toys.save_rand(tmp_path, dtype=stored)
    own = str(stored).removeprefix("torch.")
    found = {load_target(path, dtype=dtype).fingerprint for dtype in ("float32", own)}
    found.add(load_target(path, engine="lean").fingerprint)
    assert len(found) == 1


def test_one_changed_weight_makes_another_target(folder: Path, tmp_path: Path) -> None:
    other = toys.save_rand(tmp_path)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert load_target(other).fingerprint != load_target(folder).fingerprint


def test_two_swapped_tokens_make_another_target(folder: Path, tmp_path: Path) -> None:
    other = toys.save_rand(tmp_path)
    file = other / "tokenizer.json"
    contents = json.loads(file.read_text())
    words = contents["model"]["vocab"]
    words["t3"], words["t4"] = words["t4"], words["t3"]
    file.write_text(json.dumps(contents))
    assert load_target(other).fingerprint != load_target(folder).fingerprint


def test_shards_do_not_change_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = toys.save_rand(tmp_path, max_shard_size="40KB")
    assert load_target(other).fingerprint == load_target(folder).fingerprint
