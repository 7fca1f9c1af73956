"""The loop: draft, verify, accept, commit. Everything that generates text runs it.

A step drafts a tree from the root (the token the target has already chosen), verifies it in one
target pass, keeps the longest path that the target itself would have written, and takes the
target's choice after it as the next root. Which tree is drafted is the affair of a policy, or of
the heads themselves (`dynamic`); plain decoding is the empty tree. The text never depends on the
tree, unless typical acceptance is asked for. This module knows no files, no tasks and no tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from entmtp_calib.acceptance import accept, accept_typical, truncate
from entmtp_calib.config import AcceptanceConfig, SamplingConfig
from entmtp_calib.drafting import PolicyProposer, Proposal, Proposer, Scheme, Start
from entmtp_calib.dynamic import Dynamic, DynamicProposer
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.plan import Plan, check_tree
from entmtp_calib.policy import Policy
from entmtp_calib.sampling import Choices, typicality
from entmtp_calib.steps import Generation, Step
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.verify import Verified
from entmtp_calib.timing import Clock
from entmtp_calib.topology import compile_tree
from entmtp_calib.transfer import send_index
from entmtp_calib.tree import Tree

WARM_UP_TOKENS = 8

Observer = Callable[[Tensor, Tensor], None]
"""Sees (vectors [m, h], logits [m, V]) of the prompt's last row, then of each step's kept rows."""

Chooser = Policy | Dynamic
"""What decides which tree each step drafts."""

Cut = Callable[[list[int]], list[int]]
"""Sees a step's accepted rows, the root's row 0 first, and returns the first ones: those to keep.

The step goes on as if the tree had been made of them, so the text stays the same.
"""


class Decoder:
    """Generates with a target, its heads and some trees; one at a time, batch size 1.

    Args:
        target: whose text it is.
        heads: what drafts; None where only the empty tree is used.
        trees: what a policy's indices mean.
        sampling: how the target chooses.
        acceptance: when a drafted token is kept; exact unless given, and only that is lossless.

    Raises:
        TreeError: a tree is deeper than the heads, or wider than what they can draft.
        UsageError: typical acceptance at temperature 0.
    """

    def __init__(
        self,
        target: Target,
        heads: Heads | None,
        trees: Sequence[Tree],
        sampling: SamplingConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
    ) -> None:
        self.target, self.heads = target, heads
        self.sampling = sampling or SamplingConfig()
        self.acceptance = acceptance or AcceptanceConfig()
        self.acceptance.check_sampling(self.sampling)
        self.trees = list(trees)
        for tree in self.trees:
            check_tree(tree, heads)
        self.plans = [Plan(compile_tree(tree), target.device) for tree in self.trees]
        self.clock = Clock(str(target.device))
        self._schemes: dict[Policy, Scheme] = {}

    def scheme(self, policy: Policy) -> Scheme:
        """What the policy's steps look up, built at its first use."""
        if policy not in self._schemes:
            self._schemes[policy] = Scheme(policy, self.plans, self.heads)
        return self._schemes[policy]

    def proposer(self, chooser: Chooser) -> Proposer:
        """What proposes the trees of one text; raises `TreeError` for heads with too few depths."""
        if isinstance(chooser, Dynamic):
            return DynamicProposer(chooser, self.heads, self.target.device)
        return PolicyProposer(self.scheme(chooser))

    @cached_property
    def max_rows(self) -> int:
        """Rows of the widest of its trees."""
        return max([plan.n_rows for plan in self.plans], default=1)

    def generate(
        self,
        prompt_ids: Sequence[int],
        chooser: Chooser,
        max_new_tokens: int,
        on_tokens: Callable[[list[int]], None] | None = None,
        observer: Observer | None = None,
        cut: Cut | None = None,
    ) -> Generation:
        """Continue a prompt until EOS, `max_new_tokens`, or the model's last position.

        Args:
            prompt_ids: at least one token; raises `DataError` where none, or where the model has
                no position left behind them.
            chooser: a policy over the decoder's trees, or `Dynamic`; raises `TreeError` where the
                heads cannot draft what it looks at.
            max_new_tokens: at least 1.
            on_tokens: called with each step's tokens as soon as they are certain.
            observer: see `Observer`.
            cut: see `Cut`.
        """
        state = self.start(prompt_ids, chooser, max_new_tokens, observer, cut)
        while state.reason is None:
            tokens = state.step()
            if on_tokens:
                on_tokens(tokens)
        is_cut = state.reason == "length" and state.room < max_new_tokens
        reason = "positions" if is_cut else state.reason
        return Generation(state.tokens, reason, state.steps, state.prefill_seconds)

    def warm_up(self, prompt_ids: Sequence[int], choosers: Iterable[Chooser]) -> None:
        """Run each chooser for some tokens, so that no timed text pays for a first time."""
        for chooser in choosers:
            self.generate(prompt_ids, chooser, WARM_UP_TOKENS)

    def start(
        self,
        prompt_ids: Sequence[int],
        chooser: Chooser,
        max_new_tokens: int,
        observer: Observer | None = None,
        cut: Cut | None = None,
    ) -> Decoding:
        """The state after the prompt's pass, ready for the first step; see `generate`."""
        room = min(max_new_tokens, self.target.room(prompt_ids))
        return Decoding(self, prompt_ids, chooser, room, observer, cut)


