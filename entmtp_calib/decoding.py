"""The loop: draft, verify, accept, commit. Everything that generates text runs it.

A step drafts a tree from the root (the token the target has already chosen), verifies it in one
target pass, keeps the longest path that the target itself would have written, and takes the
target's choice after it as the next root. Which tree is drafted is the policy's affair; plain
decoding is the empty tree. The text never depends on the tree. This module knows no files, no
tasks and no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from entmtp_calib.acceptance import accept, truncate
from entmtp_calib.config import SamplingConfig
from entmtp_calib.errors import DataError
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.plan import LevelPlan, Plan, check_tree
from entmtp_calib.policy import Policy
from entmtp_calib.sampling import choose
from entmtp_calib.signals import AVERAGE_START, base_top1, entropy, next_average, signal_value
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.model import Target
from entmtp_calib.timing import Clock
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, Tree

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """What one step did; a terminal step (its root ends the text) has no rows and no pass."""

    position: int
    """Absolute position of the root."""
    tree: int
    """Index into the decoder's trees."""
    rows: int
    accepted_draft_tokens: int
    emitted_tokens: int
    signal: float | None
    draft_ms: float
    verify_ms: float
    step_ms: float


@dataclass(frozen=True)
class Generation:
    """The text a prompt led to, and how it came about."""

    tokens: list[int]
    """Generated ids, up to and with the first EOS."""
    reason: str
    """stop (EOS), length (the token limit) or positions (the model's last position)."""
    steps: list[Step]
    prefill_seconds: float

    @property
    def decode_seconds(self) -> float:
        """Time of all steps; the prompt's own pass is `prefill_seconds`."""
        return sum(step.step_ms for step in self.steps) / 1000

    @property
    def mean_emitted_tokens(self) -> float:
        """Emitted tokens per step; plain decoding has 1.00."""
        return len(self.tokens) / len(self.steps)


