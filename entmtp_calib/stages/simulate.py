"""Simulate: a bank's policies under any machine's costs, and what would be fitted to these.

Decoding is lossless, so what a policy accepts is the same on every machine; only what its steps
cost differs. The recorded trace and a cost table say the rest, by exact replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from entmtp_calib.costs import Costs
from entmtp_calib.policy import Policy, Static
from entmtp_calib.progress import Progress, Silent
from entmtp_calib.replay import step_counts
from entmtp_calib.stages.recorded import Recorded, candidate_trees, user_trees_of
from entmtp_calib.stages.schedule import (
    AUTO,
    STATIC,
    Schedule,
    explain,
    feature_bounds,
    fit_schedule,
    predict,
    signals_to_try,
    usable,
)
from entmtp_calib.task import Task
from entmtp_calib.timing import paired_bootstrap
from entmtp_calib.trace import Floats, Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

FITTED_ON = ("search", "select")
PREDICTED = (
    "tokens_per_second_predicted",
    "oracle_tokens_per_second",
    "feature_bound_tokens_per_second",
    "capture",
)


@dataclass(frozen=True)
class Refit:
    """What would be fitted to other costs from the run's own search and select trace.

    Attributes:
        rows: as in `Simulation`, with the held-out gain, and the ratio to the bank's policy of the
            same name under the same costs.
        auto: the policy that would be used.
        trees: what the policies' indices count.
        policies: by name.
        changed: names of the policies, and "auto", that differ from the bank's.
    """

    rows: list[dict[str, Any]]
    auto: str
    trees: tuple[Tree, ...]
    policies: dict[str, Policy]
    changed: list[str]


@dataclass(frozen=True)
class Simulation:
    """Policies replayed under some costs.

    Attributes:
        conditions: what the figures hold for, as JSON values.
        rows: per policy the columns of `policies.parquet` that replay gives; ratios are paired over
            prompts. None stands for what the costs do not reach.
        refit: None where the costs are the bank's own.
        notes: what a reader should know, a line each.
    """

    conditions: dict[str, Any]
    rows: list[dict[str, Any]]
    refit: Refit | None
    notes: list[str]


def simulate(
    path: Path,
    costs_file: Path | None = None,
    split: str = "report",
    signal: str | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Replay a bank's policies on one of its splits.

    Args:
        path: the bank's run folder or file.
        costs_file: another machine's cost table; None for the bank's own.
        split: report, select or search.
        signal: of the bounds and of what is fitted, see `fit_schedule`; None for the bank's.

    Raises:
        UsageError: there is no such split or signal.
        ArtifactError: a file is missing, or is not what it should be.
    """
    recorded = Recorded.open(path)
    bank, trace, costs = recorded.bank, recorded.trace(split), recorded.costs(costs_file)
    signal = signal or recorded.signal
    signals_to_try(signal, trace.max_depth)
    candidates = candidate_trees(recorded.folder)
    oracle = Task.of(trace, usable([*candidates, *bank.trees], costs), costs)
    trees, policies = _methods(recorded, trace, costs)
    own = Replayed(Task.of(trace, trees, costs), policies)
    bounds = feature_bounds(oracle, signal)
    predicted = predict(own.task, own.possible, oracle, signal, bounds)
    refit = None
    if costs_file:
        texts = Trace.joined([recorded.trace(name) for name in FITTED_ON])
        schedule = fit_schedule(texts, candidates, costs, signal, progress or Silent())
        refit = _refit(recorded, schedule, own, oracle, bounds)
    return Simulation(
        conditions={**recorded.conditions(split, costs_file), "signal": signal},
        rows=[own.row(name, predicted.get(name, {})) for name in policies],
        refit=refit,
        notes=_notes(split, own),
    )


