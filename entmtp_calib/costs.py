"""What a step costs, put together from what was measured: a target pass by its rows, drafting by
depth and parents.

Costs are kept apart from acceptance: a trace taken once can be combined with the costs of another
machine. A policy pays for every level that it drafts in order to decide, and those levels are
drafted for all of its trees at once (see `drafting`). This module knows no clocks and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entmtp_calib.errors import DataError
from entmtp_calib.policy import Policy, chain_depth
from entmtp_calib.topology import compile_tree
from entmtp_calib.trace import Floats
from entmtp_calib.tree import EMPTY, Tree, chain, union

STEP, LEVEL = "step", "level"  # kinds of timed rows
Curve = tuple[tuple[int, float], ...]
"""(rows, ms) with rising rows; between two measured counts costs are interpolated."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds on one machine at one context length.

    Attributes:
        verify_ms: of all in a step but drafting, by the rows of the target pass; the heads take in
            what was committed.
        level_ms: per depth, of drafting one level, by its parents.
        plain_ms: of a step of plain decoding, which has no heads to care for; None where it costs
            what a pass of one row does.
    """

    verify_ms: Curve
    level_ms: tuple[Curve, ...]
    plain_ms: float | None = None

    @classmethod
    def of(cls, timing: Iterable[Mapping[str, Any]], context: float) -> Costs:
        """From rows of the timing table.

        Args:
            timing: rows of kind "step" and "level"; others are passed over.
            context: tokens that a step finds in the cache; costs between the measured lengths are
                interpolated.

        Raises:
            DataError: no timed step, no step without drafts, or a depth without timed levels.
        """
        verify: dict[int, dict[int, list[float]]] = {}
        plain: dict[int, list[float]] = {}
        levels: dict[int, dict[int, list[float]]] = {}
        for row in timing:
            if row["kind"] == STEP:
                by_length = (
                    plain if row.get("tree") == EMPTY.id else verify.setdefault(row["rows"], {})
                )
                at = by_length.setdefault(row["context_length"], [])
                at.append(row["step_ms"] - row["draft_ms"])
            elif row["kind"] == LEVEL:
                levels.setdefault(row["depth"], {}).setdefault(row["rows"], []).append(
                    row["draft_ms"]
                )
        if plain and 1 not in verify:
            verify[1] = plain
        if 1 not in verify or sorted(levels) != list(range(1, len(levels) + 1)):
            raise DataError(
                f"timed steps of {sorted(verify)} rows and levels of depth {sorted(levels)}",
                "a step without drafts, and every depth from 1",
                "time again with `entmtp time`",
            )
        return cls(
            tuple((rows, _at(context, verify[rows])) for rows in sorted(verify)),
            tuple(
                tuple((rows, float(np.median(ms))) for rows, ms in sorted(levels[depth].items()))
                for depth in sorted(levels)
            ),
            _at(context, plain) if plain else None,
        )

    def verify(self, rows: int) -> float:
        """ms of a target pass and what follows it; infinite beyond the most rows measured."""
        return _between(self.verify_ms, rows)

    def level(self, depth: int, parents: int) -> float:
        """ms of drafting the children of so many nodes; infinite where no head was measured."""
        return (
            _between(self.level_ms[depth - 1], parents) if depth <= len(self.level_ms) else np.inf
        )

    def step_ms(self, trees: Sequence[Tree]) -> Floats:
        """[K], a step with each tree and no signal."""
        return np.array([self._alone(tree) for tree in trees])

    def policy_ms(self, policy: Policy, trees: Sequence[Tree]) -> Floats:
        """[L + 1, K], a step in which l levels were drafted to decide and tree k was chosen.

        Infinite for trees that the policy does not choose.
        """
        chosen = [trees[index] for index in policy.indices]
        seen = chain_depth(policy)
        ms = np.full((seen + 1, len(trees)), np.inf)
        is_plain = seen == 0 and all(tree == EMPTY for tree in chosen)
        at = list(policy.indices)
        ms[:, at] = self._alone(EMPTY) if is_plain else self.ahead_ms(chosen, seen)
        return ms

    def ahead_ms(self, trees: Sequence[Tree], seen: int) -> Floats:
        """[seen + 1, K], a step with each tree after drafting l levels of all of them at once.

        The same question gives the same array: do not write.
        """
        key = (tuple(trees), seen)
        if key not in self._asked:
            self._asked[key] = self._ahead_ms(trees, union([*trees, chain(seen)]), seen)
        return self._asked[key]

    @cached_property
    def _asked(self) -> dict[tuple[tuple[Tree, ...], int], Floats]:
        """What `ahead_ms` has said: a search asks for few sets of trees very often."""
        return {}

    def _ahead_ms(self, trees: Sequence[Tree], together: Tree, seen: int) -> Floats:
        return np.array(
            [
                [
                    self.verify(tree.n_nodes + 1)
                    + self._levels(together, 0, levels)
                    + self._levels(tree, levels, tree.depth)
                    for tree in trees
                ]
                for levels in range(seen + 1)
            ]
        )

    def _alone(self, tree: Tree) -> float:
        """ms of a step with one fixed tree."""
        if not tree.n_nodes and self.plain_ms is not None:
            return self.plain_ms
        return self.verify(tree.n_nodes + 1) + self._levels(tree, 0, tree.depth)

    def _levels(self, tree: Tree, after: int, to: int) -> float:
        """ms of drafting a tree's levels after + 1 .. to."""
        levels = compile_tree(tree).levels[after:to]
        return sum(self.level(level.depth, len(level.parent_rows)) for level in levels)


def _at(context: float, by_length: Mapping[int, Sequence[float]]) -> float:
    lengths = sorted(by_length)
    return float(np.interp(context, lengths, [np.median(by_length[n]) for n in lengths]))


def _between(curve: Curve, rows: int) -> float:
    measured: NDArray[np.float64] = np.array(curve, dtype=np.float64).T
    return float(np.interp(rows, measured[0], measured[1], right=np.inf))
