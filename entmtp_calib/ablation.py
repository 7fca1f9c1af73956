"""What each node of a tree does, and what the tree is without it, by exact replay.

A pass *reaches* a node if it accepts the node's parent, and *accepts* the node if the true next
tokens lead through it. What a node adds is the difference to the tree without it and all below it,
each replayed on the positions that it visits itself. A node is judged together with the nodes below
it that pay, so that it is not blamed for others; it never pays if tokens/s do not fall without
them. The rest of the tree stays as it is: in a faster tree a node would have to add more. This
module knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entmtp_calib.costs import Costs
from entmtp_calib.formats.fit import Figures
from entmtp_calib.replay import StepCounts, walk
from entmtp_calib.topology import compile_tree
from entmtp_calib.trace import Bools, Floats, Ints, Trace
from entmtp_calib.tree import Path, Tree


@dataclass(frozen=True)
class NodeFigures:
    """What one node does.

    Attributes:
        path: the node.
        reached: passes that accept its parent.
        accepted: passes that accept it.
        within: figures of the tree without the nodes below it that never pay.
        without: figures of the tree without it and all below it.
        never_pays: whether `within` has no more tokens/s than `without`, or a node above it never
            pays; False where the costs do not reach the tree.
    """

    path: Path
    reached: int
    accepted: int
    within: Figures
    without: Figures
    never_pays: bool

    @property
    def conditional(self) -> float | None:
        """Share of the passes that reach it which accept it; None where none does."""
        return self.accepted / self.reached if self.reached else None

    @property
    def adds_emitted(self) -> float:
        """What it adds to the emitted tokens per step."""
        return self.within.mean_emitted - self.without.mean_emitted

    @property
    def adds_ms(self) -> float | None:
        """What it adds to the time of a step; None where the costs do not reach the tree."""
        more, fewer = self.within.step_ms, self.without.step_ms
        return None if more is None or fewer is None else more - fewer

    @property
    def tokens_per_ms(self) -> float | None:
        """What it adds to the tokens of a pass over the time it adds; None where it adds none.

        It pays exactly where this is above what the tree emits per millisecond without it.
        """
        ms = self.adds_ms
        if not ms or ms < 0:
            return None
        more, fewer = (
            figures.counts.emitted_tokens / figures.counts.passes
            for figures in (self.within, self.without)
        )
        return (more - fewer) / ms


@dataclass(frozen=True)
class Ablation:
    """A tree, and what it is without each of its nodes.

    Attributes:
        tree: the tree.
        whole: its figures; their time is infinite where the costs do not reach it.
        nodes: its nodes, in its order.
        parts: figures of its 0, 1, ..., all most accepted nodes alone.
        best_part: the fastest of these trees; may be all nodes, or none.
    """

    tree: Tree
    whole: Figures
    nodes: tuple[NodeFigures, ...]
    parts: tuple[Figures, ...]
    best_part: Tree

    @property
    def best(self) -> Figures:
        """Figures of the best part."""
        return self.parts[self.best_part.n_nodes]

    @property
    def is_priced(self) -> bool:
        """Whether the costs reach a step with the tree."""
        return self.whole.step_ms is not None

    @property
    def wasted_rows(self) -> float:
        """Drafted rows of a target pass that it does not accept."""
        counts = self.whole.counts
        return self.tree.n_nodes - counts.accepted_draft_tokens / counts.passes

    @property
    def never_pay(self) -> list[NodeFigures]:
        """The nodes that never pay."""
        return [node for node in self.nodes if node.never_pays]

    def seldom(self, share: float) -> list[NodeFigures]:
        """The nodes that fewer than this share of the passes accept."""
        return [node for node in self.nodes if node.accepted < share * self.whole.counts.passes]


def ablate(trace: Trace, tree: Tree, costs: Costs) -> Ablation:
    """Replay a tree, the tree without each of its nodes, and its most accepted nodes alone.

    Args:
        trace: of texts, one of which has two or more tokens.
        tree: no deeper than the trace.
    """
    on_path = accepted_nodes(tree, trace.ranks)
    at_passes = on_path[:, walk(trace, on_path.sum(axis=0)) & ~trace.terminal]
    accepted = [at_passes.shape[1], *at_passes.sum(axis=1).tolist()]  # of the root, of the nodes
    judged = _judged(trace, tree, costs, on_path)
    # A node is accepted no more often than its parent, so that every part is a tree.
    order = sorted(range(tree.n_nodes), key=lambda node: -accepted[node + 1])
    parts, replayed = _parts(trace, [tree.paths[node] for node in order], costs, on_path[order])
    fastest = int(np.argmax([figures.tokens_per_second for figures in replayed]))
    return Ablation(
        tree=tree,
        whole=replayed[-1],
        nodes=tuple(
            NodeFigures(path, accepted[tree.parents[row]], accepted[row], *judged[row - 1])
            for row, path in enumerate(tree.paths, start=1)
        ),
        parts=tuple(replayed),
        best_part=parts[fastest],
    )


def accepted_nodes(tree: Tree, ranks: NDArray[np.integer]) -> Bools:
    """bool [n, N], whether the true next tokens of a position lead through each node.

    Args:
        tree: no deeper than the ranks.
        ranks: [N, D], as in a trace.
    """
    table = np.ones((tree.n_nodes + 1, len(ranks)), dtype=np.bool_)
    for row, (path, parent) in enumerate(zip(tree.paths, tree.parents[1:], strict=True), start=1):
        table[row] = table[parent] & (ranks[:, len(path) - 1] == path[-1])
    return table[1:]


def count_passes(trace: Trace, accepted: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """The target passes and the steps of several trees on each text, all texts side by side.

    Args:
        accepted: [K, N], accepted draft tokens of each tree at each row.

    Returns:
        Passes and steps, [K, P] each.
    """
    n_trees, n_rows = accepted.shape
    emitted = (accepted + 1).ravel()
    first_row = n_rows * np.arange(n_trees)[:, None]
    place, last = (first_row + trace.starts).ravel(), (first_row + trace.ends - 1).ravel()
    passes = np.zeros(len(place), dtype=np.int64)
    going = np.flatnonzero(place < last)
    while len(going):
        passes[going] += 1
        place[going] += emitted[place[going]]
        going = going[place[going] < last[going]]
    shape = n_trees, trace.n_prompts
    return passes.reshape(shape), (passes + (place == last)).reshape(shape)


def _judged(
    trace: Trace, tree: Tree, costs: Costs, on_path: Bools
) -> list[tuple[Figures, Figures, bool]]:
    """Figures of the tree within and without each node, and whether it never pays; deepest first.

    Args:
        on_path: bool [n, N], see `accepted_nodes`.
    """
    depths = np.array(tree.depths[1:], dtype=np.int64)
    is_below = compile_tree(tree).ancestor_mask[1:, 1:].T  # [node, itself and those below it]
    is_priced = np.isfinite(costs.step_ms([tree])[0])
    pays = np.ones(tree.n_nodes, dtype=np.bool_)
    lengths = on_path.sum(axis=0)
    judged: dict[int, tuple[Figures, Figures]] = {}
    for depth in range(tree.depth, 0, -1):
        nodes = np.flatnonzero(depths == depth)
        beneath = on_path[pays & (depths > depth)].sum(axis=0)
        within = np.where(on_path[nodes], depth + beneath, lengths)
        without = np.where(on_path[nodes], depth - 1, lengths)
        dropped = [*(is_below[nodes] & ~pays), *is_below[nodes]]
        smaller = [_without(tree, some) for some in dropped]
        figures = _replayed(trace, np.vstack([within, without]), costs.step_ms(smaller))
        for node, *pair in zip(nodes.tolist(), figures, figures[len(nodes) :], strict=False):
            judged[node] = pair[0], pair[1]
            if is_priced and pair[0].tokens_per_second <= pair[1].tokens_per_second:
                pays[is_below[node]] = False
    return [(*judged[node], not pays[node]) for node in range(tree.n_nodes)]


def _without(tree: Tree, dropped: Bools) -> Tree:
    return Tree(tuple(path for path, gone in zip(tree.paths, dropped, strict=True) if not gone))


def _parts(
    trace: Trace, paths: Sequence[Path], costs: Costs, on_path: Bools
) -> tuple[list[Tree], list[Figures]]:
    """The trees of the first 0, 1, ..., n nodes, and their figures."""
    parts = [Tree(tuple(paths[:size])) for size in range(len(paths) + 1)]
    none = np.zeros((1, len(trace)), dtype=np.int64)
    accepted = np.vstack([none, np.cumsum(on_path, axis=0)])
    return parts, _replayed(trace, accepted, costs.step_ms(parts))


def _replayed(trace: Trace, accepted: Ints, step_ms: Floats) -> list[Figures]:
    """Figures of K trees by their accepted draft tokens [K, N] and their cost of a step [K]."""
    n_tokens = len(trace)
    totals = (counts.sum(axis=1).tolist() for counts in count_passes(trace, accepted))
    return [
        Figures(StepCounts(steps, n_tokens, n_tokens - steps, passes), passes * ms)
        for passes, steps, ms in zip(*totals, step_ms.tolist(), strict=True)
    ]
