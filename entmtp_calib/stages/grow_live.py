"""Growth by live decoding: the paper's procedure to the letter, beside the replay that we use.

At every size the joint tree (the current tree and all its growth candidates) is drafted and
verified on the search prompts, while only what the current tree accepts is committed. That is a
rollout of all prompts per added node, where replay counts on one recorded rollout. Both must grow
the same trees; this shows it, and what each costs. Nothing of the run is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from entmtp_calib.decoding import Decoder, Generation
from entmtp_calib.errors import UsageError
from entmtp_calib.growth import Grown, best_candidate, grow
from entmtp_calib.policy import Static
from entmtp_calib.progress import Progress
from entmtp_calib.replay import StepCounts
from entmtp_calib.stages.rollout import read_trace, rollout
from entmtp_calib.stages.setup import Run, reopen_run
from entmtp_calib.tree import Path as RankPath
from entmtp_calib.tree import Tree, chain

STAGE = "grow-live"
DEPTH_STRIDE = 100_000  # a part's number is its depth limit times this, plus the tree's nodes


@dataclass(frozen=True)
class Pair:
    """What both ways came to at one size under one depth limit."""

    live: Grown
    replay: Grown

    @property
    def is_same(self) -> bool:
        """Whether both grew the same tree."""
        return self.live.tree == self.replay.tree


@dataclass(frozen=True)
class Comparison:
    """Both ways, for every depth limit and size.

    Attributes:
        folder: of the run.
        data: where the prompts came from.
        pairs: by depth limit, then by size.
        prompts: search prompts.
        rollouts: of all of them that live growth took.
        live_seconds: that these took, those of earlier tries included.
        replay_seconds: of growing on the trace; recording it is a rollout too.
    """

    folder: Path
    data: str
    pairs: Sequence[Pair]
    prompts: int
    rollouts: int
    live_seconds: float
    replay_seconds: float

    @property
    def differing(self) -> int:
        """Sizes at which the trees are not the same."""
        return sum(not pair.is_same for pair in self.pairs)


def compare_growth(
    path: Path,
    max_nodes: int | None = None,
    max_depth: int | None = None,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Grow both ways on a run's search prompts.

    Args:
        path: the run folder; its rollout is made if there is none.
        max_nodes, max_depth: other than the run's.

    Raises:
        UsageError: for a limit that is below 1, or deeper than the heads.
    """
    run = reopen_run(path, command, progress)
    with run.folder:
        max_nodes = run.config.max_nodes if max_nodes is None else max_nodes
        max_depth = run.max_depth if max_depth is None else max_depth
        _check(run, max_nodes, max_depth)
        rollout(run)
        depths = range(1, max_depth + 1)
        trace = read_trace(run, "search")
        started = perf_counter()
        replayed = [grow(trace, depth, max_nodes, run.n_ranks) for depth in depths]
        replay_seconds = perf_counter() - started
        live = _Live(run, max_nodes)
        grown = live.grow_all(depths)
        return Comparison(
            folder=run.folder.path,
            data=run.data_facts["description"],
            pairs=[
                Pair(*pair)
                for ways in zip(grown, replayed, strict=True)
                for pair in zip(*ways, strict=True)
            ],
            prompts=len(run.splits["search"]),
            rollouts=live.rollouts,
            live_seconds=live.seconds,
            replay_seconds=replay_seconds,
        )


def _check(run: Run, max_nodes: int, max_depth: int) -> None:
    if max_nodes < 1:
        raise UsageError(f"--max-nodes {max_nodes}", "a whole number of at least 1")
    if not 1 <= max_depth <= run.heads.n_heads:
        expected = f"a whole number from 1 to {run.heads.n_heads}, the depth of the run's heads"
        raise UsageError(f"--max-depth {max_depth}", expected)


