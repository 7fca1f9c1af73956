"""Topologies as tensors on a device, and whether the heads can draft them at all.

Everything a step looks up is built when a tree is loaded, so switching trees is a pointer swap.
This module knows no tokens and no loop.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import torch
from torch import Tensor

from entmtp_calib.errors import TreeError
from entmtp_calib.heads.model import RANK_CAP, Heads
from entmtp_calib.topology import Level, Topology
from entmtp_calib.tree import Tree


class Rows:
    """How the rows of one verify pass hang together; row 0 is the root, parents stand first.

    Args:
        parents: n + 1 parent rows; -1 for the root.
        depth_list: n + 1 depths, rising.
        depths: int64 [n + 1], the same on the device.
        mask: bool [n + 1, n + 1], a row sees itself and its ancestors.
    """

    def __init__(
        self, parents: list[int], depth_list: list[int], depths: Tensor, mask: Tensor
    ) -> None:
        self.parents, self.depth_list, self.depths = parents, depth_list, depths
        # One row needs no mask, and a chain's is the causal one.
        is_chain = depth_list[-1] == len(depth_list) - 1
        self.mask = None if is_chain else mask

    @property
    def n_rows(self) -> int:
        """The root and n nodes."""
        return len(self.parents)

    def rows_to(self, depth: int) -> int:
        """How many rows are no deeper."""
        return bisect_right(self.depth_list, depth)


class Plan(Rows):
    """One tree's topology as tensors on the device: all that a switch has to point at."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        super().__init__(
            topology.parents.tolist(),
            topology.depths.tolist(),
            torch.from_numpy(topology.depths).to(device),
            torch.from_numpy(topology.ancestor_mask).to(device),
        )
        self.tree = topology.tree
        self.levels = [LevelPlan(level, topology, device) for level in topology.levels]


class LevelPlan:
    """Index tensors of one level: which paths to extend, and where the choices go.

    Attributes:
        depth: of the drafted nodes, from 1.
        path_rows: int64 [R, depth], rows from the root to each parent.
        first, end: the nodes' rows, which are contiguous.
    """

    def __init__(self, level: Level, topology: Topology, device: torch.device) -> None:
        self.depth = level.depth
        ancestors = topology.ancestor_mask[level.parent_rows]
        paths = np.stack([np.flatnonzero(row) for row in ancestors])
        self.path_rows = torch.from_numpy(paths).to(device)
        self.first, self.end = int(level.node_rows[0]), int(level.node_rows[-1]) + 1
        self._parent = torch.from_numpy(level.node_parent).to(device)
        self._rank = torch.from_numpy(level.node_rank).to(device)
        self._flat: dict[int, Tensor] = {}

    def pick(self, chosen: Tensor) -> Tensor:
        """The nodes' tokens [m] out of their parents' choices [R, k]."""
        k = chosen.shape[1]
        if k not in self._flat:  # the same for all of a set of heads
            self._flat[k] = self._parent * k + self._rank
        return chosen.take(self._flat[k])


def check_tree(tree: Tree, heads: Heads | None) -> None:
    """Raise `TreeError` unless the heads can draft the tree."""
    n_heads = heads.n_heads if heads else 0
    if tree.depth > n_heads:
        raise TreeError(
            f"tree {tree.id} has depth {tree.depth}, and there are {n_heads} heads",
            f"a depth of at most {n_heads}",
            "use another tree, or heads with more depths",
        )
    width = heads.n_ranks if heads else RANK_CAP
    if tree.max_rank >= width:
        raise TreeError(
            f"tree {tree.id} uses child rank {tree.max_rank}",
            f"ranks below {width} with these heads",
            "use a narrower tree",
        )
