"""Sequoia's grow map: a tree as a dictionary of index lists in a torch file.

Nodes are numbered breadth-first, the root is node 0 and counts. Per level `roots` holds its nodes
and `branches` their numbers of children, so the k-th child of a node is its rank k: siblings have
no gaps. This module imports torch only to write and to read the file.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from entmtp_calib.errors import TreeError
from entmtp_calib.formats.lists import MAX_NODES, rank_gaps
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import Path, Tree

ROOTS, BRANCHES, SUCCESSORS = "roots", "branches", "Successors"
MASK, DEPTH, SIZE = "mask", "depth", "size"
ZIP_MAGIC = b"PK\x03\x04"  # how a torch file begins
_EXPORT_AGAIN = "name a grow map as Sequoia's tree_search.py writes it"


def grow_map(tree: Tree) -> dict[str, Any]:
    """The dictionary, its mask [n + 1, n + 1] and depths [n + 1] as int64 arrays.

    Raises:
        TreeError: for siblings whose ranks have gaps.
    """
    gaps = rank_gaps(tree)
    if gaps:
        raise TreeError(
            f"tree {tree.id} has {list(gaps[0])} without the sibling before it",
            "sibling ranks without gaps, since Sequoia counts children",
            "export another tree of the bank with --tree",
        )
    topology = compile_tree(tree)
    children = _children(tree.parents)
    levels = [
        [row for row, at in enumerate(tree.depths) if at == depth]
        for depth in range(tree.depth + 1)
    ]
    return {
        ROOTS: levels,
        BRANCHES: [[len(children[row]) for row in level] for level in levels],
        SUCCESSORS: children,
        MASK: topology.ancestor_mask.astype(np.int64),
        DEPTH: topology.depths,
        SIZE: topology.n_rows,
    }


def write(tree: Tree) -> bytes:
    """The torch file's content."""
    import torch

    values = grow_map(tree)
    arrays = {name: torch.from_numpy(values[name].copy()) for name in (MASK, DEPTH)}
    file = io.BytesIO()
    torch.save({**values, **arrays}, file)
    return file.getvalue()


def read(data: bytes) -> Tree:
    """The tree of a torch file's content; nothing but numbers and lists is unpickled.

    Raises:
        TreeError: the file is none, or its entries do not belong together.
    """
    import torch

    try:
        values = torch.load(io.BytesIO(data), weights_only=True)
    except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        found = f"not a torch file of numbers and lists ({str(error).splitlines()[0][:80]})"
        raise TreeError(found, action=_EXPORT_AGAIN) from None
    return from_grow_map(values)


def from_grow_map(values: Any) -> Tree:
    """The tree of a grow map; `TreeError` where its entries do not belong together."""
    try:
        found: dict[str, Any] = {
            name: _plain(values[name]) for name in (ROOTS, BRANCHES, SUCCESSORS)
        }
        found |= {name: np.asarray(values[name]).tolist() for name in (MASK, DEPTH)}
        found[SIZE] = int(values[SIZE])
        tree = _tree(found[SUCCESSORS])
    except (KeyError, TypeError, ValueError, IndexError):
        raise TreeError("no grow map of a tree", action=_EXPORT_AGAIN) from None
    expected = grow_map(tree)
    for name, value in found.items():
        if value != (expected[name].tolist() if name in (MASK, DEPTH) else expected[name]):
            problem = f"a grow map whose {name} does not belong to its {SUCCESSORS}"
            raise TreeError(problem, action=_EXPORT_AGAIN)
    return tree


def _children(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    return children


def _tree(successors: list[list[int]]) -> Tree:
    """The tree whose rows have these children; ValueError unless parents stand before them."""
    if not 1 < len(successors) <= MAX_NODES + 1:
        raise ValueError(f"{len(successors)} rows")
    paths: dict[int, Path] = {0: ()}
    for row, children in enumerate(successors):
        for rank, child in enumerate(children):
            if child in paths or not row < child < len(successors):
                raise ValueError(f"child {child} of row {row}")
            paths[child] = (*paths[row], rank)
    if len(paths) < len(successors):
        raise ValueError("rows without a parent")
    return Tree(tuple(path for path in paths.values() if path))


def _plain(rows: Any) -> list[list[int]]:
    """Lists of lists of integers, whatever sequence they came as."""
    return [[int(value) for value in row] for row in rows]
