"""Is what lies on disk a whole model? Looked at before anything is loaded.

Each way a download or a copy goes wrong (a shard missing or cut, a Git LFS pointer) ends in one
line that names the file, instead of random weights or a library's traceback. It reads headers,
never weights, and does not know how a model is built from them.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

from entmtp_calib.errors import ModelError

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_AGAIN = "download or copy the model again"


def check_folder(folder: Path) -> None:
    """Refuse a model folder that cannot be loaded safely and completely."""
    check_config(folder)
    for shard, tensors in _shards(folder).items():
        if is_pickled(folder):
            check_pickle(folder / shard)
            continue
        present = check_safetensors(folder / shard)
        missing = sorted(tensors - present)
        if missing:
            raise ModelError(
                f"{folder / shard} lacks {len(missing)} tensors of the index, such as {missing[0]}",
                action=_AGAIN,
            )


def check_config(folder: Path) -> None:
    """Refuse the configuration of what is no language model, or is one with quantized weights."""
    config = read_json(folder / "config.json")
    if "model_type" not in config:
        raise ModelError(
            f"{folder / 'config.json'} names no model_type",
            "the configuration of a transformers causal language model",
            "pass the folder of the language model itself",
        )
    if "quantization_config" in config:
        raise ModelError(
            f"{folder} holds quantized weights",
            "dense safetensors weights or a GGUF file",
            "use the unquantized checkpoint",
        )


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without vocabulary, of which a library might make an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise ModelError(
            f"{folder} has no tokenizer",
            " or ".join(_VOCABULARIES),
            "copy the tokenizer's files there, or name another tokenizer",
        )


def stray_single_file(folder: Path) -> bool:
    """Whether a model.safetensors lies beside an index of shards that does not mention it."""
    single = folder / WEIGHTS
    return single.exists() and _index(folder).exists() and single.name not in _shards(folder)


def is_pickled(folder: Path) -> bool:
    """Whether the weights are those of pytorch_model.bin, because there is no safetensors file."""
    names = (WEIGHTS, f"{WEIGHTS}.index.json"), (PICKLED, f"{PICKLED}.index.json")
    safe, pickled = (any((folder / name).exists() for name in pair) for pair in names)
    return pickled and not safe


def check_safetensors(path: Path) -> set[str]:
    """Names of the tensors in a file whose size is what its header promises."""
    size = _size(path)
    head = _head(path)
    if size < 8:
        raise ModelError(f"{path} is empty or cut off ({size} bytes)", action=_AGAIN)
    n_header = struct.unpack("<Q", head[:8])[0]
    if n_header > min(size - 8, _MAX_HEADER_BYTES):
        raise ModelError(
            f"{path} is cut off or not safetensors: {size} bytes, header of {n_header} bytes",
            action=_AGAIN,
        )
    with path.open("rb") as file:
        file.seek(8)
        header = _parse(file.read(n_header), path)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (TypeError, KeyError, IndexError, ValueError):
        raise ModelError(f"{path} has a damaged safetensors header", action=_AGAIN) from None
    if 8 + n_header + end != size:
        raise ModelError(
            f"{path} has {size} bytes", f"{8 + n_header + end} bytes by its header", _AGAIN
        )
    return set(tensors)


def _head(path: Path) -> bytes:
    """The first bytes of weights; refuses a pointer that stands in their place."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(_LFS_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not weights", action="run `git lfs pull` in its folder"
        )
    return head


def check_pickle(path: Path) -> None:
    """Refuse what is visibly no whole file of torch.save; its content is judged when it is read."""
    size, head = _size(path), _head(path)
    if not size or (head.startswith(b"PK") and not zipfile.is_zipfile(path)):
        raise ModelError(f"{path} is empty or cut off ({size} bytes)", action=_AGAIN)


def check_gguf(path: Path) -> None:
    """Refuse what is visibly no whole GGUF file; its tables are read when it is loaded."""
    size, head = _size(path), _head(path)
    if head[:4] != b"GGUF" or size < 64:
        raise ModelError(f"{path} is not a GGUF file ({size} bytes)", action=_AGAIN)
    if "-of-" in path.stem:
        raise ModelError(
            f"{path} is one part of a split GGUF",
            "one file",
            "merge the parts with `llama-gguf-split --merge`",
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder."""
    _size(path)
    return _parse(path.read_bytes(), path)


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb"):
            return size
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}", action=_AGAIN) from None


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error})", action=_AGAIN) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}", "an object", _AGAIN)
    return value


def _index(folder: Path) -> Path:
    """Where the index of shards is, if there is one."""
    return folder / f"{PICKLED if is_pickled(folder) else WEIGHTS}.index.json"


def _shards(folder: Path) -> dict[str, set[str]]:
    """Shard file name -> tensors the index expects in it; the index wins over a single file."""
    index = _index(folder)
    if index.exists():
        shards: dict[str, set[str]] = {}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map", action=_AGAIN)
        for tensor, shard in weight_map.items():
            shards.setdefault(str(shard), set()).add(tensor)
        return shards
    for single in (WEIGHTS, PICKLED):
        if (folder / single).exists():
            return {single: set()}
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        raise ModelError(
            f"{folder} has weights in {pickled[0].name}, a format of its own",
            f"{WEIGHTS} or {PICKLED}, whole or in shards with an index",
            "convert it to a transformers checkpoint",
        )
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise ModelError(f"{folder} has no safetensors weights", action=f"pass {gguf[0]} itself")
    raise ModelError(f"{folder} has no {WEIGHTS} and no index of shards", action=_AGAIN)
