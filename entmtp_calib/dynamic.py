"""Trees that are built anew each step from what the heads are sure of, by EAGLE-2's rule.

Level by level the most probable paths are expanded, a path's probability being the product of the
heads' conditional probabilities along it; of all nodes drafted, the most probable ones are verified
(Li et al. 2024, EAGLE-2: expand, then rerank). No tree is chosen beforehand and nothing is
calibrated. The text stays plain decoding's, since any tree is verified alike. This module knows no
target, no cache and no acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp_calib.drafting import Proposal, Start
from entmtp_calib.errors import TreeError
from entmtp_calib.heads.model import Heads
from entmtp_calib.plan import Rows
from entmtp_calib.topology import ancestor_mask
from entmtp_calib.transfer import send, send_index


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's rule, in the place of a policy.

    Attributes:
        expand: paths extended per level, and choices drafted under each (fewer where the heads
            rank fewer).
        nodes: most nodes that are verified.
        depth: levels drafted.

    Raises:
        ValueError: a number below 1.
    """

    expand: int
    nodes: int
    depth: int

    def __post_init__(self) -> None:
        if min(self.expand, self.nodes, self.depth) < 1:
            raise ValueError(f"{self} has a number below 1")


def check_dynamic(dynamic: Dynamic, heads: Heads | None) -> None:
    """Raise `TreeError` unless there are heads for every level."""
    n_heads = heads.n_heads if heads else 0
    if dynamic.depth > n_heads:
        raise TreeError(
            f"dynamic trees of depth {dynamic.depth}, and there are {n_heads} heads",
            f"a depth of at most {n_heads}",
            "ask for shallower trees, or use heads with more depths",
        )


class DynamicProposer:
    """Proposes a tree built for the step: a `Proposer`. Raises what `check_dynamic` does."""

    def __init__(self, dynamic: Dynamic, heads: Heads | None, device: torch.device) -> None:
        check_dynamic(dynamic, heads)
        self._dynamic, self._heads, self._device = dynamic, heads, device

    @property
    def row_counts(self) -> set[int]:
        """The root alone, and with the most nodes that are verified."""
        return {1, self._dynamic.nodes + 1}

    @property
    def drafts(self) -> bool:
        """Always."""
        return True

    def propose(self, start: Start) -> Proposal:
        """The step's tree, or plain decoding where its deepest row might have no position."""
        ids = torch.full((1,), start.root, device=self._device)
        if self._dynamic.depth > start.room:
            return Proposal(ids, _rows([], [], self._device))
        assert self._heads is not None  # check_dynamic has seen to it
        assert start.vector is not None
        drafted = _expand(self._dynamic, self._heads, start.vector, ids)
        kept, parents, depths = _rerank(drafted, self._dynamic.nodes)
        tokens = torch.cat([ids, drafted.ids[kept]])
        return Proposal(tokens, _rows(parents, depths, self._device), levels=self._dynamic.depth)

    def observe(self, accepted_draft_tokens: int, speculated: bool) -> None:
        """Nothing is remembered from step to step."""


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Drafted nodes in the order they were drafted, level after level; each field is [m].

    Attributes:
        ids: token ids.
        values: float64, the probability of the path that ends there.
        parents: the parent's number, counting from 1; 0 is the root.
        depths: from 1.
    """

    ids: Tensor
    values: Tensor
    parents: Tensor
    depths: Tensor


def _expand(dynamic: Dynamic, heads: Heads, vector: Tensor, root: Tensor) -> _Nodes:
    """Draft level by level, each from the most probable paths of the one before.

    Args:
        vector: [h] what drafting is conditioned on.
        root: int64 [1].
    """
    width = min(dynamic.expand, heads.n_ranks)
    paths, path_values = root[None], torch.ones(1, dtype=torch.float64, device=root.device)
    path_nodes = torch.zeros_like(root)
    levels: list[_Nodes] = []
    n_drafted = 0
    for depth in range(1, dynamic.depth + 1):
        ids, probs = heads.draft_level(depth, vector, paths)
        # Rounding may leave a probability just above 1; a child must not pass its parent.
        probs = probs[:, :width].double().clamp(max=1)
        ids, values = ids[:, :width].flatten(), (path_values[:, None] * probs).flatten()
        parents = path_nodes.repeat_interleave(width)
        levels.append(_Nodes(ids, values, parents, torch.full_like(ids, depth)))
        best = _largest(values, dynamic.expand)
        paths = torch.cat([paths[best // width], ids[best, None]], dim=1)
        path_values, path_nodes = values[best], n_drafted + 1 + best
        n_drafted += len(ids)
    return _Nodes(
        *(
            torch.cat([getattr(level, name) for level in levels])
            for name in ("ids", "values", "parents", "depths")
        )
    )


def _rerank(drafted: _Nodes, nodes: int) -> tuple[Tensor, list[int], list[int]]:
    """The most probable nodes: their indices [n] in drafted order, parent rows and depths.

    A parent is at least as probable as its child and drafted earlier, so it is kept with it.
    """
    kept = _largest(drafted.values, nodes).sort().values
    row_of = torch.zeros(len(drafted.ids) + 1, dtype=torch.long, device=kept.device)
    row_of[kept + 1] = torch.arange(1, len(kept) + 1, device=kept.device)
    parents, depths = torch.stack([row_of[drafted.parents[kept]], drafted.depths[kept]]).tolist()
    return kept, parents, depths


def _largest(values: Tensor, n: int) -> Tensor:
    """Indices of the n largest, in falling order; of equal values the earlier comes first."""
    return values.argsort(descending=True, stable=True)[:n]


def _rows(parents: list[int], depths: list[int], device: torch.device) -> Rows:
    """The rows of a tree whose nodes have these parent rows and depths."""
    parents, depths = [-1, *parents], [0, *depths]
    mask = send(torch.from_numpy(ancestor_mask(parents)), device)
    return Rows(parents, depths, send_index(depths, device), mask)
