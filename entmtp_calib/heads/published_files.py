"""Where published heads lie, and their tensors one at a time: .pt, .bin and safetensors.

Files are mapped, so of a tensor nothing is read before it is used; and mapped anew now and then, so
that reading all tensors needs little more memory than the largest. Pickles are read by torch's
restricted unpickler alone. This module does not know what the tensors mean.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entmtp_calib.errors import HeadsError, ModelError
from entmtp_calib.targets import checkpoint
from entmtp_calib.targets.fetch import fetch, is_hub_id
from entmtp_calib.targets.network import first_line

HEAD_FILES = tuple(
    f"{kind}_lm_head.{suffix}" for kind in ("hydra", "medusa") for suffix in ("safetensors", "pt")
)
"""The files of published heads; where there are two of a kind, safetensors is read."""
MODEL_FILES = (checkpoint.WEIGHTS, checkpoint.PICKLED)
BASE_MODEL = ("model.", "lm_head.", "base_model.")
"""Names of the language model's own weights, which published files may hold beside the heads'."""
_AGAIN = "download or copy the heads again"


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor that has not been read."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Weights:
    """The tensors of published heads, without those of the language model.

    Attributes:
        files: all files that are read.
        info: facts of every tensor, by name.
        has_base_model: whether the language model's own weights were beside them.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files = tuple(paths)
        found = {name: i for path in self.files for name, i in _infos(path).items()}
        self.info = {n: i for n, i in found.items() if not n.startswith(BASE_MODEL)}
        self.has_base_model = len(self.info) < len(found)
        largest = max((info.nbytes for info in self.info.values()), default=0)
        self._bytes_per_mapping = largest // 2
        self._mapped: dict[str, Tensor] = {}
        self._bytes_read = 0

    def read(self, name: str) -> Tensor:
        """One tensor; forget it before the next is read."""
        info = self.info[name]
        if name not in self._mapped or self._bytes_read > self._bytes_per_mapping:
            self._mapped = {}
            self._mapped = _mapped(info.file)
            self._bytes_read = 0
        self._bytes_read += info.nbytes
        return self._mapped[name]


def locate(source: str) -> tuple[str, Path]:
    """Name and local path of published heads: a folder, one of the files, or a hub id."""
    path = Path(source).expanduser()
    if path.exists():
        folder = path.resolve()
        return (folder if folder.is_dir() else folder.parent).name, path
    if not is_hub_id(source):
        raise HeadsError(
            f"the heads folder {source} is missing",
            "a folder, a file or a Hugging Face id",
            "pass --heads FOLDER, or train heads with entmtp train-heads",
        )
    folder = fetch(source, ["*.json", "*_lm_head.safetensors"], "heads", HeadsError)
    for names in chain([["*_lm_head.pt"]], _model_files(folder)):
        if not _heads_files(folder):
            folder = fetch(source, ["*.json", *names], "heads", HeadsError)
    return source, folder


def open_weights(path: Path) -> Weights:
    """The tensors of a file, or of the first file in a folder that can hold heads.

    Raises:
        HeadsError: there is none, or it is damaged or of an unsafe format.
    """
    files = [path] if path.is_file() else _heads_files(path)
    if not files and any((path / f"{name}.index.json").is_file() for name in MODEL_FILES):
        raise no_heads(path)
    if not files:
        raise HeadsError(
            f"{path} holds no heads",
            f"heads.json with heads.safetensors, {', '.join(HEAD_FILES)}, or a Medusa-2 model",
            "name the folder that the heads' weights lie in",
        )
    return Weights(files)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json beside the weights; empty if there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        return checkpoint.read_json(file)
    except ModelError as error:
        raise HeadsError(error.found, error.expected, _AGAIN) from error


def _heads_files(folder: Path) -> list[Path]:
    """The files to read: those of the first group of which any is there."""
    for group in chain(([name] for name in HEAD_FILES), _model_files(folder)):
        paths = [folder / name for name in group]
        if any(path.is_file() for path in paths):
            return paths
    return []


def _model_files(folder: Path) -> Iterator[list[str]]:
    """Groups of files of a whole model: by the index those of its shards that hold heads."""
    for single in MODEL_FILES:
        index = folder / f"{single}.index.json"
        if not index.is_file():
            yield [single]
            continue
        weight_map = checkpoint.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise HeadsError(f"{index} has no weight_map", action=_AGAIN)
        shards = {str(f) for name, f in weight_map.items() if not name.startswith(BASE_MODEL)}
        if shards:
            yield sorted(shards)


def no_heads(path: Path) -> HeadsError:
    """The error for a language model that was taken for heads."""
    return HeadsError(
        f"{path} is a language model without heads",
        "Hydra or Medusa heads",
        "pass it with --model, and its heads with --heads",
    )


def _infos(path: Path) -> dict[str, TensorInfo]:
    try:
        check = checkpoint.check_pickle if _is_pickle(path) else checkpoint.check_safetensors
        check(path)
    except ModelError as error:
        raise HeadsError(error.found, error.expected, error.action) from error
    tensors = _mapped(path)
    return {n: TensorInfo(path, tuple(t.shape), t.dtype, t.nbytes) for n, t in tensors.items()}


def _is_pickle(path: Path) -> bool:
    return path.suffix in (".pt", ".bin", ".pth")


def _mapped(path: Path) -> dict[str, Tensor]:
    if _is_pickle(path):
        return _load(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{path} cannot be read ({error})", action=_AGAIN) from error


def _load(path: Path) -> dict[str, Tensor]:
    """A file of torch.save, mapped: nothing of a tensor is read before it is used."""
    if not zipfile.is_zipfile(path):
        raise HeadsError(
            f"{path} is in the legacy layout of torch.save, which cannot be read in parts",
            "a zip archive, as torch has written since 1.6",
            f"save it again: import torch; torch.save(torch.load('{path}', weights_only=True),"
            " 'NEW.pt')",
        )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise HeadsError(
            f"{path} holds more than tensors, which could run code ({first_line(error)})",
            "a state_dict",
            "get the heads as safetensors, or save their state_dict alone",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, LookupError) as error:
        raise HeadsError(f"{path} cannot be read ({first_line(error)})", action=_AGAIN) from error
    is_named = isinstance(tensors, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    )
    if not is_named:
        raise HeadsError(f"{path} holds no named tensors", "a state_dict", "save that alone")
    named: dict[str, Tensor] = tensors
    return named