class Replayed:
    """Some policies on the texts of a task.

    Args:
        task: texts, trees and costs.
        policies: by name, those of the task's trees; "plain" and "static" are what ratios are to.
    """

    def __init__(self, task: Task, policies: Mapping[str, Policy]) -> None:
        self.task, self.policies = task, policies
        self.ms: dict[str, Floats] = {name: task.ms(policy) for name, policy in policies.items()}

    @cached_property
    def possible(self) -> dict[str, Policy]:
        """The policies whose every step has a cost."""
        return {n: p for n, p in self.policies.items() if np.isfinite(self.ms[n]).all()}

    def row(self, name: str, predicted: Mapping[str, Any]) -> dict[str, Any]:
        """A policy's counts and its ratios to plain and static, beside what was predicted."""
        trace = self.task.trace
        walked = self.task.walk(self.policies[name])
        counts = step_counts(trace, walked.accepted, walked.visited)
        per_tree = walked.steps_per_tree(len(self.task.trees))
        return {
            "policy": name,
            **dict.fromkeys(PREDICTED),
            **predicted,
            **_ratio("plain", trace, self.ms[name], self.ms["plain"]),
            **_ratio("static", trace, self.ms[name], self.ms[STATIC]),
            "emitted_tokens": counts.emitted_tokens,
            "steps": counts.steps,
            "mean_emitted_tokens": counts.mean_emitted,
            "mean_accepted_draft_tokens": counts.mean_accepted,
            "switches": walked.switches(trace),
            "share": [
                {"tree": tree.id, "share": steps / max(per_tree.sum(), 1)}
                for tree, steps in zip(self.task.trees, per_tree.tolist(), strict=True)
                if steps
            ],
        }


def _methods(
    recorded: Recorded, trace: Trace, costs: Costs
) -> tuple[list[Tree], dict[str, Policy]]:
    """Plain decoding, the bank's policies and, where they have a cost, what to compare with."""
    bank = recorded.bank
    beside = [HYDRA_DEFAULT, *user_trees_of(recorded.folder)]
    trees = list(dict.fromkeys([*bank.trees, EMPTY, *beside]))
    policies: dict[str, Policy] = {
        "plain": Static(trees.index(EMPTY)),
        STATIC: Static(bank.best),
        **bank.policies,
    }
    for tree in beside:
        if tree.depth <= trace.max_depth and usable([tree], costs):
            policies[tree.id] = Static(trees.index(tree))
    return trees, policies


def _refit(
    recorded: Recorded,
    schedule: Schedule,
    own: Replayed,
    oracle: Task,
    bounds: Mapping[str, float],
) -> Refit:
    bank, trace = recorded.bank, own.task.trace
    policies: dict[str, Policy] = {name: fit.policy for name, fit in schedule.fits.items()}
    plain = Static(schedule.trees.index(EMPTY))
    task = Task.of(trace, schedule.trees, own.task.costs)
    replayed = Replayed(task, {"plain": plain, **policies})
    predicted = predict(task, policies, oracle, bounds=bounds)
    rows = []
    for name, fit in schedule.fits.items():
        row = replayed.row(name, predicted[name])
        row |= {"held_out_gain": fit.held_out_gain, "explanation": explain(fit)}
        if name in own.ms:
            row |= _ratio("bank", trace, replayed.ms[name], own.ms[name])
        rows.append(row)
    changed = [
        name
        for name, policy in policies.items()
        if name not in bank.policies
        or not _same(policy, schedule.trees, bank.policies[name], bank.trees)
    ]
    changed += [AUTO] if schedule.auto != bank.auto else []
    return Refit(rows, schedule.auto, schedule.trees, policies, changed)


def _same(
    one: Policy, its_trees: Sequence[Tree], other: Policy, other_trees: Sequence[Tree]
) -> bool:
    """Whether two policies over different lists of trees choose alike."""
    known = [*other_trees, *(tree for tree in its_trees if tree not in other_trees)]
    return one.renumbered([known.index(tree) for tree in its_trees]) == other


def _ratio(name: str, trace: Trace, ms: Floats, base_ms: Floats) -> dict[str, Any]:
    """Columns of a paired ratio of rates; None where a step of either has no cost."""
    columns = (f"ratio_to_{name}", f"{name}_low", f"{name}_high")
    if not (np.isfinite(ms).all() and np.isfinite(base_ms).all()):
        return dict.fromkeys(columns)
    ratio = paired_bootstrap(trace.lengths, ms, trace.lengths, base_ms)
    return dict(zip(columns, (ratio.value, ratio.low, ratio.high), strict=True))


def _notes(split: str, own: Replayed) -> list[str]:
    notes = []
    if split in FITTED_ON:
        notes.append(f"policies were fitted on the {split} split, which flatters them here")
    notes += [
        f"{name} uses trees that these costs do not reach"
        for name in own.policies
        if name not in own.possible
    ]
    return notes
