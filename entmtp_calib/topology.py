"""A tree compiled to index arrays, so that a step only looks things up.

Rows are the verify pass's rows: row 0 is the root, row k + 1 is the tree's node k. Everything is
computed once per tree and shared, so choosing another tree is a pointer swap. Rows are indexed
explicitly, never by counting siblings, so any prefix-closed tree drafts the right tokens. This
module knows no tokens, no tensors and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from entmtp_calib.tree import Tree


@dataclass(frozen=True, eq=False)
class Level:
    """How to draft the m nodes of one depth with one batched head call over R parents.

    Attributes:
        depth: depth of the drafted nodes, from 1; head `depth` drafts them.
        parent_rows: int64 [R], rows that have children here, rising.
        node_parent: int64 [m], each node's index into `parent_rows`.
        node_rank: int64 [m], each node's rank among its parent's choices.
        node_rows: int64 [m], each node's row; contiguous.
    """

    depth: int
    parent_rows: NDArray[np.int64]
    node_parent: NDArray[np.int64]
    node_rank: NDArray[np.int64]
    node_rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Topology:
    """The arrays of one tree with n nodes.

    Attributes:
        tree: the tree they belong to.
        parents: int64 [n + 1], parent row of each row; -1 for the root.
        depths: int64 [n + 1], also each row's position behind the committed length.
        ancestor_mask: bool [n + 1, n + 1], a row sees itself, its ancestors and the root.
        leaf_paths: rows from depth 1 to each leaf, the root's row left out.
        levels: one drafting plan per depth.
    """

    tree: Tree
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    ancestor_mask: NDArray[np.bool_]
    leaf_paths: tuple[tuple[int, ...], ...]
    levels: tuple[Level, ...]

    @property
    def n_rows(self) -> int:
        """Rows of the verify pass."""
        return len(self.parents)


@lru_cache(maxsize=4096)
def compile_tree(tree: Tree) -> Topology:
    """Compile a tree; the same tree gives the same object. The arrays are shared: do not write."""
    parents = np.array(tree.parents, dtype=np.int64)
    mask = ancestor_mask(parents.tolist())
    return Topology(
        tree=tree,
        parents=parents,
        depths=np.array(tree.depths, dtype=np.int64),
        ancestor_mask=mask,
        leaf_paths=_leaf_paths(parents, mask),
        levels=tuple(_level(tree, depth) for depth in range(1, tree.depth + 1)),
    )


def ancestor_mask(parents: Sequence[int]) -> NDArray[np.bool_]:
    """[n + 1, n + 1]: each row's parent's row of the mask, and itself.

    Args:
        parents: n + 1 parent rows, which stand before their children; -1 for the root.
    """
    mask = np.eye(len(parents), dtype=np.bool_)
    for row in range(1, len(parents)):
        mask[row] |= mask[parents[row]]
    return mask


def _leaf_paths(parents: NDArray[np.int64], mask: NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    """The ancestors of each row that is nobody's parent; rows rise with depth along a path."""
    leaves = sorted(set(range(1, len(parents))) - set(parents.tolist()))
    return tuple(tuple(np.flatnonzero(mask[leaf])[1:].tolist()) for leaf in leaves)


def _level(tree: Tree, depth: int) -> Level:
    rows = np.flatnonzero(np.array(tree.depths) == depth)
    parent_rows, node_parent = np.unique(np.array(tree.parents)[rows], return_inverse=True)
    return Level(
        depth=depth,
        parent_rows=parent_rows.astype(np.int64),
        node_parent=node_parent.astype(np.int64),
        node_rank=np.array([tree.paths[row - 1][-1] for row in rows], dtype=np.int64),
        node_rows=rows.astype(np.int64),
    )