class Choices:
    """What the target chooses after each row of a pass; draws are made only where looked at.

    Greedy choices of all rows are one operation. A draw sorts a whole vocabulary, and of a tree's
    rows only those on the accepted path are ever asked for.
    """

    def __init__(self, logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> None:
        self._logits, self._positions, self._sampling = logits, positions, sampling
        self._known: dict[int, int] = {}
        if sampling.temperature == 0:
            self._known = dict(enumerate(choose(logits, positions, sampling).tolist()))

    def __getitem__(self, row: int) -> int:
        if row not in self._known:
            at = slice(row, row + 1)
            chosen = choose(self._logits[at], [self._positions[row]], self._sampling)
            self._known[row] = int(chosen)
        return self._known[row]


Observer = Callable[[Tensor, Tensor], None]
"""Sees (vectors [m, h], logits [m, V]) of the prompt's last row, then of each step's kept rows."""


@dataclass
class Chain:
    """The greedy chain drafted for the signal: per depth the choices of its parent's row."""

    ids: list[Tensor]
    """per depth [1, k] target ids, best first"""
    probs: list[float]


class Decoder:
    """Generates with a target, its heads and some trees; one at a time, batch size 1.

    Args:
        target: whose text it is.
        heads: what drafts; None where only the empty tree is used.
        trees: what a policy's indices mean.
        sampling: how the target chooses.

    Raises:
        TreeError: a tree is deeper than the heads, or wider than what they can draft.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads | None,
        trees: Sequence[Tree],
        sampling: SamplingConfig | None = None,
    ) -> None:
        self.target, self.heads = target, heads
        self.sampling = sampling or SamplingConfig()
        self.trees = list(trees)
        for tree in self.trees:
            check_tree(tree, heads)
        self.plans = [Plan(compile_tree(tree), target.device) for tree in self.trees]
        self.plain = Plan(compile_tree(EMPTY), target.device)
        self.clock = Clock(str(target.device))

    @cached_property
    def max_rows(self) -> int:
        """Rows of the widest verify pass."""
        return max([plan.n_rows for plan in self.plans], default=1)

    def generate(
        self,
        prompt_ids: Sequence[int],
        policy: Policy,
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], None] | None = None,
        observer: Observer | None = None,
    ) -> Generation:
        """Continue a prompt until EOS, `max_new_tokens`, or the model's last position.

        Args:
            prompt_ids: at least one token; raises `DataError` where none, or where the model has
                no position left behind them.
            policy: chooses a tree each step.
            max_new_tokens: at least 1.
            on_tokens: called with each step's tokens as soon as they are certain.
            observer: see `Observer`.
        """
        state = self.start(prompt_ids, policy, max_new_tokens, observer)
        while state.reason is None:
            tokens = state.step()
            if on_tokens:
                on_tokens(tokens)
        is_cut = state.reason == "length" and state.room < max_new_tokens
        reason = "positions" if is_cut else state.reason
        return Generation(state.tokens, reason, state.steps, state.prefill_seconds)

    def warm_up(self, prompt_ids: Sequence[int], policies: Iterable[Policy]) -> None:
        """Run each policy for some tokens, so that no timed text pays for a first time."""
        for policy in policies:
            self.generate(prompt_ids, policy, WARM_UP_TOKENS)

    def start(
        self,
        prompt_ids: Sequence[int],
        policy: Policy,
        max_new_tokens: int,
        observer: Observer | None = None,
    ) -> Decoding:
        """The state after the prompt's pass, ready for the first step; see `generate`."""
        limit = self.target.max_positions - len(prompt_ids)
        if not prompt_ids or limit < 1:
            raise DataError(
                f"a prompt of {len(prompt_ids)} tokens",
                f"1 to {self.target.max_positions - 1} tokens for {self.target.name}",
                "shorten the prompt",
            )
        return Decoding(self, prompt_ids, policy, min(max_new_tokens, limit), observer)


class Decoding:
    """The state of one generation: cache, root, and what the policy remembers."""

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        policy: Policy,
        room: int,
        observer: Observer | None,
    ) -> None:
        self.decoder, self.policy, self.observer, self.room = decoder, policy, observer, room
        self.target, self.heads, self.clock = decoder.target, decoder.heads, decoder.clock
        self.eos_ids = decoder.target.eos_ids
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self.reason: str | None = None
        self.policy_state = policy.start()
        self.average = AVERAGE_START
        self.head_state = HeadState()
        self.cache: TreeCache = self.target.new_cache(len(prompt_ids) + room + decoder.max_rows)
        started = self.clock.now()
        self._prefill(prompt_ids)
        self.prefill_seconds = self.clock.now() - started

    def _prefill(self, prompt_ids: Sequence[int]) -> None:
        ids = torch.tensor(prompt_ids, dtype=torch.long)
        positions = torch.arange(len(ids))
        hidden = self.target.forward(ids, positions, self.cache)
        self.cache.commit(range(len(ids)))
        self._observe(hidden, positions)
        logits = self.target.logits(hidden[-1:])
        if self.observer:
            self.observer(self._vectors(hidden)[-1:], logits)
        self.root_logits = logits[0]
        self.root = Choices(logits, [self.cache.length], self.decoder.sampling)[0]

    def step(self) -> list[int]:
        """One step; returns its tokens, which count."""
        started = self.clock.now()
        left = self.room - len(self.tokens)
        tokens, self.reason = truncate([self.root], self.eos_ids, left)
        if self.reason:
            done = self._record(started, started, tree=-1, rows=0, emitted=1, signal=None)
        else:
            tokens, done = self._speculate(started, left)
        self.tokens += tokens
        self.steps.append(done)
        return tokens

    def probe(self, policy: Policy) -> Step:
        """Take a step with another policy and take it back: for timing many on one state.

        It never ends the text, so that it costs what a step inside a text does.
        """
        kept = dict(vars(self))
        length, past, vectors = self.cache.length, self.head_state.past, self.head_state.vectors
        self.tokens, self.steps, self.policy = [], [], policy
        self.eos_ids = frozenset()
        self.policy_state = policy.start()
        self.step()
        done = self.steps[0]
        vars(self).update(kept)
        self.cache.length = length
        self.head_state.past, self.head_state.vectors = past, vectors
        return done

    def _speculate(self, started: float, left: int) -> tuple[list[int], Step]:
        position = self.cache.length
        chain = self._draft_chain()
        signal = self._signal(chain)
        index, self.policy_state = self.policy.choose(
            self.policy_state, np.nan if signal is None else signal
        )
        plan = self._fitting(self.decoder.plans[index], position)
        draft = self._draft(plan, chain)
        drafted = self.clock.now()
        positions = plan.depths + position
        hidden = self.target.forward(draft, positions, self.cache, plan.mask)
        logits = self.target.logits(hidden)
        after = [position + depth + 1 for depth in plan.depth_list]
        choices = Choices(logits, after, self.decoder.sampling)
        ids = draft.tolist()
        rows = [0, *accept(plan.parents, ids, choices)]
        tokens, self.reason = truncate([ids[row] for row in rows], self.eos_ids, left)
        rows = rows[: len(tokens)]
        self.cache.commit(rows)
        self._take(hidden[rows], positions[rows], logits[rows])
        if self.reason is None:
            self.root, self.root_logits = choices[rows[-1]], logits[rows[-1]]
        accepted = len(tokens) - 1
        self.average = next_average(self.average, accepted, plan.n_rows > 1)
        return tokens, self._record(started, drafted, index, plan.n_rows, len(tokens), signal)

    def _take(self, hidden: Tensor, positions: Tensor, logits: Tensor) -> None:
        """Committed rows become what the next step is conditioned on."""
        if self.reason is None or self.observer:
            self._observe(hidden, positions)
        if self.observer:
            self.observer(self._vectors(hidden), logits)

    def _observe(self, hidden: Tensor, positions: Tensor) -> None:
        if self.heads:
            self.heads.observe(self.head_state, hidden, positions.to(hidden.device))

    def _vectors(self, hidden: Tensor) -> Tensor:
        """[m, h] what drafting after each of the newest rows is conditioned on."""
        return self.head_state.vectors if self.heads else hidden

    def _fitting(self, plan: Plan, position: int) -> Plan:
        """The plan, or plain decoding where its deepest row has no position."""
        deepest = position + plan.tree.depth
        return plan if deepest < self.target.max_positions else self.decoder.plain

    def _draft_chain(self) -> Chain:
        """As much of the greedy chain as the policy's signal needs."""
        chain = Chain([], [])
        spec = self.policy.signal
        if spec is None or self.heads is None:
            return chain
        path = torch.tensor([[self.root]], device=self.target.device)
        for depth in range(1, spec.chain_depth + 1):
            ids, probs = self.heads.draft_level(depth, self.head_state.vector, path)
            chain.ids.append(ids)
            chain.probs.append(float(probs[0, 0]))
            path = torch.cat([path, ids[:, :1]], dim=1)
        return chain

    def _signal(self, chain: Chain) -> float | None:
        spec = self.policy.signal
        if spec is None:
            return None
        if spec.is_average:
            return self.average
        logits = self.root_logits.cpu().numpy()
        nats = entropy(logits) if spec.kind == "entropy" else 0.0
        base = base_top1(logits) if spec.kind in ("path_value", "base_top1") else 0.0
        return signal_value(spec, base, nats, chain.probs)

    def _draft(self, plan: Plan, chain: Chain) -> Tensor:
        """Token ids [n + 1] of the plan's rows, level by level; the chain's rows are reused."""
        draft = torch.empty(plan.n_rows, dtype=torch.long, device=self.target.device)
        draft[0] = self.root
        for level in plan.levels:
            paths = draft[level.path_rows]
            known = chain.ids[level.depth - 1] if level.depth <= len(chain.ids) else None
            ids = self._level_ids(level, paths, known)
            draft[level.node_rows] = ids[level.node_parent, level.node_rank]
        return draft

    def _level_ids(self, level: LevelPlan, paths: Tensor, known: Tensor | None) -> Tensor:
        """Choices [R, k] of all parents of a level; `known` [1, k] are the greedy chain's."""
        heads, vector = self.heads, self.head_state.vector
        assert heads is not None  # check_tree lets no tree pass without heads
        if known is None or level.first_chain < 0:
            return heads.draft_level(level.depth, vector, paths)[0]
        if len(paths) == 1:
            return known
        ids = known.expand(len(paths), -1).clone()
        others = level.other_parents
        ids[others] = heads.draft_level(level.depth, vector, paths[others])[0]
        return ids

    def _record(
        self,
        started: float,
        drafted: float,
        tree: int,
        rows: int,
        emitted: int,
        signal: float | None,
    ) -> Step:
        ended = self.clock.now()
        return Step(
            position=self.cache.length - (emitted if rows else 0),
            tree=tree,
            rows=rows,
            accepted_draft_tokens=emitted - 1,
            emitted_tokens=emitted,
            signal=signal,
            draft_ms=1000 * (drafted - started),
            verify_ms=1000 * (ended - drafted),
            step_ms=1000 * (ended - started),
        )
