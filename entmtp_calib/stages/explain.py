"""Explain: what the nodes of a tree do, and why one tree is faster than another.

All by exact replay of a run's trace under its costs, or another machine's. Loads no model and no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entmtp_calib.ablation import Ablation, ablate, count_passes
from entmtp_calib.bank import Bank
from entmtp_calib.costs import Costs
from entmtp_calib.errors import TreeError
from entmtp_calib.formats.profile import Profile
from entmtp_calib.replay import accepted
from entmtp_calib.stages.import_trees import import_trees
from entmtp_calib.stages.recorded import Recorded
from entmtp_calib.stages.simulate import FITTED_ON
from entmtp_calib.timing import Interval, is_tie, mean_interval, paired_bootstrap
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree

REFERENCES = (HYDRA_DEFAULT, MEDUSA2_DEFAULT)
SELDOM = 200  # passes of which fewer than one accepts a node that is hardly worth its row


@dataclass(frozen=True)
class Explained:
    """A tree, what its nodes do, and how it compares.

    Attributes:
        name: its id, or what its file calls it.
        ablation: its figures and its nodes'.
        profile: its acceptance by depth.
        mean_emitted: emitted tokens per step.
        ratios: tokens/s over those of plain decoding and of Hydra's default, by id, paired over
            prompts; None where the costs do not reach one of both.
        best_part_ratio: the same of the tree's most accepted nodes over the tree.
        conclusion: all that in a line.
    """

    name: str
    ablation: Ablation
    profile: Profile
    mean_emitted: Interval
    ratios: dict[str, Interval | None]
    best_part_ratio: Interval | None
    conclusion: str

    @property
    def tree(self) -> Tree:
        """The tree."""
        return self.ablation.tree


@dataclass(frozen=True)
class Explanation:
    """Some trees explained.

    Attributes:
        conditions: what the figures hold for, as JSON values.
        best: id of the bank's best fixed tree.
        trees: plain decoding, the trees asked for, and the published defaults.
        asked: indices of those that were asked for; of a bank, its best tree and Hydra's default.
        notes: what a reader should know, a line each.
    """

    conditions: dict[str, Any]
    best: str
    trees: list[Explained]
    asked: list[int]
    notes: list[str]


def explain(
    path: Path,
    trees: Sequence[Tree | str] = (),
    split: str = "report",
    costs_file: Path | None = None,
) -> Explanation:
    """Explain trees on one of a bank's splits.

    Args:
        path: the bank's run folder or file.
        trees: each a tree, the id or number of one of the bank's, or a file of trees; none stands
            for all of the bank.
        split: report, select or search.
        costs_file: another machine's cost table; None for the bank's own.

    Raises:
        UsageError: there is no such split.
        TreeError: there is no such tree, or it is deeper than the trace.
        ArtifactError: a file is missing, or is not what it should be.
    """
    recorded = Recorded.open(path)
    bank, trace, costs = recorded.bank, recorded.trace(split), recorded.costs(costs_file)
    best = bank.trees[bank.best]
    wanted = _named(bank, trees)
    _check_depth(wanted, trace)
    references = [tree for tree in REFERENCES if tree.depth <= trace.max_depth]
    beside = [best] if trees else bank.trees
    shown = list(dict.fromkeys([EMPTY, *beside, *wanted, *references]))
    explained = _explained(trace, {tree: wanted.get(tree, tree.id) for tree in shown}, costs)
    asked = list(wanted) if trees else [best, *references[:1]]
    return Explanation(
        conditions=recorded.conditions(split, costs_file),
        best=best.id,
        trees=explained,
        asked=[shown.index(tree) for tree in dict.fromkeys(asked) if tree.n_nodes],
        notes=_notes(split, trace, explained),
    )


def _named(bank: Bank, trees: Sequence[Tree | str]) -> dict[Tree, str]:
    """The trees asked for, with their names."""
    named: dict[Tree, str] = {}
    for tree in trees:
        if isinstance(tree, Tree):
            named.setdefault(tree, tree.id)
        elif os.path.isfile(tree):
            for name, found in import_trees(Path(tree)).trees:
                named.setdefault(found, name)
        else:
            found = _of_bank(bank, tree)
            named.setdefault(found, found.id)
    return named


def _of_bank(bank: Bank, name: str) -> Tree:
    try:
        return bank.trees[bank.find(name)]
    except TreeError as error:
        also = "a name such as hydra-default, rank paths such as [[0], [0, 0]], a file of trees"
        raise TreeError(error.found, f"{error.expected}, {also}") from None


def _check_depth(named: Mapping[Tree, str], trace: Trace) -> None:
    for tree, name in named.items():
        if tree.depth > trace.max_depth:
            raise TreeError(
                f"tree {name} has depth {tree.depth}",
                f"at most {trace.max_depth}, the heads that the trace recorded",
            )


def _explained(trace: Trace, named: Mapping[Tree, str], costs: Costs) -> list[Explained]:
    """The trees by name, plain decoding among them, compared with it and with Hydra's default."""
    profiles = [Profile.of(trace, tree) for tree in named]
    ablations = {tree: ablate(trace, tree, costs) for tree in named}
    compared = list(dict.fromkeys([*named, *(of.best_part for of in ablations.values())]))
    passes, steps = count_passes(
        trace, np.stack([accepted(tree, trace.ranks) for tree in compared])
    )
    step_ms = costs.step_ms(compared)

    def ratio(tree: Tree, base: Tree) -> Interval | None:
        mine, other = compared.index(tree), compared.index(base)
        if not np.isfinite(step_ms[[mine, other]]).all():
            return None
        ms, base_ms = (passes[k] * step_ms[k] for k in (mine, other))
        return paired_bootstrap(trace.lengths, ms, trace.lengths, base_ms)

    hydra = ablations.get(HYDRA_DEFAULT)
    explained = []
    for index, (tree, name) in enumerate(named.items()):
        of = ablations[tree]
        ratios = {base.id: ratio(tree, base) for base in (EMPTY, HYDRA_DEFAULT) if base in named}
        part = ratio(of.best_part, tree)
        emitted = mean_interval(trace.lengths, steps[index])
        conclusion = conclude(name, of, ratios, part, hydra)
        explained.append(Explained(name, of, profiles[index], emitted, ratios, part, conclusion))
    return explained


