"""Signals: one that tells everything, ones that tell nothing, and what it costs to know."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_run import save_run, text_trace, timing_rows
from traces import trace_of

from entmtp_calib.errors import UsageError
from entmtp_calib.policy import Hysteresis, Policy, Static
from entmtp_calib.prediction import auroc, spearman
from entmtp_calib.replay import accepted, walk
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.recorded import Recorded
from entmtp_calib.stages.signals import all_signals, compared_trees, measure_signals
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, Tree, chain

PAIR = Tree.of([(0,), (1,)])
TREES = [EMPTY, chain(1), PAIR, chain(3)]
POLICIES: dict[str, Policy] = {
    "static": Static(2),
    "hysteresis": Hysteresis(SignalSpec("base_top1"), 1, 3, 0.5, 0.5),
}
REPORT = [9, 10, 11]


def measured(
    folder: Path, trace: Trace, policies: dict[str, Policy] = POLICIES, split: str = "report"
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The conditions, and the rows by signal."""
    save_run(folder, trace, TREES, policies, timing_rows(1.0))
    found = measure_signals(folder, split)
    return found.conditions, {row["signal"]: row for row in found.rows}


def test_the_figures_are_those_of_the_static_trees_steps(tmp_path: Path) -> None:
    conditions, rows = measured(tmp_path / "run", text_trace())
    trace = text_trace().select(REPORT)
    at = walk(trace, accepted(PAIR, trace.ranks)) & ~trace.terminal
    large, small = (accepted(tree, trace.ranks)[at] for tree in (chain(3), chain(1)))
    value = trace.chain_probs[at, 0]
    row = rows["chain_value:1"]
    assert row["rank_correlation"] == pytest.approx(spearman(value, large))
    assert row["auroc"] == pytest.approx(auroc(value, large > small))
    assert row["rank_correlation_low"] < row["rank_correlation"] < row["rank_correlation_high"]
    assert row["auroc_low"] < row["auroc"] < row["auroc_high"]
    assert conditions["steps"] == at.sum()
    assert conditions["large_accepts_more"] == pytest.approx((large > small).mean())
    names = [conditions[name] for name in ("static_tree", "small_tree", "large_tree")]
    assert names == [PAIR.id, "chain-1", "chain-3"]
    # The trace's entropy is 1 less its top-1 probability, so both tell the same.
    assert rows["entropy"]["auroc"] == rows["base_top1"]["auroc"]


def test_a_signal_that_tells_everything_is_perfect(tmp_path: Path) -> None:
    trace = text_trace()
    reached = accepted(chain(3), trace.ranks)
    told = np.tile((1 + reached[:, None]) / 5, (1, 3)).astype(np.float32)
    _, rows = measured(tmp_path / "run", replace(trace, chain_probs=told))
    for name in ("chain_value:1", "path_value:1", "expected_accepted:3"):
        assert rows[name]["signal"] == name
    perfect = rows["chain_value:2"]
    assert perfect["rank_correlation"] == pytest.approx(1)
    assert (perfect["auroc_low"], perfect["auroc"], perfect["auroc_high"]) == (1, 1, 1)


def test_what_is_constant_is_undefined(tmp_path: Path) -> None:
    ranks = [[[0, 0, 0]] * 8 + [[0, 0, -1], [0, -1, -1], [-1, -1, -1]]] * 12
    _, rows = measured(tmp_path / "run", trace_of(ranks))
    assert math.isnan(rows["base_top1"]["rank_correlation"])
    assert math.isnan(rows["base_top1"]["rank_correlation_low"])


def test_levels_cost_where_the_static_tree_does_not_have_them(tmp_path: Path) -> None:
    conditions, rows = measured(tmp_path / "run", text_trace())
    assert conditions["plain_step_ms"] == 10
    costs = {"base_top1": 0, "entropy": 0, "acceptance_average": 0}
    for kind in ("chain_value", "path_value", "expected_accepted"):
        costs |= {f"{kind}:{d}": d - 1 for d in (1, 2, 3)}  # 1 ms a level; the tree has one
    for name, ms in costs.items():
        for row in [rows[name], rows.get(f"running:{name}", rows[name])]:
            assert row["drafted_ahead_ms"] == pytest.approx(ms)
            assert row["share_of_plain_step"] == pytest.approx(ms / 10)


def test_the_past_tells_where_the_texts_differ(tmp_path: Path) -> None:
    easy = [[0, 0, 0]] * 38 + [[0, 0, -1], [0, -1, -1], [-1, -1, -1]]
    hard = [[-1, -1, -1]] * 41
    mixed = hard[:20] + easy[20:]
    _, rows = measured(tmp_path / "run", trace_of([easy, hard, mixed] * 4))
    assert rows["acceptance_average"]["auroc"] > 0.8


def test_one_prompt_leaves_the_whole_range_open(tmp_path: Path) -> None:
    longest = int(text_trace().lengths.argmax())
    others = [number for number in range(12) if number != longest][:9]
    texts = text_trace().select([*others, longest])  # the last one is of the report split
    ends = trace_of([[[-1, -1, -1]]] * 2)
    trace = Trace.joined([texts, replace(ends, prompt=ends.prompt + 12)])
    _, rows = measured(tmp_path / "run", trace)
    row = rows["chain_value:1"]
    assert (row["rank_correlation_low"], row["rank_correlation_high"]) == (-1, 1)
    assert (row["auroc_low"], row["auroc_high"]) == (0, 1)


@pytest.mark.parametrize(
    ("used", "small", "large"),
    [((1, 2, 3), chain(1), chain(3)), ((0, 2), EMPTY, PAIR), ((0,), EMPTY, chain(4))],
)
def test_the_compared_trees_are_those_in_use(
    tmp_path: Path, used: tuple[int, ...], small: Tree, large: Tree
) -> None:
    policies: dict[str, Policy] = {f"always {k}": Static(k) for k in used}
    policies["static"] = Static(used[0])
    folder = save_run(tmp_path / "run", text_trace(), TREES, policies, timing_rows(1.0))
    assert compared_trees(Recorded.open(folder).bank, 4) == (small, large)


def test_every_signal_stands_beside_its_running_estimate() -> None:
    names = [str(spec) for spec in all_signals(2)]
    assert names == [
        "acceptance_average",
        *("base_top1", "running:base_top1", "entropy", "running:entropy"),
        *("chain_value:1", "running:chain_value:1", "chain_value:2", "running:chain_value:2"),
        *("path_value:1", "running:path_value:1", "path_value:2", "running:path_value:2"),
        *("expected_accepted:1", "running:expected_accepted:1"),
        *("expected_accepted:2", "running:expected_accepted:2"),
    ]


def test_a_split_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--split train"):
        measured(tmp_path / "run", text_trace(), split="train")
