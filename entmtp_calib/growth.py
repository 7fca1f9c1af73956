"""Candidate trees, grown node by node from a trace.

The paper's rule: for each max depth start from {(0)}; at each size, score the tree with every
growth candidate on the steps that the *current* tree visits, and add the best one. Scoring inside
the joint tree is what makes the joint figures optimistic, which recalibration then measures. This
module knows no costs: which of these trees are fast is another question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from entmtp_calib.errors import TreeError
from entmtp_calib.frontier import strict_pareto
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.replay import StepCounts, step_counts, walk
from entmtp_calib.trace import Bools, Ints, Trace
from entmtp_calib.tree import EMPTY, Path, Tree

NO_CANDIDATE = -2  # no rank, not even a missing one (-1), equals it


@dataclass(frozen=True)
class Grown:
    """A candidate tree and how it was scored when its last node was added.

    Attributes:
        tree: the tree.
        max_depth: the depth limit it was grown under.
        joint: counts of this tree on the steps that the tree without its last node visits (the
            first tree: on its own steps).
    """

    tree: Tree
    max_depth: int
    joint: StepCounts

    @property
    def joint_emitted(self) -> float:
        """Joint-scored mean acceptance length, the root included."""
        return self.joint.mean_emitted


def grow(trace: Trace, max_depth: int, max_nodes: int, n_ranks: int) -> list[Grown]:
    """One tree per size, from {(0)} up to `max_nodes` nodes or until nothing can be added.

    Args:
        max_depth: no node is deeper; at most the trace's heads.
        n_ranks: child ranks below this one may be used.

    Ties in acceptance go as `best_candidate` says.
    """
    if not 1 <= max_depth <= trace.max_depth:
        raise TreeError(
            f"max depth {max_depth}", f"1 to {trace.max_depth}, the heads that the trace recorded"
        )
    growing = _Growing(trace)
    growing.add((0,))
    grown = [Grown(growing.tree, max_depth, growing.counts(growing.visited()))]
    while growing.tree.n_nodes < max_nodes:
        candidates = growing.tree.growth_candidates(max_depth, n_ranks)
        if not candidates:
            break
        visited = growing.visited()
        growing.add(best_candidate(growing.gains(candidates, visited)))
        grown.append(Grown(growing.tree, max_depth, growing.counts(visited)))
    return grown


def grow_all(
    trace: Trace, max_depth: int, max_nodes: int, n_ranks: int, progress: Progress | None = None
) -> list[Grown]:
    """The distinct trees grown under the depth limits 1 to `max_depth`, arguments as for `grow`."""
    progress = progress or Silent()
    progress.start("growing trees", max_depth)
    distinct: dict[Tree, Grown] = {}
    for depth in range(1, max_depth + 1):
        for entry in grow(trace, depth, max_nodes, n_ranks):
            distinct.setdefault(entry.tree, entry)
        progress.advance(1, f"{len(distinct)} trees")
    progress.done()
    return list(distinct.values())


def best_candidate(gains: Mapping[Path, int]) -> Path:
    """The growth candidate to add: the one that gains most.

    Args:
        gains: per candidate, the accepted draft tokens that it adds on the current tree's steps.

    Ties go to the shallower node, then the smaller sum of ranks, then the smaller path.
    """
    return min(gains, key=lambda path: (-gains[path], len(path), sum(path), path))


def acceptance_frontier(grown: Iterable[Grown]) -> list[Grown]:
    """The trees with strictly more joint acceptance than every tree of as many or fewer nodes."""
    entries = list(grown)
    kept = strict_pareto(
        [entry.tree.n_nodes for entry in entries], [entry.joint_emitted for entry in entries]
    )
    return [entries[index] for index in kept]


class _Growing:
    """A tree under construction, and where each position of the trace leaves it.

    A position's true ranks lead from the root to the node that has no child of the next rank. A
    growth candidate under that node gains one token there if its rank is that next rank, so all
    candidates are scored by one count per node. Nodes are numbered as they were added.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tree = EMPTY
        self.numbers: dict[Path, int] = {(): 0}
        self.left_at: Ints = np.zeros(len(trace), dtype=np.int64)  # [N], the node's number
        self.accepted: Ints = np.zeros(len(trace), dtype=np.int64)  # [N], the node's depth
        self.wanted: Ints = trace.ranks[:, 0].astype(np.int64)  # [N], the next true rank or -1

    def visited(self) -> Bools:
        """[N], rows where the tree's steps start."""
        return walk(self.trace, self.accepted)

    def counts(self, visited: Bools) -> StepCounts:
        """What the tree emits on the given rows."""
        return step_counts(self.trace, self.accepted, visited)

    def gains(self, candidates: list[Path], visited: Bools) -> dict[Path, int]:
        """What each candidate gains on the visited rows."""
        candidate_rank = np.full(len(self.numbers), NO_CANDIDATE)
        for path in candidates:
            candidate_rank[self.numbers[path[:-1]]] = path[-1]
        gains_here = visited & (self.wanted == candidate_rank[self.left_at])
        gains = np.bincount(self.left_at[gains_here], minlength=len(self.numbers)).tolist()
        return {path: gains[self.numbers[path[:-1]]] for path in candidates}

    def add(self, path: Path) -> None:
        """Add a growth candidate and move the positions that follow it."""
        moved = (self.left_at == self.numbers[path[:-1]]) & (self.wanted == path[-1])
        self.tree = self.tree.with_node(path)
        self.numbers[path] = len(self.numbers)
        self.left_at[moved] = self.numbers[path]
        self.accepted[moved] = len(path)
        has_next = len(path) < self.trace.max_depth
        self.wanted[moved] = self.trace.ranks[moved, len(path)] if has_next else -1
