"""Drafting: a step's tokens, level by level, as far as the policy has asked and its tree needs.

A policy may look at the greedy chain before it chooses. Levels drafted for that are drafted for
*all* trees that it may choose, in one head call each, so the chosen tree finds its nodes among them
and no level is computed twice. This module knows no target, no cache and no acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from entmtp_calib.heads.model import Heads
from entmtp_calib.plan import LevelPlan, Plan, Rows, check_tree
from entmtp_calib.policy import Policy, chain_depth
from entmtp_calib.sampling import entropy, top1
from entmtp_calib.signals import Memory, SignalSpec, signal_value
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, Tree, chain, union


@dataclass(frozen=True, eq=False)
class Start:
    """What a step starts from.

    Attributes:
        root: the token that the target has chosen.
        root_logits: [V], from which it was chosen.
        vector: [h] what drafting is conditioned on; None without heads.
        room: depths behind the root that have a position in the model.
    """

    root: int
    root_logits: Tensor
    vector: Tensor | None
    room: int


@dataclass(frozen=True, eq=False)
class Proposal:
    """What a step asks the target to verify.

    Attributes:
        ids: int64 [n + 1], the root and the drafted tokens.
        rows: how they hang together.
        tree: index of the tree that was chosen; -1 for one that was built for this step.
        levels: levels drafted before the tree was known.
        signal: what the policy read last.
    """

    ids: Tensor
    rows: Rows
    tree: int = -1
    levels: int = 0
    signal: float | None = None


class Proposer(Protocol):
    """Proposes the tree of every step of one text."""

    @property
    def row_counts(self) -> set[int]:
        """Rows of the passes it may ask for; those of its widest tree among them."""

    @property
    def drafts(self) -> bool:
        """Whether it ever uses heads; where not, they need not follow the text."""

    def propose(self, start: Start) -> Proposal:
        """The tree of the step that begins here."""

    def observe(self, accepted_draft_tokens: int, speculated: bool) -> None:
        """What became of it."""


class Scheme:
    """What a policy's steps look up: its trees' plans, and the plan of all of them together.

    Args:
        policy: whose trees.
        plans: all plans that a policy's indices count.
        heads: what drafts; raises `TreeError` where they cannot draft what the policy looks at.
    """

    def __init__(self, policy: Policy, plans: Sequence[Plan], heads: Heads | None) -> None:
        self.policy, self.plans, self.heads = policy, plans, heads
        device = plans[0].depths.device
        trees = [plans[index].tree for index in policy.indices]
        together = union([*trees, chain(chain_depth(policy))])
        check_tree(together, heads)
        self.together = Plan(compile_tree(together), device)
        self.plain = Plan(compile_tree(EMPTY), device)
        rows = {path: row for row, path in enumerate(((), *together.paths))}
        self.rows: Mapping[Tree, Tensor] = {
            tree: torch.tensor([rows[path] for path in ((), *tree.paths)], device=device)
            for tree in {EMPTY, *trees}
        }
        if heads and heads.graphs:
            used = [self.together, *(plans[index] for index in policy.indices)]
            heads.graphs.prepare_levels(
                (level.depth, len(level.path_rows)) for plan in used for level in plan.levels
            )


class PolicyProposer:
    """Proposes one of the trees that were compiled before, by a policy: a `Proposer`."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._state, self._memory = scheme.policy.start(), Memory()

    @property
    def row_counts(self) -> set[int]:
        """Those of the policy's trees, and plain decoding's where there is no position left."""
        return {1, *(self._scheme.plans[index].n_rows for index in self._scheme.policy.indices)}

    @property
    def drafts(self) -> bool:
        """Whether any of the policy's trees, or what it looks at, has nodes."""
        return self._scheme.together.n_rows > 1

    def propose(self, start: Start) -> Proposal:
        """The policy's tree, or plain decoding where its deepest row has no position."""
        scheme = self._scheme
        draft = Draft(scheme, start)
        reader = _Reader(self._memory, start, draft)
        index, self._state = scheme.policy.choose(self._state, reader)
        plan = scheme.plans[index]
        plan = plan if plan.tree.depth <= start.room else scheme.plain
        return Proposal(draft.tokens(plan), plan, index, draft.levels, reader.last)

    def observe(self, accepted_draft_tokens: int, speculated: bool) -> None:
        """Remember what the text has shown."""
        self._memory.observe(accepted_draft_tokens, speculated)