class Decoding:
    """The state of one generation: cache, root, and what proposes its trees."""

    def __init__(
        self,
        decoder: Decoder,
        prompt_ids: Sequence[int],
        chooser: Chooser,
        room: int,
        observer: Observer | None,
        cut: Cut | None,
    ) -> None:
        self.decoder, self.observer, self.cut, self.room = decoder, observer, cut, room
        self.target, self.heads, self.clock = decoder.target, decoder.heads, decoder.clock
        self.eos_ids = decoder.target.eos_ids
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self.reason: str | None = None
        self.proposer = decoder.proposer(chooser)
        # Plain decoding does not pay for heads, unless somebody wants to see what they see.
        self.follows = self.heads is not None and (self.proposer.drafts or observer is not None)
        self.head_state = HeadState()
        rows, end = self.proposer.row_counts, len(prompt_ids) + room
        self.cache: TreeCache = self.target.new_cache(end + max(decoder.max_rows, *rows))
        self.target.prepare(self.cache, sorted(rows), len(prompt_ids), end)
        if self.heads and self.heads.graphs and self.follows:
            self.heads.graphs.prepare_steps(self.head_state, len(prompt_ids), end)
        started = self.clock.now()
        self._prefill(prompt_ids)
        self.prefill_seconds = self.clock.now() - started

    def _prefill(self, prompt_ids: Sequence[int]) -> None:
        ids = torch.tensor(prompt_ids, dtype=torch.long)
        hidden = self.target.forward(ids, torch.arange(len(ids)), self.cache)
        self.cache.commit(range(len(ids)))
        self._observe(hidden, 0)
        logits = self.target.logits(hidden[-1:])
        if self.observer:
            self.observer(self._vectors(hidden)[-1:], logits)
        self.root_logits = logits[0]
        self.root = Choices(logits, [self.cache.length], self.decoder.sampling)[0]

    def step(self) -> list[int]:
        """One step; returns its tokens, which count."""
        started = perf_counter()
        left = self.room - len(self.tokens)
        tokens, self.reason = truncate([self.root], self.eos_ids, left)
        if self.reason:
            done = self._record(started, 0.0, emitted=1)
        else:
            tokens, done = self._speculate(started, left)
        self.tokens += tokens
        self.steps.append(done)
        return tokens

    def probe(self, policy: Policy) -> Step:
        """Take a step with another policy and take it back: for timing many on one state.

        It never ends the text, so that it costs what a step inside a text does, and it is timed to
        its very end. The state must have been started with a policy that drafts if this one does.
        """
        kept = {**vars(self), "root_logits": self.root_logits.clone()}
        length, past, vectors = self.cache.length, self.head_state.past, self.head_state.vectors
        self.tokens, self.steps, self.eos_ids = [], [], frozenset()
        self.proposer = self.decoder.proposer(policy)
        self.follows = self.follows and self.proposer.drafts
        started = self.clock.now()
        self.step()
        step_ms = 1000 * (self.clock.now() - started)
        [done] = self.steps
        done = replace(done, step_ms=step_ms, verify_ms=step_ms - done.draft_ms)
        vars(self).update(kept)
        self.cache.length = length
        self.head_state.past, self.head_state.vectors = past, vectors
        return done

    def _speculate(self, started: float, left: int) -> tuple[list[int], Step]:
        """A step with a pass; all that it waits for is the pass's report, and signals."""
        position = self.cache.length
        room = self.target.max_positions - 1 - position
        begin = self.clock.mark()
        proposal = self.proposer.propose(Start(self.root, self.root_logits, self._vector(), room))
        drafted = self.clock.mark()
        tree = proposal.rows
        passed = self.target.verify(proposal.ids, tree.depths, self.cache, tree.mask)
        after = [position + depth + 1 for depth in tree.depth_list]
        ids, choices = Choices.read(passed.report, passed.logits, after, self.decoder.sampling)
        draft_ms = self.clock.milliseconds(begin, drafted)
        rows = self._counting(
            [0, *self._accepted(proposal, ids, passed.logits, choices)], ids, left
        )
        if self.cut:
            rows = self._counting(self.cut(rows), ids, left)
        self.cache.commit(rows)
        self._take(passed, rows, position)
        if self.reason is None:
            self.root, self.root_logits = choices[rows[-1]], passed.logits[rows[-1]]
        self.proposer.observe(len(rows) - 1, tree.n_rows > 1)
        return [ids[row] for row in rows], self._record(started, draft_ms, len(rows), proposal)

    def _accepted(
        self, proposal: Proposal, ids: list[int], logits: Tensor, choices: Choices
    ) -> list[int]:
        """The rows that the rule of acceptance keeps, without the root."""
        parents, rule = proposal.rows.parents, self.decoder.acceptance
        if rule.is_exact:
            return accept(parents, ids, choices)
        probs, nats = typicality(logits, parents, ids, self.decoder.sampling)
        return accept_typical(parents, probs, nats, rule)

    def _counting(self, rows: list[int], ids: list[int], left: int) -> list[int]:
        """The accepted rows that count; notes whether the text ends with them."""
        tokens, self.reason = truncate([ids[row] for row in rows], self.eos_ids, left)
        return rows[: len(tokens)]

    def _take(self, passed: Verified, rows: list[int], position: int) -> None:
        """Committed rows become what the next step is conditioned on."""
        if self.observer is None and not (self.follows and self.reason is None):
            return
        at = send_index(rows, passed.hidden.device)
        hidden = passed.hidden.index_select(0, at)
        self._observe(hidden, position)
        if self.observer:
            self.observer(self._vectors(hidden), passed.logits.index_select(0, at))

    def _observe(self, hidden: Tensor, position: int) -> None:
        """Heads follow rows [m, h] that stand at `position` and the positions after it."""
        if self.heads and self.follows:
            positions = torch.arange(position, position + len(hidden), device=hidden.device)
            self.heads.observe(self.head_state, hidden, positions)

    def _vector(self) -> Tensor | None:
        """[h] what this step's drafting is conditioned on."""
        return self.head_state.vector if self.follows else None

    def _vectors(self, hidden: Tensor) -> Tensor:
        """[m, h] what drafting after each of the newest rows is conditioned on."""
        return self.head_state.vectors if self.follows else hidden

    def _record(
        self, started: float, draft_ms: float, emitted: int, proposal: Proposal | None = None
    ) -> Step:
        """The step's record; without a proposal its root alone ended the text."""
        # Not waiting for the device: what it still has to do falls into the next step's time.
        step_ms = 1000 * (perf_counter() - started)
        return Step(
            position=self.cache.length - (emitted if proposal else 0),
            tree=proposal.tree if proposal else -1,
            rows=proposal.rows.n_rows if proposal else 0,
            levels=proposal.levels if proposal else 0,
            accepted_draft_tokens=emitted - 1,
            emitted_tokens=emitted,
            signal=proposal.signal if proposal else None,
            draft_ms=draft_ms,
            verify_ms=step_ms - draft_ms,
            step_ms=step_ms,
        )
