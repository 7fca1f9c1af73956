"""The native heads format: `heads.safetensors` (the tensors) and `heads.json` (what they are).

`heads.json` holds the architecture, the fingerprint of the target the heads were made for, and how
they were trained. Loading is strict: every tensor must be there, fit, and be finite.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from entmtp_calib import files
from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.targets.model import Target

HEADS_FORMAT = 1
TENSORS, DESCRIPTION = "heads.safetensors", "heads.json"


def save_heads(
    heads: Heads, folder: Path, target: dict[str, Any], training: dict[str, Any]
) -> None:
    """Write `heads` in half precision; `target` and `training` say where they come from."""
    with files.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.half().contiguous() if value.is_floating_point() else value.int().contiguous()
        for name, value in heads.state_dict().items()
    }
    files.write_bytes(folder / TENSORS, save(tensors))
    files.write_json(
        folder / DESCRIPTION,
        {
            "format_version": HEADS_FORMAT,
            "architecture": heads.config.to_dict(),
            "target": target,
            "training": training,
        },
    )


def read_description(folder: Path) -> dict[str, Any]:
    """`heads.json` of a folder, checked for its format version; raises `HeadsError`."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise HeadsError(
            f"{folder} has no {DESCRIPTION}",
            "a heads folder written by entmtp train-heads",
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
    tensors = _read_tensors(folder / TENSORS)
    draft_ids = tensors.pop("draft_ids", None)
    _check_draft_ids(folder / TENSORS, draft_ids, config)
    heads = Heads(
        config,
        target.embedding_weight,
        target.lm_head_weight,
        None if draft_ids is None else draft_ids.long().to(target.device),
    )
    _fill(heads, tensors, folder / TENSORS)
    heads = heads.to(target.device, target.dtype).eval().requires_grad_(False)
    heads.pack()
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
        if theirs != ours:
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


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise HeadsError(
            f"{path} cannot be read ({error})", "a whole safetensors file", "copy it again"
        ) from error


def _fill(heads: Heads, tensors: dict[str, Tensor], path: Path) -> None:
    wanted = {k: v for k, v in heads.state_dict().items() if k != "draft_ids"}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise HeadsError(f"{path} lacks {missing[:3]} and has {extra[:3]} too many", "exact names")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape:
            shapes = f"{list(value.shape)}", f"shape {list(wanted[name].shape)}"
            raise HeadsError(f"{path}: {name} has shape {shapes[0]}", shapes[1])
        if not torch.isfinite(value.float()).all():
            raise HeadsError(f"{path}: {name} holds values that are not finite", "finite weights")
    heads.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