def conclude(
    name: str,
    of: Ablation,
    ratios: Mapping[str, Interval | None],
    part: Interval | None,
    hydra: Ablation | None,
) -> str:
    """What the figures of a tree come to, in a line.

    Args:
        name: of the tree.
        of: its figures.
        ratios, part: as in `Explained`, the latter of its best part.
        hydra: figures of Hydra's default tree, where the heads reach it.
    """
    n, emitted = of.tree.n_nodes, of.whole.mean_emitted
    if not n:
        return f"{name} emits 1 token a step: {of.whole.tokens_per_second:.2f} tokens/s"
    said = [f"{name} verifies {n + 1} rows a pass and emits {emitted:.2f} tokens a step"]
    if seldom := len(of.seldom(1 / SELDOM)):
        said.append(f"{seldom} of its {n} nodes are accepted by fewer than 1 of {SELDOM} passes")
    if not of.is_priced:
        return "; ".join([*said, "the costs do not reach a step with it"])
    never = len(of.never_pay)
    said.append(f"{never} never pay{'s' if never == 1 else ''}" if never else "every node pays")
    if part and of.best_part != of.tree:
        said.append(_best_part(of, part))
    return "; ".join([*said, *_compared(of, ratios, hydra)])


def _best_part(of: Ablation, part: Interval) -> str:
    """What its most accepted nodes do alone."""
    n, emitted = of.best_part.n_nodes, f"{of.best.mean_emitted:.2f}"
    if not n:
        return "no part of it is faster than plain decoding"
    nodes = "its most accepted node alone emits" if n == 1 else f"its {n} most accepted alone emit"
    tie = ", a tie" if is_tie(part) else ""
    return f"{nodes} {emitted}, at {_bounds(part)} times its tokens/s{tie}"


def _compared(
    of: Ablation, ratios: Mapping[str, Interval | None], hydra: Ablation | None
) -> list[str]:
    said = []
    if plain := ratios.get(EMPTY.id):
        said.append(f"{_bounds(plain)} times plain decoding's tokens/s")
    ratio = ratios.get(HYDRA_DEFAULT.id)
    if ratio and hydra and hydra.tree != of.tree:
        tokens = of.whole.mean_emitted / hydra.whole.mean_emitted
        ms = (of.whole.step_ms or 0.0) / (hydra.whole.step_ms or 1.0)
        said.append(
            f"{_bounds(ratio)} times {hydra.tree.id}'s, with {tokens:.2f} times its tokens a step "
            f"in {ms:.2f} times its time"
        )
    return said


def _bounds(ratio: Interval) -> str:
    return f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _notes(split: str, trace: Trace, explained: Sequence[Explained]) -> list[str]:
    notes = []
    if split in FITTED_ON:
        notes.append(f"the bank's trees were found on the {split} split, which flatters them here")
    notes += [
        f"{tree.id} has depth {tree.depth}, and the trace recorded {trace.max_depth} heads"
        for tree in REFERENCES
        if tree.depth > trace.max_depth
    ]
    notes += [
        f"the costs do not reach a step with {each.name}"
        for each in explained
        if not each.ablation.is_priced
    ]
    return notes
