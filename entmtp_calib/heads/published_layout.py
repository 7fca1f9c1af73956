"""What published heads consist of, told from the names and shapes of their tensors alone.

Hydra and Medusa name their tensors differently and mean the same: numbered heads of residual
blocks, each with a vocabulary projection of its own or with the target's. The later blocks of a
head are one module in the published code, so their tensors are copies. Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.heads.native import DTYPES
from entmtp_calib.heads.published_files import TensorInfo

_OWN_NAMES = {"res_connection": "skip"}
_AGAIN = "download or copy the heads again"


@dataclass(frozen=True)
class Base:
    """The language model that heads were trained for, as far as they depend on it.

    Attributes:
        config: transformers' configuration of its text model.
    """

    name: str
    hidden_size: int
    vocab_size: int
    config: Any


FindBase = Callable[[], Base]
"""The base model where it is needed; most heads say all of themselves."""


@dataclass(frozen=True)
class Part:
    """What a tensor is.

    Attributes:
        head: 0-based.
        block: 0-based residual block; None for the vocabulary projection.
        role: such as linear.weight; of a projection weight or bias.
    """

    head: int
    block: int | None
    role: str


@dataclass(frozen=True)
class Blocks:
    """All heads of a file in native names.

    Attributes:
        tensors: native name -> name in the file.
        zeros: native names of biases that were dropped -> name of their weight in the file.
        copies: pairs of names in the file whose tensors must be equal; the first is kept.
    """

    n_heads: int
    n_layers: int
    tensors: dict[str, str]
    zeros: dict[str, str]
    copies: list[tuple[str, str]]


@dataclass(frozen=True)
class Layout:
    """A published checkpoint, understood.

    Attributes:
        name: of the layout, such as Medusa V1.
        tensors, zeros, copies: see `Blocks`; with the prefix layer.
        ignored: tensors that are not the heads' own.
        notes: what a user may want to know, such as where config.json is wrong.
    """

    name: str
    config: HeadsConfig
    tensors: dict[str, str]
    zeros: dict[str, str]
    copies: list[tuple[str, str]]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


def collect(
    names: Iterable[str], parse: Callable[[str], Part | None], where: object, family: str
) -> dict[Part, str]:
    """The name in the file of each part; every name must be that of one."""
    parts: dict[Part, str] = {}
    for name in sorted(names):
        part = parse(name)
        if part is None or part in parts:
            raise unknown(where, name, family)
        parts[part] = name
    return parts


def assemble(parts: Mapping[Part, str], where: object, may_lack_biases: bool = False) -> Blocks:
    """Put parts together; heads and layers are counted, whatever a configuration says.

    Args:
        parts: name in the file of each part.
        where: the file, for messages.
    """
    heads = sorted({part.head for part in parts})
    layers = {_layers(parts, head) for head in heads}
    if heads != list(range(len(heads))) or len(layers) != 1 or 0 in layers:
        raise HeadsError(
            f"{where} holds heads {', '.join(map(str, heads))}"
            f" of {' or '.join(map(str, sorted(layers)))} whole layers",
            "heads from 0 on without a gap, all of the same layers from 0 on",
            _AGAIN,
        )
    n_layers = layers.pop()
    tensors = {_native(part): name for part, name in parts.items() if (part.block or 0) < 2}
    zeros = {}
    if may_lack_biases and not any(name.endswith("linear.bias") for name in tensors):
        ends = "linear.weight", "linear.bias"
        zeros = {n.replace(*ends): name for n, name in tensors.items() if n.endswith(ends[0])}
    return Blocks(
        n_heads=len(heads),
        n_layers=n_layers,
        tensors=tensors,
        zeros=zeros,
        copies=[
            (name, parts[Part(part.head, block, part.role)])
            for part, name in parts.items()
            if part.block == 1
            for block in range(2, n_layers)
        ],
    )


def check_complete(layout: Layout, info: Mapping[str, TensorInfo], where: object) -> None:
    """Refuse tensors that are missing, too many, of another shape or of no type of ours."""
    wanted = _shapes(layout.config)
    missing = sorted(wanted.keys() - layout.tensors.keys() - layout.zeros.keys())
    if missing:
        raise HeadsError(
            f"{where} lacks the tensor that is {missing[0]} here ({len(missing)} missing)",
            f"all tensors of {layout.name} heads",
            _AGAIN,
        )
    for native, name in layout.tensors.items():
        if native not in wanted:
            raise unknown(where, name, layout.name)
        found = info[name]
        if found.shape != wanted[native]:
            raise HeadsError(
                f"{where}: {name} has shape {list(found.shape)}", f"shape {list(wanted[native])}"
            )
        if found.dtype not in DTYPES:
            raise HeadsError(
                f"{where}: {name} is {found.dtype}",
                " or ".join(map(str, DTYPES)),
                "use heads that are not quantized",
            )


def check_base(layout: Layout, base: Base, where: object) -> None:
    """Refuse heads of another hidden size or vocabulary than the model's."""
    config = layout.config
    for what, theirs, ours in (
        ("hidden size", config.hidden_size, base.hidden_size),
        ("vocabulary size", config.vocab_size, base.vocab_size),
    ):
        if theirs != ours:
            raise HeadsError(
                f"{where} holds heads for {what} {theirs}",
                f"{what} {ours}, that of {base.name}",
                "pass the model that the heads were trained for with --model",
            )


def differences(config: Mapping[str, Any], counted: Mapping[str, Any]) -> list[str]:
    """A line for each value in config.json that is not what the tensors say."""
    return [
        f"config.json says {key} {config[key]}, the tensors are {value}"
        for key, value in counted.items()
        if key in config and config[key] != value
    ]


def unknown(where: object, name: str, layout: str) -> HeadsError:
    """The error for a tensor that has no place."""
    return HeadsError(
        f"{where}: no place for the tensor {name}",
        f"those of {layout} heads",
        "heads of an architecture of their own cannot be read",
    )


def matrix(info: Mapping[str, TensorInfo], name: str | None, where: object) -> tuple[int, int]:
    """Rows and columns of a weight that must be there."""
    found = info.get(name or "")
    if found is None or len(found.shape) != 2:
        raise HeadsError(f"{where} lacks a weight of its first head", "a matrix", _AGAIN)
    rows, columns = found.shape
    return rows, columns


def _layers(parts: Mapping[Part, str], head: int) -> int:
    """Whole blocks of a head; 0 if their numbers have a gap, or the later ones other tensors."""
    roles: dict[int, set[str]] = {}
    for part in parts:
        if part.head == head and part.block is not None:
            roles.setdefault(part.block, set()).add(part.role)
    is_whole = all(roles[block] == roles.get(1) for block in roles if block > 1)
    return len(roles) if is_whole and roles.keys() == set(range(len(roles))) else 0


def _native(part: Part) -> str:
    if part.block is None:
        return f"heads.{part.head}.projection.{part.role}"
    module, _, kind = part.role.partition(".")
    block = "again" if part.block else "first"
    return f"heads.{part.head}.{block}.{_OWN_NAMES.get(module, module)}.{kind}"


def _shapes(config: HeadsConfig) -> dict[str, tuple[int, ...]]:
    """The native tensors of an architecture; nothing is allocated."""
    with torch.device("meta"):
        rows = torch.empty(config.vocab_size, config.hidden_size)
        heads = Heads(config, rows, rows)
    return {name: tuple(value.shape) for name, value in heads.state_dict().items()}
