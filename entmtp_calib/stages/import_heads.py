"""Import heads: published Hydra or Medusa heads as a native heads folder.

`--heads` takes published heads too: they are imported once into the user's cache, so that they are
loaded, and recognised by a bank, exactly as an imported folder is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp_calib.errors import EntmtpError, HeadsError, ModelError
from entmtp_calib.heads.native import DESCRIPTION, HEADS_FORMAT, TENSORS, read_description
from entmtp_calib.heads.published import BASE_NAME, Published, recognise, write_published
from entmtp_calib.heads.published_files import locate, read_config
from entmtp_calib.heads.published_layout import Base
from entmtp_calib.progress import Progress
from entmtp_calib.provenance import sha256_json
from entmtp_calib.targets.checkpoint import check_safetensors
from entmtp_calib.targets.default import cache_root
from entmtp_calib.targets.load import load_config
from entmtp_calib.targets.model import Target


@dataclass(frozen=True)
class Imported:
    """What was imported.

    Attributes:
        layout: how the heads were published, such as Medusa V1.
        target: name of the model they were trained for, as far as it is known.
        dtypes: of the weights, as they are stored.
        size_bytes: of the tensors.
        ignored: tensors of the source that are not the heads' own.
        notes: where its config.json is wrong, and the like.
    """

    folder: Path
    layout: str
    n_heads: int
    n_layers: int
    hidden_size: int
    vocab_size: int
    target: str | None
    dtypes: Sequence[str]
    size_bytes: int
    ignored: Sequence[str]
    notes: Sequence[str]


def import_heads(
    source: str, folder: Path, model: str | None = None, progress: Progress | None = None
) -> Imported:
    """Write published heads as native ones to `folder`.

    Args:
        source: a folder, one of the published files, or a Hugging Face id.
        model: the model that the heads were trained for; without it the one that they name is
            asked for its configuration, if that is needed.

    Raises:
        HeadsError: they cannot be read, are of another architecture, or do not fit the model.
    """
    name, path = locate(source)

    @functools.cache
    def base() -> Base:
        return _base(*(load_config(model) if model else _named_base(path)))

    found = recognise(name, path, base, is_base_known=model is not None)
    write_published(found, folder, progress)
    return _summary(found, folder)


def heads_folder(heads: str, target: Target) -> tuple[str, Path]:
    """Name and native folder of a user's heads; published ones are imported for the target."""
    if (Path(heads) / DESCRIPTION).is_file():
        return Path(heads).resolve().name, Path(heads)
    name, path = locate(heads)
    text_config = target.config.get_text_config()
    base = Base(target.name, target.hidden_size, target.vocab_size, text_config)
    found = recognise(name, path, lambda: base, is_base_known=True)
    files = [file.resolve() for file in found.weights.files]
    facts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    digest = sha256_json([HEADS_FORMAT, facts, found.layout.config.to_dict(), found.base_name])
    short = re.sub(r"[^\w.-]+", "--", name)
    folder = cache_root() / "heads" / f"{short}-{digest[:12]}"
    if not _is_whole(folder):
        write_published(found, folder)
    return name, folder


def _named_base(path: Path) -> tuple[str, Any]:
    """Name and configuration of the model that config.json names."""
    base = read_config(path).get(BASE_NAME)
    if not isinstance(base, str):
        raise HeadsError(
            f"{path} does not name the model that its heads were trained for",
            "its configuration, which these heads need",
            "pass --model",
        )
    try:
        return load_config(base)
    except ModelError as error:
        raise ModelError(
            f"{error.found}; {path} names it as the model of its heads, which need to know its "
            "configuration",
            error.expected,
            "pass --model with a folder of that model (its config.json suffices), or check the "
            "network",
        ) from error


def _base(name: str, config: Any) -> Base:
    text = config.get_text_config()
    return Base(name, int(text.hidden_size), int(text.vocab_size), text)


def _summary(found: Published, folder: Path) -> Imported:
    config = found.layout.config
    kept = [found.weights.info[name] for name in found.layout.tensors.values()]
    return Imported(
        folder=folder,
        layout=found.layout.name,
        n_heads=config.n_heads,
        n_layers=config.n_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target=found.base_name,
        dtypes=sorted({str(info.dtype).removeprefix("torch.") for info in kept}),
        size_bytes=(folder / TENSORS).stat().st_size,
        ignored=found.layout.ignored,
        notes=found.layout.notes,
    )


def _is_whole(folder: Path) -> bool:
    try:
        read_description(folder)
        check_safetensors(folder / TENSORS)
    except EntmtpError:
        return False
    return True
