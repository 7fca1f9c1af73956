"""Simulate: figures that follow by hand, and other costs that change what is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_run import PROMPTS, save_costs, save_run, text_trace, timing_rows
from traces import random_trace

from entmtp_calib.artifacts import RunFolder
from entmtp_calib.errors import ArtifactError, DataError, UsageError
from entmtp_calib.policy import Ladder, Policy, Static
from entmtp_calib.replay import accepted, walk
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.recorded import candidate_trees
from entmtp_calib.stages.simulate import simulate
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

WIDE = Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
TREES = [EMPTY, chain(1), chain(3), WIDE]
POLICIES: dict[str, Policy] = {
    "static": Static(1),
    "ladder": Ladder(SignalSpec("chain_value", 1), (0.5,), (0, 1)),
}
ROW_MS = 2.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", text_trace(), TREES, POLICIES, timing_rows(ROW_MS))


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in rows}


def static_ms(tree: Tree, split: str, row_ms: float) -> float:
    """Replayed time of one tree: 10 ms a pass, `row_ms` a further row, 1 ms a level."""
    trace = text_trace().select(list(PROMPTS[split]))
    steps = walk(trace, accepted(tree, trace.ranks)) & ~trace.terminal
    return float(steps.sum() * (10 + row_ms * tree.n_nodes + tree.depth))


@pytest.mark.parametrize("split", ["report", "select", "search"])
def test_the_figures_of_fixed_trees_follow_by_hand(folder: Path, split: str) -> None:
    done = simulate(folder, split=split)
    rows = by_name(done.rows)
    assert list(rows) == ["plain", "static", "ladder"]  # three heads cannot draft Hydra's default
    n = len(text_trace().select(list(PROMPTS[split])))
    plain, static = (static_ms(tree, split, ROW_MS) for tree in (EMPTY, chain(1)))
    assert rows["plain"]["tokens_per_second_predicted"] == pytest.approx(1000 * n / plain)
    assert rows["static"]["ratio_to_plain"] == pytest.approx(plain / static)
    assert rows["static"]["plain_low"] < plain / static < rows["static"]["plain_high"]
    assert rows["plain"]["mean_emitted_tokens"] == 1
    assert rows["static"]["ratio_to_static"] == 1
    assert rows["static"]["share"] == [{"tree": "chain-1", "share": 1.0}]
    assert rows["ladder"]["switches"] > 0
    assert sum(entry["share"] for entry in rows["ladder"]["share"]) == pytest.approx(1)
    assert all(
        row["tokens_per_second_predicted"] <= row["oracle_tokens_per_second"] for row in done.rows
    )
    assert done.refit is None
    assert done.conditions["positions"] == n
    assert done.conditions["hardware"]["cpu"] == "a processor"
    assert bool(done.notes) == (split != "report")


def test_other_costs_change_what_is_chosen(folder: Path, tmp_path: Path) -> None:
    cheap = simulate(folder, save_costs(tmp_path / "cheap", timing_rows(0.01)))
    dear = simulate(folder, save_costs(tmp_path / "dear", timing_rows(30.0)))
    for done, row_ms in ((cheap, 0.01), (dear, 30.0)):
        assert done.refit
        texts = [sum(static_ms(t, s, row_ms) for s in ("search", "select")) for t in TREES]
        best = TREES[int(np.argmin(texts))]
        static = by_name(done.refit.rows)["static"]
        assert static["share"] == [{"tree": best.id, "share": 1.0}]
        assert "static" in done.refit.changed
        ratio = static_ms(chain(1), "report", row_ms) / static_ms(best, "report", row_ms)
        assert static["ratio_to_bank"] == pytest.approx(ratio)
        assert done.conditions["hardware"] is None
    assert by_name(dear.refit.rows)["static"]["share"][0]["tree"] == "plain"  # type: ignore[union-attr]
    accepts = [[row["emitted_tokens"], row["steps"]] for row in cheap.rows]
    assert accepts == [[row["emitted_tokens"], row["steps"]] for row in dear.rows]


def test_under_the_runs_own_table_the_static_tree_stays(folder: Path) -> None:
    texts = [sum(static_ms(t, s, ROW_MS) for s in ("search", "select")) for t in TREES]
    assert TREES[int(np.argmin(texts))] == chain(1)
    own, again = simulate(folder), simulate(folder, folder / "timing.parquet")
    assert again.rows == own.rows
    assert again.refit
    assert "static" not in again.refit.changed


def test_a_tree_that_the_costs_do_not_reach_has_no_figures(folder: Path, tmp_path: Path) -> None:
    few = save_costs(tmp_path / "few", timing_rows(1.0, most_rows=1))
    done = simulate(folder, few)
    rows = by_name(done.rows)
    assert rows["plain"]["tokens_per_second_predicted"] is not None
    for name in ("static", "ladder"):
        assert rows[name]["tokens_per_second_predicted"] is None
        assert rows[name]["ratio_to_plain"] is None
        assert f"{name} uses trees that these costs do not reach" in done.notes


def test_hydras_default_stands_beside_where_it_could_run(tmp_path: Path) -> None:
    trace = random_trace(2, n_texts=12, max_length=20, n_heads=4)
    rows = timing_rows(1.0)
    folder = save_run(tmp_path / "run", trace, TREES, POLICIES, rows)
    shown = by_name(simulate(folder).rows)
    assert shown["hydra-default"]["share"] == [{"tree": HYDRA_DEFAULT.id, "share": 1.0}]
    few = save_costs(tmp_path / "few", timing_rows(1.0, most_rows=32))
    assert "hydra-default" not in by_name(simulate(folder, few).rows)


def test_given_trees_are_those_of_run_json(folder: Path, tmp_path: Path) -> None:
    rows = timing_rows(ROW_MS)
    given = save_run(tmp_path / "given", text_trace(), TREES, POLICIES, rows, given=True)
    assert not (given / "grown.parquet").exists()
    assert candidate_trees(RunFolder.open(given)) == candidate_trees(RunFolder.open(folder))
    assert simulate(given).rows == simulate(folder).rows


def test_a_users_trees_stand_beside_the_policies_and_may_be_fitted(tmp_path: Path) -> None:
    rows = timing_rows(ROW_MS)
    mine = {Tree.of([[0], [1], [0, 0], [0, 1]]): "mine", chain(1): "grown, too"}
    folder = save_run(tmp_path / "run", text_trace(), TREES, POLICIES, rows, user_trees=mine)
    assert candidate_trees(RunFolder.open(folder)) == [*TREES, next(iter(mine))]
    shown = by_name(simulate(folder).rows)
    for tree in mine:
        assert shown[tree.id]["share"] == [{"tree": tree.id, "share": 1.0}]
        assert shown[tree.id]["tokens_per_second_predicted"] > 0


def test_the_bank_may_be_named_by_its_file(folder: Path) -> None:
    assert simulate(folder / "bank.safetensors").rows == simulate(folder).rows


STEPS, LEVELS = timing_rows(1.0)[:7], timing_rows(1.0)[7:]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (STEPS, "7 timed steps and 0 timed levels"),
        (LEVELS, "0 timed steps and 8 timed levels"),
        ([{**STEPS[0], "step_ms": None}, *LEVELS], "a timed step without its times"),
        ([{**STEPS[0], "draft_ms": 99.0}, *LEVELS], "a timed step without its times"),
        ([*STEPS, {**LEVELS[0], "depth": None}], "a timed level without its times"),
    ],
)
def test_a_table_without_costs_is_refused(
    folder: Path, tmp_path: Path, rows: list[dict[str, Any]], problem: str
) -> None:
    file = save_costs(tmp_path / "costs", rows)
    with pytest.raises(ArtifactError, match=problem) as refused:
        simulate(folder, file)
    assert str(file) in str(refused.value)


def test_costs_without_plain_decoding_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a step without drafts"):
        simulate(folder, save_costs(tmp_path / "costs", [*STEPS[1:], *LEVELS]))


def test_a_split_or_signal_that_is_none_is_a_usage_error(folder: Path) -> None:
    with pytest.raises(UsageError, match="--split train"):
        simulate(folder, split="train")
    with pytest.raises(UsageError, match="--signal luck"):
        simulate(folder, signal="luck")
    with pytest.raises(UsageError, match="a depth of at most 3"):
        simulate(folder, signal="chain_value:4")
