"""The native heads format: `heads.safetensors` (the tensors) and `heads.json` (what they are).

`heads.json` holds the architecture, the fingerprint of the target the heads were made for (null
where nobody knows it), and how they were trained. Loading is strict: every tensor must be there,
fit, and be finite. Tensors are written and read one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entmtp_calib import files
from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.targets.model import Target

HEADS_FORMAT = 1
TENSORS, DESCRIPTION = "heads.safetensors", "heads.json"
_DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = tuple(dtype for dtype in _DTYPES if dtype.is_floating_point)
"""What weights may be stored as."""


@dataclass(frozen=True)
class Stored:
    """A tensor on its way to a file; `read` gives it when its turn has come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def save_heads(
    heads: Heads, folder: Path, target: dict[str, Any], training: dict[str, Any]
) -> None:
    """Write `heads` in half precision; `target` and `training` say where they come from."""

    def stored(name: str, value: Tensor) -> Stored:
        dtype = torch.float16 if value.is_floating_point() else torch.int32
        return Stored(name, dtype, tuple(value.shape), lambda: value.to(dtype))

    tensors = [stored(name, value) for name, value in heads.state_dict().items()]
    write_heads(folder, heads.config, tensors, target, training)


def write_heads(
    folder: Path,
    config: HeadsConfig,
    tensors: Sequence[Stored],
    target: dict[str, Any],
    training: dict[str, Any],
) -> None:
    """Write both files, the tensors one at a time; the description last, so that it vouches."""
    files.write_chunks(folder / TENSORS, _safetensors(tensors))
    files.write_json(
        folder / DESCRIPTION,
        {
            "format_version": HEADS_FORMAT,
            "architecture": config.to_dict(),
            "target": target,
            "training": training,
        },
    )


def _safetensors(tensors: Sequence[Stored]) -> Iterator[bytes | memoryview]:
    """A file of the tensors: the same bytes as safetensors' own `save`, which wants all at once.

    The format: https://huggingface.co/docs/safetensors (length of the header, header, data).
    """
    order = list(_DTYPES)
    tensors = sorted(tensors, key=lambda t: (order.index(t.dtype), t.name))
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.dtype.itemsize * torch.Size(tensor.shape).numel()
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        value = tensor.read().cpu().contiguous()
        assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape)
        yield value.reshape(-1).view(torch.uint8).numpy().data
        del value  # or it would stay while the next one is read


def read_description(folder: Path) -> dict[str, Any]:
    """`heads.json` of a folder, checked for its format version; raises `HeadsError`."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise HeadsError(
            f"{folder} has no {DESCRIPTION}",
            "a heads folder written by entmtp train-heads or import-heads",
            "pass --heads FOLDER, or train heads with entmtp train-heads",
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadsError(f"{path} cannot be read ({error})", "a JSON document") from error
    version = description.get("format_version") if isinstance(description, dict) else None
    if version != HEADS_FORMAT:
        raise HeadsError(
            f"{path} has format version {version}", f"version {HEADS_FORMAT}", "train them again"
        )
    return description


def load_heads(folder: Path, target: Target) -> Heads:
    """Load heads for `target`, on its device and of its type.

    Raises:
        HeadsError: a file is damaged, or the heads do not belong to the target.
    """
    description = read_description(folder)
    try:
        config = HeadsConfig.from_dict(description["architecture"])
        made_for = dict(description["target"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HeadsError(
            f"{folder / DESCRIPTION} does not describe heads ({error!r})",
            "an architecture and a target",
            "copy it again",
        ) from error
    _check_target(folder, config, made_for, target)
    path = folder / TENSORS
    with _opened(path) as file:
        draft_ids = file.get_tensor("draft_ids") if "draft_ids" in file.keys() else None  # noqa: SIM118
        _check_draft_ids(path, draft_ids, config)
        with torch.device("meta"):  # weights come from the file, so none are made here
            heads = Heads(
                config,
                target.embedding_weight,
                target.lm_head_weight,
                None if draft_ids is None else draft_ids.long().to(target.device),
            )
        _fill(heads, file, path, target)
    heads = heads.eval().requires_grad_(False)
    heads.pack()
    if target.recorder:
        heads.record(target.recorder)
    return heads


def heads_fingerprint(folder: Path) -> str:
    """sha256 of the tensors: what a bank remembers its heads by."""
    return files.hash_file(folder / TENSORS)


def _check_target(
    folder: Path, config: HeadsConfig, made_for: dict[str, Any], target: Target
) -> None:
    for what, theirs, ours in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary size", config.vocab_size, target.vocab_size),
        ("fingerprint", made_for.get("fingerprint"), target.fingerprint),
    ):
        # Published heads name their target, but nobody knows the fingerprint it had.
        if theirs is not None and theirs != ours:
            raise HeadsError(
                f"{folder} was made for the target {made_for.get('name')} with {what} {theirs}",
                f"{what} {ours}, that of {target.name}",
                "pass the heads of this target, or train some with entmtp train-heads",
            )


def _check_draft_ids(path: Path, ids: Tensor | None, config: HeadsConfig) -> None:
    """Draft ids that do not fit would be found only while decoding, or never."""
    size = config.draft_vocab_size
    if ids is None and size is None:
        return
    if ids is None or ids.shape != (size,) or ids.is_floating_point():
        found = "no draft_ids" if ids is None else f"draft_ids of shape {list(ids.shape)}"
        raise HeadsError(f"{path} has {found}", f"{size or 'no'} token ids, as {DESCRIPTION} says")
    values = set(ids.tolist())
    if len(values) < len(ids) or min(values) < 0 or max(values) >= config.vocab_size:
        raise HeadsError(
            f"{path}: draft_ids are not {len(ids)} different tokens of the target",
            f"ids from 0 to {config.vocab_size - 1}",
            "copy it again",
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The safetensors file, whose tensors are read when they are asked for."""
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise HeadsError(
            f"{path} cannot be read ({error})", "a whole safetensors file", "copy it again"
        ) from error


def _fill(heads: Heads, file: Any, path: Path, target: Target) -> None:
    """Give the heads their weights, a tensor at a time, on the target's device and of its type."""
    wanted = {k: v for k, v in heads.state_dict().items() if k != "draft_ids"}
    names = set(file.keys()) - {"draft_ids"}
    missing, extra = sorted(wanted.keys() - names), sorted(names - wanted.keys())
    if missing or extra:
        raise HeadsError(f"{path} lacks {missing[:3]} and has {extra[:3]} too many", "exact names")
    weights = {}
    for name, value in wanted.items():
        found = file.get_tensor(name)
        if found.shape != value.shape:
            shapes = f"{list(found.shape)}", f"shape {list(value.shape)}"
            raise HeadsError(f"{path}: {name} has shape {shapes[0]}", shapes[1])
        weights[name] = found.to(target.device, target.dtype, copy=True)
        if not is_finite(weights[name]):
            raise HeadsError(
                f"{path}: {name} holds values that are not finite in {target.dtype}",
                "finite weights",
                "another --dtype has a wider range, if the file is not damaged",
            )
    heads.load_state_dict(weights, strict=False, assign=True)


def is_finite(weight: Tensor) -> bool:
    """Whether every value is; unlike `torch.isfinite` it makes no other tensor on the way."""
    low, high = torch.aminmax(weight)
    return bool(torch.isfinite(low) and torch.isfinite(high))
