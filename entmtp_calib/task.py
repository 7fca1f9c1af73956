"""A task: texts, trees and prices together, and what replay says of any policy for them.

Fitting, bounds and predictions all ask the same of it. This module knows no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from entmtp_calib.costs import Costs
from entmtp_calib.errors import DataError
from entmtp_calib.policy import Policy, Static
from entmtp_calib.replay import accepted
from entmtp_calib.trace import Floats, Ints, Trace
from entmtp_calib.tree import Tree
from entmtp_calib.walks import PolicyWalk, prompt_ms, walk_policy


@dataclass(frozen=True, eq=False)
class Task:
    """Texts, trees and prices: what a policy is fitted to or scored on.

    Attributes:
        trace: of the texts.
        trees: what a policy's indices count, smallest first.
        costs: of the machine.
        accepted: int64 [K, N], accepted draft tokens of each tree at each row.
    """

    trace: Trace
    trees: tuple[Tree, ...]
    costs: Costs
    accepted: Ints

    @classmethod
    def of(cls, trace: Trace, trees: Sequence[Tree], costs: Costs) -> Task:
        """The task of these trees; raises `DataError` where no text has a step."""
        if trace.terminal.all():
            raise DataError("no text of two or more tokens", action="generate longer texts")
        table = np.stack([accepted(tree, trace.ranks) for tree in trees])
        return cls(trace, tuple(trees), costs, table)

    @cached_property
    def step_ms(self) -> Floats:
        """[K], ms of a step with each tree and no signal."""
        return self.costs.step_ms(self.trees)

    @cached_property
    def best_static(self) -> int:
        """The fixed tree with the least replayed time; the first one on a tie."""
        return int(np.argmin([self.ms(Static(k)).sum() for k in range(len(self.trees))]))

    def walk(self, policy: Policy) -> PolicyWalk:
        """The policy's steps."""
        speculates = np.array([tree.n_nodes > 0 for tree in self.trees])
        return walk_policy(self.trace, self.accepted, policy, speculates)

    def ms(self, policy: Policy) -> Floats:
        """[P], replayed time of each text."""
        return self.steps_ms(policy, self.walk(policy))

    def steps_ms(self, policy: Policy, steps: PolicyWalk) -> Floats:
        """[P], the time of each text's steps, which are those that the policy takes."""
        return prompt_ms(self.trace, steps, self.costs.policy_ms(policy, self.trees))

    def tokens_per_second(self, policy: Policy) -> float:
        """Replayed rate; of the steps alone, since a prompt's own pass is in no trace."""
        return 1000.0 * len(self.trace) / float(self.ms(policy).sum())

    def part(self, prompts: Sequence[int]) -> Task:
        """The same task on some of the texts."""
        rows = self.trace.rows_of(prompts)
        return replace(self, trace=self.trace.select(prompts), accepted=self.accepted[:, rows])

    def among(self, indices: Sequence[int]) -> Task:
        """The same task with some of the trees, which are counted anew."""
        trees = tuple(self.trees[index] for index in indices)
        return replace(self, trees=trees, accepted=self.accepted[list(indices)])
