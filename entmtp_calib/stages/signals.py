"""Signals: how well each tells what the next step will accept, and what it costs to know it.

Looked at where a scheduler would ask: at the steps that the bank's static tree takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entmtp_calib.bank import Bank
from entmtp_calib.costs import Costs
from entmtp_calib.policy import Ladder, Static
from entmtp_calib.prediction import Statistic, area, rank_correlation
from entmtp_calib.signals import CHAIN_KINDS, SignalSpec
from entmtp_calib.stages.recorded import Recorded
from entmtp_calib.task import Task
from entmtp_calib.timing import Interval, bootstrap
from entmtp_calib.trace import Bools, Ints
from entmtp_calib.tree import EMPTY, Tree, chain
from entmtp_calib.walks import NOT_CHOSEN

N_BOOT, SEED = 1000, 0


@dataclass(frozen=True)
class Predictions:
    """What each signal is worth.

    Attributes:
        conditions: what the figures hold for, as JSON values; the trees and steps among them.
        rows: per signal its rank correlation with the accepted draft tokens of the large tree, its
            AUROC for "the large tree accepts more than the small one", each with bounds over
            prompts and None where undefined; the ms per step of levels drafted ahead, and those as
            a share of a plain step.
    """

    conditions: dict[str, Any]
    rows: list[dict[str, Any]]


def measure_signals(path: Path, split: str = "report") -> Predictions:
    """Judge every signal on one of a bank's splits.

    Args:
        path: the bank's run folder or file.
        split: report, select or search; raises `UsageError` for another.
    """
    recorded = Recorded.open(path)
    trace, costs = recorded.trace(split), recorded.costs()
    small, large = compared_trees(recorded.bank, trace.max_depth)
    static = recorded.bank.trees[recorded.bank.best]
    task = Task.of(trace, [static, small, large], costs)
    steps = np.flatnonzero(task.walk(Static(0)).chosen != NOT_CHOSEN)
    judge = Judge(task, steps)
    conditions = {
        **recorded.conditions(split),
        "static_tree": static.id,
        "small_tree": small.id,
        "large_tree": large.id,
        "steps": len(steps),
        "large_accepts_more": float(judge.is_positive.mean()),
        "plain_step_ms": costs.verify(1),
    }
    return Predictions(conditions, [judge.row(spec) for spec in all_signals(trace.max_depth)])


def compared_trees(bank: Bank, depth: int) -> tuple[Tree, Tree]:
    """The smallest and the largest tree that the bank's policies use.

    The small one has nodes, unless only one such tree is in use: then it is the empty tree. The
    large one is the full chain of this depth where all policies are plain decoding.
    """
    used = {bank.trees[index] for policy in bank.policies.values() for index in policy.indices}
    drafting = sorted(used - {EMPTY}, key=lambda tree: (tree.n_nodes, tree.depth, tree.paths))
    large = drafting[-1] if drafting else chain(depth)
    return (drafting[0] if len(drafting) > 1 else EMPTY), large


def all_signals(depth: int) -> list[SignalSpec]:
    """Every signal that heads of this depth have, each beside its running estimate."""
    plain = [SignalSpec("base_top1"), SignalSpec("entropy")]
    plain += [SignalSpec(kind, d) for kind in CHAIN_KINDS for d in range(1, depth + 1)]
    both = [(spec, SignalSpec(spec.kind, spec.depth, running=True)) for spec in plain]
    return [SignalSpec("acceptance_average"), *(spec for pair in both for spec in pair)]


class Judge:
    """Compares signals with what two trees accept.

    Args:
        task: of the static, the small and the large tree, in this order.
        steps: [M], rows where the static tree's steps start.
    """

    def __init__(self, task: Task, steps: Ints) -> None:
        self._task, self._steps = task, steps
        _, small, large = task.accepted[:, steps]
        self.outcomes: Ints = large
        self.is_positive: Bools = large > small
        self._text: Ints = np.unique(task.trace.prompt[steps], return_inverse=True)[1]

    def row(self, spec: SignalSpec) -> dict[str, Any]:
        """The figures of one signal."""
        values = self._task.walk(Ladder(spec, (), (0,))).values[self._steps]
        correlation = self._over_prompts(rank_correlation(values, self.outcomes), lowest=-1.0)
        auroc = self._over_prompts(area(values, self.is_positive), lowest=0.0)
        ahead_ms = drafted_ahead_ms(self._task.costs, self._task.trees[0], spec)
        return {
            "signal": str(spec),
            **_columns("rank_correlation", correlation),
            **_columns("auroc", auroc),
            "drafted_ahead_ms": ahead_ms,
            "share_of_plain_step": ahead_ms / self._task.costs.verify(1),
        }

    def _over_prompts(self, statistic: Statistic, lowest: float) -> Interval:
        """The figure and its interval, within what it can be."""
        found = bootstrap(
            lambda counts: statistic(counts[self._text]), int(self._text.max()) + 1, N_BOOT, SEED
        )
        return Interval(max(found.low, lowest), found.value, min(found.high, 1.0))


def drafted_ahead_ms(costs: Costs, tree: Tree, spec: SignalSpec) -> float:
    """ms that a step with one fixed tree pays for the levels a signal is made of.

    Levels that the tree has anyway are not drafted twice, so they cost nothing more.
    """
    looking, blind = (
        costs.policy_ms(policy, [tree]) for policy in (Ladder(spec, (), (0,)), Static(0))
    )
    return float(looking[-1, 0] - blind[0, 0])


def _columns(name: str, figure: Interval) -> dict[str, float]:
    return {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
