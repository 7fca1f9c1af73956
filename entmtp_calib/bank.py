"""The bank: the trees the scheduler may use, with their costs, and the policies over them.

One safetensors file: per tree its paths, parents, depths and ancestor mask, so that a runner needs
no code of ours to use them, and one JSON document with everything measured. A file is read only
after its size, its format version and the agreement of its tensors with its paths are checked. This
module knows neither torch nor how anything was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entmtp_calib import files
from entmtp_calib.errors import ArtifactError, EntmtpError, HeadsError, TreeError
from entmtp_calib.policy import Policy, policy_from_dict
from entmtp_calib.provenance import utc_now
from entmtp_calib.records import FORMAT_VERSION, strict_json
from entmtp_calib.timing import Interval
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import Tree

FILE_NAME = "bank.safetensors"
METADATA_KEY = "entmtp"
TREES, EXTRAS = "trees", "extra_trees"  # prefixes of the tensors' names, keys of the document

_FIXED_FACTS = ("hidden_size", "vocab_size")  # cannot differ between bank, target and heads
_NAMES = ("name", "path")
_DOCUMENT = {
    "task": str,
    "model": dict,
    "heads": dict,
    "trees": list,
    "policies": dict,
    "extra_trees": list,
    "best": int,
    "auto": str,
    "hardware": dict,
    "splits": dict,
    "seeds": dict,
    "created": str,
    "notes": list,
}

_OBJECTS = {TREES, EXTRAS, "policies", "notes"}  # keys whose values are made into our own types

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class BankEntry:
    """A tree and what was measured of it on the select split.

    Attributes:
        tree: the tree.
        mean_emitted_tokens: emitted tokens per step, live; plain decoding has 1.
        step_ms: cost of one step.
        tokens_per_second: end to end.
        speedup_over_plain: the same over plain decoding's, paired by prompt.
    """

    tree: Tree
    mean_emitted_tokens: Interval
    step_ms: float
    tokens_per_second: Interval
    speedup_over_plain: Interval

    def to_dict(self) -> dict[str, Any]:
        """For the bank's document; the paths themselves are tensors."""
        return {
            "id": self.tree.id,
            "n_nodes": self.tree.n_nodes,
            "depth": self.tree.depth,
            **_interval_to_dict("mean_acceptance_length", self.mean_emitted_tokens),
            "step_ms": self.step_ms,
            **_interval_to_dict("tokens_per_second", self.tokens_per_second),
            **_interval_to_dict("speedup_over_plain", self.speedup_over_plain),
        }

    @classmethod
    def from_dict(cls, tree: Tree, data: Mapping[str, Any]) -> BankEntry:
        """Inverse of `to_dict`; ValueError if the document describes another tree."""
        described = (data["id"], data["n_nodes"], data["depth"])
        if described != (tree.id, tree.n_nodes, tree.depth):
            raise ValueError(f"{described} does not describe tree {tree.id}")
        return cls(
            tree,
            _interval_from_dict("mean_acceptance_length", data),
            _number(data["step_ms"], math.nan),
            _interval_from_dict("tokens_per_second", data),
            _interval_from_dict("speedup_over_plain", data),
        )


