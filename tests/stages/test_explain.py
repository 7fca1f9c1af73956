"""Explain: which trees stand beside which, what is said of them, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from recorded_run import PROMPTS, save_costs, save_run, text_trace, timing_rows
from traces import trace_of

from entmtp_calib.errors import ArtifactError, DataError, TreeError, UsageError
from entmtp_calib.formats.fit import fixed
from entmtp_calib.policy import Static
from entmtp_calib.stages.explain import Explained, Explanation, explain
from entmtp_calib.stages.recorded import Recorded
from entmtp_calib.timing import paired_bootstrap
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree, chain

GROWN = Tree.of([(0,), (1,), (0, 0)])
TREES = [EMPTY, chain(1), GROWN]
ROW_MS = 2.0


def saved(folder: Path, n_heads: int = 4, best: int = 2, row_ms: float = ROW_MS) -> Path:
    trace = text_trace(n_heads=n_heads)
    return save_run(folder, trace, TREES, {"static": Static(best)}, timing_rows(row_ms))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("explained") / "run")


def report(split: str = "report") -> Trace:
    return text_trace(n_heads=4).select(list(PROMPTS[split]))


def by_id(found: Explanation) -> Mapping[str, Explained]:
    return {each.tree.id: each for each in found.trees}


def test_a_bank_stands_beside_plain_decoding_and_the_published_trees(folder: Path) -> None:
    found = explain(folder)
    assert [each.tree for each in found.trees] == [*TREES, HYDRA_DEFAULT, MEDUSA2_DEFAULT]
    assert [found.trees[index].tree for index in found.asked] == [GROWN, HYDRA_DEFAULT]
    assert found.best == GROWN.id
    assert found.notes == []
    assert found.conditions["split"] == "report"


@pytest.mark.parametrize("split", ["report", "select", "search"])
def test_the_figures_are_those_of_exact_replay(folder: Path, split: str) -> None:
    trace, costs = report(split), Recorded.open(folder).costs()
    found = explain(folder, split=split)
    for each in found.trees:
        step_ms = float(costs.step_ms([each.tree])[0])
        assert each.ablation.whole == fixed(trace, each.tree, step_ms)
        assert each.mean_emitted.value == pytest.approx(each.ablation.whole.mean_emitted)
        assert each.profile.passes == each.ablation.whole.counts.passes
        first = each.profile.marginal[:1]
        roots = [node for node in each.ablation.nodes if len(node.path) == 1]
        assert sum(node.accepted for node in roots) == sum(first) * each.profile.passes
    assert bool(found.notes) == (split != "report")


def test_ratios_are_paired_over_prompts(folder: Path) -> None:
    trace, costs = report(), Recorded.open(folder).costs()
    each = by_id(explain(folder))[GROWN.id]

    def ms(tree: Tree) -> list[float]:
        step_ms = float(costs.step_ms([tree])[0])
        texts = [trace.select([p]) for p in range(trace.n_prompts)]
        return [fixed(text, tree, step_ms).ms for text in texts]

    for base in (EMPTY, HYDRA_DEFAULT):
        expected = paired_bootstrap(trace.lengths, ms(GROWN), trace.lengths, ms(base))
        ratio = each.ratios[base.id]
        assert ratio
        for bound in ("low", "value", "high"):
            assert getattr(ratio, bound) == pytest.approx(getattr(expected, bound))


def test_a_conclusion_says_in_numbers_why_a_tree_loses(folder: Path) -> None:
    hydra = by_id(explain(folder))["hydra-default"]
    of = hydra.ablation
    seldom = sum(200 * node.accepted < of.whole.counts.passes for node in of.nodes)
    part = hydra.best_part_ratio
    assert part
    assert 0 < of.best_part.n_nodes < 63
    for words in (
        f"hydra-default verifies 64 rows a pass and emits {of.whole.mean_emitted:.2f} tokens",
        f"; {seldom} of its 63 nodes are accepted by fewer than 1 of 200 passes; ",
        f"; {len(of.never_pay)} never pay; ",
        f" most accepted alone emit {of.best.mean_emitted:.2f}, at {part.value:.2f} [",
        " times plain decoding's tokens/s",
    ):
        assert words in hydra.conclusion
    assert "hydra-default's" not in hydra.conclusion
    ratio = of.best.tokens_per_second / of.whole.tokens_per_second
    assert part.value == pytest.approx(ratio)


def test_a_conclusion_says_in_numbers_why_a_tree_wins(folder: Path) -> None:
    found = by_id(explain(folder))
    grown, hydra = (found[name].ablation.whole for name in (GROWN.id, "hydra-default"))
    assert grown.step_ms
    assert hydra.step_ms
    ratio = found[GROWN.id].ratios["hydra-default"]
    assert ratio
    assert (
        f"{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times hydra-default's, with "
        f"{grown.mean_emitted / hydra.mean_emitted:.2f} times its tokens a step in "
        f"{grown.step_ms / hydra.step_ms:.2f} times its time"
    ) in found[GROWN.id].conclusion
    plain = found["plain"]
    rate = plain.ablation.whole.tokens_per_second
    assert plain.conclusion == f"plain emits 1 token a step: {rate:.2f} tokens/s"


def test_other_costs_change_what_part_is_best(folder: Path, tmp_path: Path) -> None:
    free = save_costs(tmp_path / "free", timing_rows(0.0, level_ms=0.0))
    dear = save_costs(tmp_path / "dear", timing_rows(90.0))
    cheap, costly = (
        by_id(explain(folder, split="search", costs_file=costs))["hydra-default"]
        for costs in (free, dear)
    )
    assert cheap.ablation.whole.mean_emitted == costly.ablation.whole.mean_emitted
    assert cheap.ablation.best_part.n_nodes > 3
    assert costly.ablation.best_part == EMPTY
    assert "no part of it is faster than plain decoding" in costly.conclusion


def test_trees_asked_for_stand_beside_the_best_of_the_bank(folder: Path) -> None:
    own = Tree.of([(0,), (0, 0), (0, 1)])
    found = explain(folder, [own, "chain-1", own])
    assert [each.tree for each in found.trees[:4]] == [EMPTY, GROWN, own, chain(1)]
    assert [found.trees[index].tree for index in found.asked] == [own, chain(1)]
    assert explain(folder, ["1"]).asked == [2]


def test_a_file_of_trees_keeps_their_names(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "choices.json"
    file.write_text(json.dumps({"mine": [[0], [1]], "leaves": [[0, 0], [0, 1], [2]]}))
    found = explain(folder, [str(file)])
    named = {found.trees[index].name: found.trees[index].tree for index in found.asked}
    assert named == {
        "mine": Tree.of([(0,), (1,)]),
        "leaves": Tree.of([(0,), (2,), (0, 0), (0, 1)]),
    }
    assert found.trees[found.asked[0]].conclusion.startswith("mine verifies 3 rows")


def test_heads_too_few_for_the_published_trees_are_noted(tmp_path: Path) -> None:
    found = explain(saved(tmp_path / "run", n_heads=3))
    assert [each.tree for each in found.trees] == TREES
    assert found.notes == [
        f"{name} has depth 4, and the trace recorded 3 heads"
        for name in ("hydra-default", "medusa2-default")
    ]
    assert [found.trees[index].tree for index in found.asked] == [GROWN]
    with pytest.raises(TreeError, match="tree hydra-default has depth 4; expected at most 3"):
        explain(tmp_path / "run", [HYDRA_DEFAULT])


def test_where_plain_decoding_is_best_hydras_default_alone_is_taken_apart(tmp_path: Path) -> None:
    found = explain(saved(tmp_path / "run", best=0))
    assert [found.trees[index].tree for index in found.asked] == [HYDRA_DEFAULT]
    assert explain(tmp_path / "run", [EMPTY]).asked == []


def test_costs_that_do_not_reach_a_tree_are_noted(folder: Path, tmp_path: Path) -> None:
    few = save_costs(tmp_path / "few", timing_rows(1.0, most_rows=32))
    found = explain(folder, costs_file=few)
    hydra = by_id(found)["hydra-default"]
    assert hydra.ratios == {"plain": None, "hydra-default": None}
    assert hydra.conclusion.endswith("the costs do not reach a step with it")
    assert "the costs do not reach a step with hydra-default" in found.notes
    assert by_id(found)[GROWN.id].ratios["hydra-default"] is None


def test_texts_without_a_pass_are_refused(tmp_path: Path) -> None:
    row = [-1] * 4
    trace = trace_of([[row] * 3] * 9 + [[row]] * 3)  # those of the report split are one token long
    policies = {"static": Static(2)}
    folder = save_run(tmp_path / "run", trace, TREES, policies, timing_rows(ROW_MS))
    with pytest.raises(DataError, match="no text of two or more tokens"):
        explain(folder)


def test_what_is_no_tree_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TreeError, match=r"no tree 'oak'; expected one of plain, .* hydra-d"):
        explain(folder, ["oak"])
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[[0], [0, 0], [1, 0]]")
    with pytest.raises(TreeError, match=r"wrong: \[1, 0\] lacks its parent \[1\]"):
        explain(folder, [str(wrong)])
    with pytest.raises(UsageError, match="--split train"):
        explain(folder, split="train")
    with pytest.raises(ArtifactError, match="cannot read"):
        explain(folder, costs_file=tmp_path / "none")