class _Live:
    """Grows by decoding. Every rollout is a part of its own, so that the work can be resumed."""

    def __init__(self, run: Run, max_nodes: int) -> None:
        self._run, self._max_nodes = run, max_nodes
        self._prompts = run.splits["search"]
        self._parts = run.folder.partial(STAGE, {"text": run.text_inputs, "ranks": run.n_ranks})
        self._known = set(self._parts.values())
        self._scored: dict[int, dict[str, Any]] = {}

    @property
    def rollouts(self) -> int:
        """Rollouts of all prompts that it took."""
        return len(self._scored)

    @property
    def seconds(self) -> float:
        """That they took."""
        return sum(part["seconds"] for part in self._scored.values())

    def grow_all(self, depths: Sequence[int]) -> list[list[Grown]]:
        """One list of trees per depth limit, as `growth.grow` gives it."""
        progress = self._run.progress
        progress.start("growing live", len(self._prompts) * sum(map(self._rollouts_at, depths)))
        grown = [self._grow(depth) for depth in depths]
        progress.done()
        return grown

    def _rollouts_at(self, max_depth: int) -> int:
        """Rollouts under a depth limit: one for each node that is added to the first."""
        ranks = self._run.n_ranks
        full = sum(ranks**depth for depth in range(1, max_depth + 1))
        return max(min(self._max_nodes, full) - 1, 1)

    def _grow(self, max_depth: int) -> list[Grown]:
        tree = chain(1)
        grown = [Grown(tree, max_depth, self._scores(tree, max_depth)[0])]
        while tree.n_nodes < self._max_nodes and self._candidates(tree, max_depth):
            own, gains = self._scores(tree, max_depth)
            path = best_candidate(gains)
            tree = tree.with_node(path)
            grown.append(Grown(tree, max_depth, own + StepCounts(0, gains[path], gains[path], 0)))
        return grown

    def _candidates(self, tree: Tree, max_depth: int) -> list[RankPath]:
        return tree.growth_candidates(max_depth, self._run.n_ranks)

    def _scores(self, tree: Tree, max_depth: int) -> tuple[StepCounts, dict[RankPath, int]]:
        """The tree's own counts, and each candidate's gain on its steps."""
        number = max_depth * DEPTH_STRIDE + tree.n_nodes
        if number not in self._scored:
            self._scored[number] = self._part(number, tree, max_depth)
        part = self._scored[number]
        return StepCounts(**part["own"]), {tuple(path): gain for path, gain in part["gains"]}

    def _part(self, number: int, tree: Tree, max_depth: int) -> dict[str, Any]:
        """A rollout's counts: those of an earlier try with the same tree, or measured now."""
        if number in self._known:
            earlier: dict[str, Any] = self._parts.read_json(number)
            if earlier["paths"] == tree.to_list():
                self._run.progress.advance(len(self._prompts))
                return earlier
        part = self._measure(tree, self._candidates(tree, max_depth))
        self._parts.write_json(number, part)
        return part

    def _measure(self, tree: Tree, candidates: Sequence[RankPath]) -> dict[str, Any]:
        run = self._run
        joint = Tree((*tree.paths, *candidates))
        decoder = Decoder(run.target, run.heads, [joint], run.config.sampling)
        counter = _Counter(joint, candidates)
        own = StepCounts(0, 0, 0, 0)
        started = perf_counter()
        for prompt in self._prompts:
            limit = run.config.max_new_tokens
            own += _counts(decoder.generate(prompt.ids, Static(0), limit, cut=counter))
            run.progress.advance(1, f"{tree.n_nodes} nodes, {tree.depth} deep")
        return {
            "paths": tree.to_list(),
            "seconds": perf_counter() - started,
            "own": asdict(own),
            "gains": list(counter.gains.items()),
        }


class _Counter:
    """Cuts a step's rows to those of the current tree, and counts what candidates would gain.

    A candidate is a leaf of the joint tree. Where the accepted path ends in one, the current tree's
    acceptance ends at its parent and the target's next choice is the candidate's token.
    """

    def __init__(self, joint: Tree, candidates: Sequence[RankPath]) -> None:
        self._paths = ((), *joint.paths)
        self.gains = dict.fromkeys(candidates, 0)

    def __call__(self, rows: list[int]) -> list[int]:
        path = self._paths[rows[-1]]
        if path not in self.gains:
            return rows
        self.gains[path] += 1
        return rows[:-1]


def _counts(generated: Generation) -> StepCounts:
    steps = generated.steps
    passes = sum(step.rows > 0 for step in steps)
    tokens = len(generated.tokens)
    return StepCounts(len(steps), tokens, tokens - len(steps), passes)