@dataclass(frozen=True)
class Bank:
    """Trees for one model, heads, task and machine.

    Attributes:
        task: the calibration set's name.
        model: facts of the target: name, fingerprint, dtype, engine, device, and its sizes.
        heads: facts of the heads: kind, n_heads, name, fingerprint.
        entries: the frontier: strictly rising in nodes and in speed.
        policies: by name; their indices count the entries, then the extras.
        best: index of the fastest fixed tree.
        extras: trees off the frontier that a policy uses: slower as the only tree, faster where
            they are chosen. Their speed is only known where they ran alone.
        auto: name of the policy to use unless told otherwise.
        hardware: the machine the costs are of (`provenance.hardware`).
        splits: the prompts used for each purpose.
        seeds: by name.
        created: time in UTC.
        notes: what a reader should know, a line each.
    """

    task: str
    model: dict[str, Any]
    heads: dict[str, Any]
    entries: tuple[BankEntry, ...]
    policies: dict[str, Policy]
    best: int
    extras: tuple[BankEntry, ...] = ()
    auto: str = "static"
    hardware: dict[str, Any] = field(default_factory=dict)
    splits: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=utc_now)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = [entry.tree.n_nodes for entry in self.entries]
        if not sizes or any(small >= large for small, large in pairwise(sizes)):
            raise ValueError(f"trees of {sizes} nodes are not strictly rising")
        chosen: dict[str, tuple[int, ...]] = {"best": (self.best,)}
        chosen |= {name: policy.indices for name, policy in self.policies.items()}
        for name, indices in chosen.items():
            if not all(0 <= index < len(self.trees) for index in indices):
                raise ValueError(f"{name} chooses trees {indices} of {len(self.trees)}")
        if len(set(self.trees)) < len(self.trees):
            raise ValueError("a tree stands in the bank twice")
        if self.policies and self.auto not in self.policies:
            raise ValueError(f"auto is {self.auto}, one of {', '.join(self.policies)} is possible")

    @property
    def trees(self) -> tuple[Tree, ...]:
        """All trees, as policies count them: the frontier, smallest first, then the extras."""
        return tuple(entry.tree for entry in (*self.entries, *self.extras))

    @property
    def frontier(self) -> tuple[Tree, ...]:
        """The trees of the frontier, smallest first."""
        return tuple(entry.tree for entry in self.entries)

    @property
    def depth(self) -> int:
        """Depth of the deepest tree: the heads it needs."""
        return max(tree.depth for tree in self.trees)

    def find(self, name: str | int) -> int:
        """The index of the tree with this id or number; TreeError if there is none."""
        ids = [tree.id for tree in self.trees]
        if name in ids:
            return ids.index(str(name))
        if str(name).isdecimal() and int(name) < len(ids):
            return int(name)
        raise TreeError(f"the bank has no tree {name!r}", f"one of {', '.join(ids)}")

    def check_against(self, model: Mapping[str, Any], heads: Mapping[str, Any]) -> list[str]:
        """What differs between what the bank was measured with and what it shall run with.

        Args:
            model: facts of the target, as in `Bank.model`; facts only one side knows are skipped.
            heads: facts of the heads, as in `Bank.heads`.

        Returns:
            A line per difference. Text stays right; acceptance and speed may not be the bank's.

        Raises:
            HeadsError: trees deeper than the heads, or sizes that differ.
        """
        n_heads = heads.get("n_heads", self.depth)
        if n_heads < self.depth:
            raise HeadsError(
                f"the bank has a tree of depth {self.depth} and there are {n_heads} heads",
                "a head per depth",
                "use the heads the bank was made with, or build a bank for these",
            )
        lines = []
        for what, then, now in (("model", self.model, model), ("heads", self.heads, heads)):
            differing = _differing(then, now)
            lines += [f"{what} {key} {then[key]} then, {now[key]} now" for key in differing]
            if set(differing) & set(_FIXED_FACTS):
                action = "use the model and heads that the bank was made with"
                raise HeadsError(f"bank of other sizes: {', '.join(lines)}", action=action)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The document in the file's metadata."""
        return {
            "format_version": FORMAT_VERSION,
            "task": self.task,
            "model": self.model,
            "heads": self.heads,
            "trees": [entry.to_dict() for entry in self.entries],
            "extra_trees": [entry.to_dict() for entry in self.extras],
            "policies": {name: policy.to_dict() for name, policy in self.policies.items()},
            "best": self.best,
            "auto": self.auto,
            "hardware": self.hardware,
            "splits": self.splits,
            "seeds": self.seeds,
            "created": self.created,
            "notes": self.notes,
        }

    def to_bytes(self) -> bytes:
        """The file's content; equal banks give equal bytes."""
        from safetensors.numpy import save

        arrays: Arrays = {}
        for kind, entries in ((TREES, self.entries), (EXTRAS, self.extras)):
            for number, entry in enumerate(entries):
                arrays |= _tree_arrays(kind, number, entry.tree)
        return save(arrays, metadata={METADATA_KEY: strict_json(self.to_dict())})

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        files.write_bytes(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Bank:
        """Read a bank's file, or that of a run folder.

        Raises:
            ArtifactError: naming the file and what is wrong with it.
        """
        path = file_of(Path(path))
        arrays, metadata = files.read_safetensors(path)
        try:
            document = json.loads(metadata[METADATA_KEY])
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ArtifactError(
                f"{path} is not a bank", "a file written by entmtp build-bank", "name another file"
            ) from None
        return _bank_from_document(path, document, arrays)


def file_of(path: Path) -> Path:
    """The bank's file, where either it or its run folder is named."""
    return path / FILE_NAME if path.is_dir() else path


def _bank_from_document(path: Path, document: Any, arrays: Arrays) -> Bank:
    if not isinstance(document, dict):
        raise files.damaged(path, "its metadata is not a JSON object")
    files.check_version(path, document.get("format_version"))
    document = {EXTRAS: [], "auto": "static", **document}
    files.check_keys(path, document, _DOCUMENT)
    stored = _trees_from_arrays(path, arrays)
    for kind, trees in stored.items():
        if len(trees) != len(document[kind]):
            problem = f"{len(document[kind])} {kind} described, {len(trees)} stored"
            raise files.damaged(path, problem)
    try:
        return Bank(
            entries=tuple(map(BankEntry.from_dict, stored[TREES], document[TREES])),
            extras=tuple(map(BankEntry.from_dict, stored[EXTRAS], document[EXTRAS])),
            policies={
                name: policy_from_dict(policy) for name, policy in document["policies"].items()
            },
            notes=tuple(map(str, document["notes"])),
            **{key: document[key] for key in _DOCUMENT.keys() - _OBJECTS},
        )
    except (KeyError, TypeError, ValueError, AttributeError, EntmtpError) as error:
        raise files.damaged(path, f"its document does not fit together: {error}") from error


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The facts both sides know and disagree on; under one fingerprint names do not matter."""
    known = [key for key in then if key in now and not isinstance(then[key], dict)]
    if "fingerprint" in known and then["fingerprint"] == now["fingerprint"]:
        known = [key for key in known if key not in _NAMES]
    return [key for key in known if then[key] != now[key]]


def _tree_arrays(kind: str, number: int, tree: Tree) -> Arrays:
    """The tensors of one tree with n nodes, rows and nodes in (depth, path) order.

    paths int16 [n, depth] padded with -1, parents and depths int16 [n + 1] root first,
    ancestor_mask uint8 [n + 1, n + 1].
    """
    topology = compile_tree(tree)
    paths = np.full((tree.n_nodes, tree.depth), -1, dtype=np.int16)
    for row, path in enumerate(tree.paths):
        paths[row, : len(path)] = path
    return {
        f"{kind}.{number}.paths": paths,
        f"{kind}.{number}.parents": topology.parents.astype(np.int16),
        f"{kind}.{number}.depths": topology.depths.astype(np.int16),
        f"{kind}.{number}.ancestor_mask": topology.ancestor_mask.astype(np.uint8),
    }


def _trees_from_arrays(path: Path, arrays: Arrays) -> dict[str, list[Tree]]:
    """The trees, after checking that every tensor is exactly what its tree's paths make it."""
    stored: dict[str, list[Tree]] = {TREES: [], EXTRAS: []}
    expected: Arrays = {}
    for kind, trees in stored.items():
        while (name := f"{kind}.{len(trees)}.paths") in arrays:
            tree = _tree_from_paths(path, name, arrays[name])
            mask = arrays.get(f"{kind}.{len(trees)}.ancestor_mask")
            if mask is None or mask.shape != (tree.n_nodes + 1, tree.n_nodes + 1):
                problem = f"{name} has {tree.n_nodes} nodes and no mask of that size"
                raise files.damaged(path, problem)
            expected |= _tree_arrays(kind, len(trees), tree)
            trees.append(tree)
    for name in sorted(expected.keys() | arrays.keys()):
        if not _same_array(expected.get(name), arrays.get(name)):
            raise files.damaged(path, f"{name} does not belong to the trees' paths")
    return stored


def _tree_from_paths(path: Path, name: str, rows: NDArray[Any]) -> Tree:
    if rows.ndim != 2:
        raise files.damaged(path, f"{name} has shape {list(rows.shape)}")
    try:
        return Tree.of([rank for rank in row if rank != -1] for row in rows.tolist())
    except TreeError as error:
        raise files.damaged(path, f"{name}: {error.found}") from None


def _same_array(expected: NDArray[Any] | None, found: NDArray[Any] | None) -> bool:
    return (
        expected is not None
        and found is not None
        and expected.dtype == found.dtype
        and np.array_equal(expected, found)
    )


def _interval_to_dict(name: str, interval: Interval) -> dict[str, Any]:
    return {name: interval.value, f"{name}_interval": [interval.low, interval.high]}


def _interval_from_dict(name: str, data: Mapping[str, Any]) -> Interval:
    low, high = data[f"{name}_interval"]
    value = _number(data[name], math.nan)
    return Interval(_number(low, -math.inf), value, _number(high, math.inf))


def _number(value: Any, undefined: float) -> float:
    """A number of the document, where null stands for one that is not finite."""
    if value is None:
        return undefined
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