class Draft:
    """The tokens drafted in one step.

    Args:
        scheme: the policy's.
        start: of the step.
    """

    def __init__(self, scheme: Scheme, start: Start) -> None:
        self._scheme, self._start = scheme, start
        self._ids: Tensor | None = None  # of all the policy's trees, once it looks at the heads
        self._read: list[float] = []
        self._unread: list[Tensor] = []

    @property
    def levels(self) -> int:
        """Levels drafted so far, for all the policy's trees."""
        return len(self._read) + len(self._unread)

    @property
    def chain_probs(self) -> list[float]:
        """The greedy chain's probabilities as far as it is drafted."""
        self.read()
        return self._read

    def draft_to(self, depth: int) -> None:
        """Draft all the policy's trees to a depth, the greedy chain among them."""
        together = self._scheme.together
        if self._ids is None:
            self._ids = self._root(together)
        for level in together.levels[self.levels : depth]:
            probs = self._level(level, self._ids, n_probs=1)
            self._unread.append(probs[0, 0])  # the chain's parent is the first row

    def read(self, *more: Tensor) -> list[float]:
        """Numbers without dimensions, and the chain's probabilities, by one wait for the device."""
        if not more and not self._unread:
            return []
        values = torch.stack([*more, *self._unread]).tolist()
        self._read += values[len(more) :]
        self._unread.clear()
        return values[: len(more)]

    def tokens(self, plan: Plan) -> Tensor:
        """Token ids [n + 1] of a tree's rows; what is not there yet is drafted for it alone."""
        if self._ids is None:
            ids = self._root(plan)
        else:
            done = plan.rows_to(self.levels)
            rows = self._scheme.rows[plan.tree]
            if done == plan.n_rows:
                return self._ids.take(rows)
            ids = self._ids.new_empty(plan.n_rows)
            ids[:done] = self._ids.take(rows[:done])
        for level in plan.levels[self.levels :]:
            self._level(level, ids, n_probs=0)
        return ids

    def _root(self, plan: Plan) -> Tensor:
        """Room for the ids [n + 1] of a plan, the root in its place."""
        ids = torch.empty(plan.n_rows, dtype=torch.long, device=plan.depths.device)
        ids[0] = self._start.root
        return ids

    def _level(self, level: LevelPlan, ids: Tensor, n_probs: int) -> Tensor:
        """Fill in a level's ids; probabilities [n_probs, k] of its first parents' choices."""
        heads, vector = self._scheme.heads, self._start.vector
        assert heads is not None  # check_tree lets no tree pass without heads
        assert vector is not None
        paths = ids.take(level.path_rows)
        chosen, probs = heads.draft_level(level.depth, vector, paths, n_probs)
        ids[level.first : level.end] = level.pick(chosen)
        return probs


class _Reader:
    """Gives a policy its signals, drafting what they are made of at the time they are asked for."""

    def __init__(self, memory: Memory, start: Start, draft: Draft) -> None:
        self._memory, self._logits, self._draft = memory, start.root_logits, draft
        self.last: float | None = None

    def __call__(self, spec: SignalSpec) -> float:
        self.last = self._value(spec)
        return self.last

    def _value(self, spec: SignalSpec) -> float:
        if spec.is_average:
            return self._memory.average
        if spec.depth:
            self._draft.draft_to(spec.depth)
        base = nats = 0.0
        if spec.kind in ("path_value", "base_top1"):
            [base] = self._draft.read(top1(self._logits))
        elif spec.kind == "entropy":
            nats = entropy(self._logits)
        fresh = signal_value(spec, base, nats, self._draft.chain_probs)
        return self._memory.value(spec, fresh)
