"""Topologies as tensors on a device, and whether the heads can draft them at all.

Everything a step looks up is built when a tree is loaded, so switching trees is a pointer swap.
This module knows no tokens and no loop.
"""

from __future__ import annotations

import numpy as np
import torch

from entmtp_calib.errors import TreeError
from entmtp_calib.heads.model import RANK_CAP, Heads
from entmtp_calib.topology import Level, Topology
from entmtp_calib.tree import Tree


class Plan:
    """One tree's topology as tensors on the device: all that a switch has to point at."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self.tree, self.n_rows = topology.tree, topology.n_rows
        self.parents: list[int] = topology.parents.tolist()
        self.depths = torch.from_numpy(topology.depths).to(device)
        self.depth_list: list[int] = topology.depths.tolist()
        # One row needs no mask, and a chain's is the causal one.
        is_chain = self.tree.n_nodes == self.tree.depth
        mask = torch.from_numpy(topology.ancestor_mask)
        self.mask = None if is_chain else mask.to(device)
        self.levels = [LevelPlan(level, topology, device) for level in topology.levels]


class LevelPlan:
    """Index tensors of one level: which paths to extend, and where the choices go."""

    def __init__(self, level: Level, topology: Topology, device: torch.device) -> None:
        self.depth, self.first_chain = level.depth, level.first_chain
        ancestors = topology.ancestor_mask[level.parent_rows]
        paths = np.stack([np.flatnonzero(row) for row in ancestors])
        self.path_rows = torch.from_numpy(paths).to(device)
        self.node_parent = torch.from_numpy(level.node_parent).to(device)
        self.node_rank = torch.from_numpy(level.node_rank).to(device)
        self.node_rows = torch.from_numpy(level.node_rows).to(device)
        others = np.arange(len(paths)) != level.first_chain
        self.other_parents = torch.from_numpy(np.flatnonzero(others)).to(device)


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
