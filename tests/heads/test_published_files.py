"""Where published heads are found: folders, files, the hub; and what is fetched."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import toys
from published_heads import (
    HYDRA_CONFIG,
    HYDRA_PT,
    MEDUSA_CONFIG,
    MEDUSA_PT,
    MEDUSA_SAFE,
    VICUNA_VOCAB,
    hydra_state,
    imported,
    in_vllm_names,
    medusa_state,
    save_heads_file,
    save_medusa2,
    save_vicuna,
)

from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import HeadsError
from entmtp_calib.policy import Static
from entmtp_calib.prompts import encode, resolve_mode
from entmtp_calib.stages.import_heads import import_heads
from entmtp_calib.stages.setup import open_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import EMPTY, chain


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of RAND."""
    return toys.save_rand(tmp_path_factory.mktemp("base") / "rand")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub whose repositories are folders; what is fetched lands in a snapshot, by patterns."""
    state: dict[str, Any] = {"repos": {}, "fetched": []}

    def download(repo: str, **options: Any) -> str:
        source = state["repos"].get(repo)
        if source is None:
            raise ConnectionError("no route to the hub\nsecond line")
        snapshot = tmp_path / f"models--{repo.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            wanted = any(fnmatch.fnmatch(file.name, p) for p in options["allow_patterns"])
            if wanted and not (snapshot / file.name).exists():
                state["fetched"].append(file.name)
                shutil.copy(file, snapshot / file.name)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


def test_only_the_shards_with_heads_are_needed(tmp_path: Path) -> None:
    source = save_medusa2(tmp_path / "medusa-2", medusa_state(), pickled=False)
    for shard in source.glob("model-0*.safetensors"):
        shard.unlink()
    assert imported(source, tmp_path / "out", None)[0].n_heads == 5
    (source / "model-heads-2.safetensors").unlink()
    with pytest.raises(HeadsError, match=r"model-heads-2.safetensors: No such file"):
        import_heads(str(source), tmp_path / "out")


def test_the_file_with_the_heads_may_be_named_itself(tmp_path: Path) -> None:
    folder = save_heads_file(tmp_path / "published", MEDUSA_PT, medusa_state(), MEDUSA_CONFIG)
    found, _ = imported(folder / MEDUSA_PT, tmp_path / "out", None)
    assert (found.n_heads, found.target) == (5, "lmsys/vicuna-7b-v1.3")


def test_an_import_is_the_same_every_time_and_the_one_that_heads_makes(
    base: Path, tmp_path: Path
) -> None:
    source = save_heads_file(tmp_path / "published", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    import_heads(str(source), tmp_path / "a", str(base))
    import_heads(str(source), tmp_path / "b", str(base))
    a, b = ((tmp_path / n / "heads.safetensors").read_bytes() for n in "ab")
    assert a == b
    target = load_target(base)
    _, facts = open_heads(str(source), target)
    assert facts["fingerprint"] == open_heads(str(tmp_path / "a"), target)[1]["fingerprint"]
    assert facts["name"] == "published"


def test_the_cached_import_is_used_again_and_made_again_where_it_is_stale(
    base: Path, tmp_path: Path, own_cache: Path
) -> None:
    source = save_heads_file(tmp_path / "published", MEDUSA_PT, medusa_state(), MEDUSA_CONFIG)
    target = load_target(base)
    first = open_heads(str(source), target)[1]
    [folder] = (own_cache / "heads").iterdir()
    made = (folder / "heads.safetensors").stat().st_mtime_ns
    assert open_heads(str(source), target)[1] == first
    assert (folder / "heads.safetensors").stat().st_mtime_ns == made
    (folder / "heads.safetensors").write_bytes(b"cut")
    assert open_heads(str(source), target)[1] == first
    save_heads_file(source, MEDUSA_PT, medusa_state(n_heads=3), MEDUSA_CONFIG)
    assert open_heads(str(source), target)[1]["n_heads"] == 3


def test_heads_are_fetched_by_their_hub_id(hub: Any, base: Path, tmp_path: Path) -> None:
    repo = save_heads_file(tmp_path / "ankner", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    (repo / "README.md").write_text("not needed")
    hub["repos"] = {"ankner/hydra-vicuna-7b-v1.3": repo, "lmsys/vicuna-7b-v1.3": base}
    found, heads = imported("ankner/hydra-vicuna-7b-v1.3", tmp_path / "out", None)
    assert (found.layout, heads.n_heads) == ("Hydra prefix-mlp", 4)
    assert sorted(hub["fetched"]) == ["config.json", "config.json", HYDRA_PT]


def test_where_heads_are_there_twice_only_the_safe_form_is_fetched(
    hub: Any, tmp_path: Path
) -> None:
    repo = save_heads_file(tmp_path / "m", MEDUSA_PT, medusa_state(3), MEDUSA_CONFIG)
    save_heads_file(repo, MEDUSA_SAFE, medusa_state(), MEDUSA_CONFIG)
    hub["repos"] = {"FasterDecoding/medusa-vicuna-7b-v1.3": repo}
    name = "FasterDecoding/medusa-vicuna-7b-v1.3"
    assert imported(name, tmp_path / "out", None)[0].n_heads == 5
    assert sorted(hub["fetched"]) == ["config.json", MEDUSA_SAFE]


def test_of_a_medusa_2_repository_only_the_shards_with_heads_are_fetched(
    hub: Any, tmp_path: Path
) -> None:
    repo = save_medusa2(tmp_path / "m2", medusa_state(), pickled=False)
    hub["repos"] = {"FasterDecoding/medusa": repo}
    found, _ = imported("FasterDecoding/medusa", tmp_path / "out", None)
    assert found.target == "FasterDecoding/medusa"
    shards = [name for name in hub["fetched"] if name.endswith(".safetensors")]
    assert sorted(shards) == ["model-heads-1.safetensors", "model-heads-2.safetensors"]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_repository_with_one_file_of_weights_is_read(hub: Any, file: str, tmp_path: Path) -> None:
    names = in_vllm_names(medusa_state())
    hub["repos"] = {"me/medusa": save_heads_file(tmp_path / "v", file, names, {})}
    assert imported("me/medusa", tmp_path / "out", None)[0].n_heads == 5
    assert sorted(hub["fetched"]) == sorted(["config.json", file])


def test_a_hub_that_cannot_be_reached_is_one_line_that_names_the_flag(
    hub: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        HeadsError, match=r"heads 'me/none' is no local.*no route.*--heads"
    ) as error:
        import_heads("me/none", tmp_path / "out")
    assert "second line" not in str(error.value)


def test_vicuna_with_hydra_heads_works_by_name(hub: Any, tmp_path: Path) -> None:
    """As they are on the hub: .bin shards in half precision, tokenizer.model, heads in bfloat16."""
    vicuna = save_vicuna(tmp_path / "v")
    state = hydra_state(v=VICUNA_VOCAB)
    heads_repo = save_heads_file(tmp_path / "h", HYDRA_PT, state, HYDRA_CONFIG)
    hub["repos"] = {"lmsys/vicuna-7b-v1.3": vicuna, "ankner/hydra-vicuna-7b-v1.3": heads_repo}
    target = load_target("lmsys/vicuna-7b-v1.3", dtype="float16")
    assert (target.name, target.dtype) == ("lmsys/vicuna-7b-v1.3", torch.float16)
    assert (target.eos_ids, resolve_mode(target.tokenizer)) == ({2}, "vicuna")
    ids = encode(target.tokenizer, (("user", "Hello"), ("assistant", "Hi"), ("user", "How so?")))
    text = target.tokenizer.decode(ids)
    assert text.startswith("<s> A chat between a curious user and an artificial intelligence")
    assert text.endswith(" USER: Hello ASSISTANT: Hi</s>USER: How so? ASSISTANT:")
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 1)
    heads, facts = open_heads("ankner/hydra-vicuna-7b-v1.3", target)
    assert (facts["name"], heads.n_heads) == ("ankner/hydra-vicuna-7b-v1.3", 4)
    drafted = Decoder(target, heads, [chain(4)]).generate(ids, Static(0), 8)
    plain = Decoder(target, None, [EMPTY]).generate(ids, Static(0), 8)
    assert drafted.tokens == plain.tokens


def test_the_base_named_in_config_json_is_asked_for_its_configuration_alone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options["allow_patterns"]))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = save_heads_file(tmp_path / "published", HYDRA_PT, hydra_state(), HYDRA_CONFIG)
    import_heads(str(source), tmp_path / "out")
    assert asked == [("lmsys/vicuna-7b-v1.3", ["config.json"])]
    save_heads_file(tmp_path / "m", MEDUSA_PT, medusa_state(), MEDUSA_CONFIG)
    import_heads(str(tmp_path / "m"), tmp_path / "out")
    assert len(asked) == 1, "heads that say all of themselves need no other model"
