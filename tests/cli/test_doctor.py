"""`entmtp doctor`: every problem at once, each with what to run."""

from __future__ import annotations

import builtins
import json
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.main import app
from entmtp_calib.config import DEFAULT_HEADS_NAME
from entmtp_calib.stages import doctor


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has everything: whatever this one lacks is put in a temporary place."""
    heads = tmp_path / "heads"
    (heads / DEFAULT_HEADS_NAME).mkdir(parents=True)
    (heads / DEFAULT_HEADS_NAME / "heads.safetensors").touch()
    monkeypatch.setattr(doctor, "HEADS", heads)
    monkeypatch.setattr(doctor, "packaged_gguf", lambda: tmp_path / "model.gguf")
    for name in doctor.BUNDLED.values():
        (tmp_path / name).touch()
    monkeypatch.setattr(doctor, "DATA_FOLDER", tmp_path)
    monkeypatch.setattr(doctor, "DISTRIBUTION", "typer")  # its requirements are certainly there
    monkeypatch.setattr(metadata, "requires", lambda _: ["rich>=13.8", "tqdm>=4; extra == 'x'"])
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_complete_machine_is_ready() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("ready for the main job: entmtp build-bank --task gsm8k\n")
    assert DEFAULT_HEADS_NAME in result.stdout
    assert "HF_HUB_OFFLINE is set: bundled prompts are used" in result.stdout


@pytest.mark.parametrize(
    ("gpus", "can_pack", "line"),
    [
        (0, True, "on a CPU lean for models like Llama, transformers for others"),
        (0, False, "on a CPU transformers, since this torch has no FBGEMM kernels"),
        (1, True, "graphed on CUDA; on a CPU lean for"),
    ],
)
def test_the_engines_that_are_chosen_here_are_named(
    gpus: int, can_pack: bool, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="a GPU", total_memory=2**34)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    monkeypatch.setattr("entmtp_calib.targets.packed.can_pack", lambda: can_pack)
    assert re.search(rf"^engines +{line}", run().stdout, re.M)


def test_looking_changes_nothing(complete: Path) -> None:
    before = sorted(complete.rglob("*"))
    run()
    assert sorted(complete.rglob("*")) == before


def lack_memory(folder: Path, patch: pytest.MonkeyPatch) -> None:
    facts = {"cpu": "a", "usable_cores": 1, "logical_cores": 1, "memory_gib": 0.5}
    patch.setattr(doctor, "hardware", lambda: facts)


def lack_a_library(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metadata, "requires", lambda _: ["no-such-library>=1.0"])


def have_an_old_library(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(metadata, "requires", lambda _: ["rich>=9999"])


def lack_entmtp(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")


def have_a_broken_torch(folder: Path, patch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "torch":
            raise OSError("libgomp is missing")
        return real(name, *rest, **named)

    patch.setattr(builtins, "__import__", refuse)


def lack_heads(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "HEADS", folder / "nothing")


def lack_prompts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "gsm8k.jsonl").unlink()


def have_no_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    patch.setenv("ENTMTP_CACHE", str(folder / "file" / "cache"))


def lack_space(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(doctor, "CACHE_GIB", 1e9)


LACKS = {
    lack_memory: "0.5 GiB of memory; expected at least 2 GiB; use a larger machine",
    lack_a_library: "no-such-library is not installed; expected 1.0 or later; run `make setup`",
    have_an_old_library: "is too old; expected 9999 or later; run `make setup`",
    lack_entmtp: "entmtp is not installed",
    have_a_broken_torch: "torch cannot be imported (libgomp is missing)",
    lack_heads: "or run `make heads`",
    lack_prompts: "gsm8k.jsonl not in",
    have_no_cache: "set ENTMTP_CACHE to another folder",
    lack_space: "GiB free; expected at least 1e+09 GiB",
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_one_line_and_exit_code_1(
    lack: Any, complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lack(complete, monkeypatch)
    result = run()
    assert result.exit_code == 1
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1
    assert LACKS[lack] in problems[0]


def test_all_problems_are_reported_together(
    complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lack in (lack_memory, lack_a_library, lack_heads, lack_prompts, have_no_cache):
        lack(complete, monkeypatch)
    result = run("--json", "-")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ready"] is False
    assert sum(bool(finding["problem"]) for finding in document["findings"]) == 5
