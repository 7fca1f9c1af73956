"""Published Hydra and Medusa heads, written in the native format.

The tensors decide what they are: config.json is known to be wrong about their number. Every tensor
must have a place, or be one of those that published files hold for nothing; copies of a tied block
are checked and stored once. Heads of other architectures are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.native import Stored, is_finite, write_heads
from entmtp_calib.heads.published_files import (
    TensorInfo,
    Weights,
    no_heads,
    open_weights,
    read_config,
)
from entmtp_calib.heads.published_hydra import hydra_layout, is_hydra
from entmtp_calib.heads.published_layout import FindBase, Layout, check_base, check_complete
from entmtp_calib.heads.published_medusa import is_inside_model, is_medusa, medusa_layout
from entmtp_calib.progress import Progress, Silent

ARCHITECTURE, BASE_NAME = "hydra_head_arch", "base_model_name_or_path"
_OTHERS = {
    "cross_attn.": "cross-attn",
    "attn.": "eagle-attn",
}
"""First part of the tensors' names, and what Hydra calls heads of that architecture."""


@dataclass(frozen=True)
class Published:
    """Published heads that have been recognised, and nothing of them read yet.

    Attributes:
        source: the name under which they were found.
        base_name: the model that they were trained for, where they or we know it.
    """

    source: str
    weights: Weights
    layout: Layout
    base_name: str | None


def recognise(source: str, path: Path, base: FindBase, is_base_known: bool) -> Published:
    """Look at published heads in a folder or file.

    Args:
        source: their name, which is also the model's if they are inside one.
        base: the model they were trained for; asked where the heads need it.
        is_base_known: ask in any case, and refuse heads that do not fit it.
    """
    weights, config = open_weights(path), read_config(path)
    where = weights.files[0]
    layout = _layout(weights, config, base, where)
    if is_base_known:
        check_base(layout, base(), where)
    check_complete(layout, weights.info, where)
    own_model = source if is_inside_model(weights) else None
    base_name = config.get(BASE_NAME) or own_model or (base().name if is_base_known else None)
    return Published(source, weights, layout, base_name)


def write_published(found: Published, folder: Path, progress: Progress | None = None) -> None:
    """Write recognised heads to `folder`, tensor by tensor, each of the type it has.

    Raises:
        HeadsError: a tied block has two values, or a value is not finite.
    """
    progress = progress or Silent()
    progress.start("import", len(found.layout.tensors))
    for kept, copy in found.layout.copies:
        if not torch.equal(found.weights.read(kept), found.weights.read(copy)):
            raise HeadsError(
                f"{found.weights.files[0]}: {kept} and {copy} differ",
                "one block applied again, which the later layers of published heads are",
                "heads with different later layers cannot be read",
            )
    tensors = [
        *(_stored(found, *names, progress) for names in found.layout.tensors.items()),
        *(_zero(native, found.weights.info[name]) for native, name in found.layout.zeros.items()),
    ]
    imported = {
        "imported_from": found.source,
        "files": [path.name for path in found.weights.files],
        "layout": found.layout.name,
        "notes": list(found.layout.notes),
    }
    target = {"name": found.base_name, "fingerprint": None}
    write_heads(folder, found.layout.config, tensors, target, imported)
    progress.done()


def _layout(weights: Weights, config: Mapping[str, Any], base: FindBase, where: Path) -> Layout:
    if is_hydra(weights):
        return hydra_layout(weights, config, base, where)
    if is_medusa(weights):
        return medusa_layout(weights, config, base, where)
    for start, name in _OTHERS.items():
        if config.get(ARCHITECTURE) == name or any(n.startswith(start) for n in weights.info):
            raise HeadsError(
                f"{where} holds Hydra heads of the architecture {name}",
                "mlp or prefix-mlp",
                "the others cannot draft here; use heads of one of these",
            )
    if weights.has_base_model and not weights.info:
        raise no_heads(where)
    names = ", ".join(sorted(weights.info)[:3])
    raise HeadsError(
        f"{where} holds no Hydra or Medusa heads ({names or 'no tensors'})",
        "hydra_mlp.0..., 0.0.linear.weight, medusa_head.0... or blocks.0...",
        "name the folder that the heads' weights lie in",
    )


def _stored(found: Published, native: str, name: str, progress: Progress) -> Stored:
    info = found.weights.info[name]

    def read() -> Tensor:
        progress.advance(note=native)
        value = found.weights.read(name)
        if not is_finite(value):
            raise HeadsError(
                f"{info.file}: {name} holds values that are not finite", "finite weights"
            )
        return value

    return Stored(native, info.dtype, info.shape, read)


def _zero(native: str, weight: TensorInfo) -> Stored:
    """The bias that a file has dropped, of its weight's type."""
    shape = weight.shape[:1]
    return Stored(native, weight.dtype, shape, lambda: torch.zeros(shape, dtype=weight.dtype))
