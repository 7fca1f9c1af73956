"""Timing: the live texts are its first round, and what cannot win is not run to the end.

Texts and their seconds are made up here, so that it is known who must win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_bank import save_inputs

from entmtp_calib import records
from entmtp_calib.config import BuildConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Policy, Static
from entmtp_calib.racing import runs_by_method
from entmtp_calib.stages import cost
from entmtp_calib.stages import select as selecting
from entmtp_calib.stages.cost import COSTS, measure_costs
from entmtp_calib.stages.recalibrate import CANDIDATES, LIVE, recalibrate
from entmtp_calib.stages.recorded import TIMING
from entmtp_calib.stages.rollout import rollout
from entmtp_calib.stages.select import select, timed_records
from entmtp_calib.stages.setup import Inputs, Run, open_run
from entmtp_calib.stages.time import time_trees
from entmtp_calib.steps import Generation, Step
from entmtp_calib.timing import Interval
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

WIDE = Tree.of([(0,), (1,), (2,), (0, 0)])
GIVEN = (chain(1), chain(3), WIDE)
SECONDS = {EMPTY: 1.0, chain(1): 0.8, chain(3): 0.9, WIDE: 0.5, HYDRA_DEFAULT: 3.0}
PROMPTS, ROUNDS, TOKENS = 3, 3, 12
CONFIG = BuildConfig(
    task="custom",
    search_prompts=2,
    select_prompts=PROMPTS,
    report_prompts=1,
    max_new_tokens=TOKENS,
    timing_rounds=ROUNDS,
    step_repetitions=3,
    context_lengths=(8,),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return save_inputs(tmp_path_factory.mktemp("time"), n_heads=4, n_prompts=6)


class Texts:
    """Takes the decoder's place: texts of one token a step, in seconds that are known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[Tree, float]) -> None:
        self.seconds, self.stop_at = seconds, -1
        self.written: list[Tree] = []
        texts = self

        def generate(self: Decoder, ids: Sequence[int], policy: Policy, limit: int) -> Generation:
            assert isinstance(policy, Static)
            return texts.write(self.trees[policy.index], ids, limit)

        monkeypatch.setattr(Decoder, "generate", generate)

    def write(self, tree: Tree, ids: Sequence[int], limit: int) -> Generation:
        if len(self.written) == self.stop_at:
            raise KeyboardInterrupt
        if limit == TOKENS:  # else it warms up
            self.written.append(tree)
        step = Step(0, 0, tree.n_nodes + 1, 0, 0, 1, None, 0.0, 0.0, 0.0)
        # Prompts differ far more than trees; a little scatter, so that intervals are not points.
        scatter = 1 + 0.01 * ((len(self.written) * 7) % 5 - 2) / 2
        seconds = self.seconds[tree] * (1 + len(ids) + ids[0]) * scatter
        return Generation([1] * limit, "length", [step] * limit, seconds)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> Texts:
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 2, 5))
    monkeypatch.setattr(cost, "PARENT_COUNTS", (1, 32))
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: set())
    return Texts(monkeypatch, SECONDS)


@pytest.fixture
def run(inputs: Inputs, texts: Texts, tmp_path: Path) -> Iterator[Run]:
    """A run with given trees, of which the live texts are written."""
    with (opened := open_run(CONFIG, inputs, tmp_path / "run", trees=GIVEN)).folder:
        rollout(opened)
        measure_costs(opened)
        recalibrate(opened)
        yield opened


def table(run: Run, name: str = TIMING) -> list[dict[str, Any]]:
    return run.folder.read_table(name, records.TIMING_SCHEMA).to_pylist()


def runs_of(run: Run) -> dict[str, set[tuple[int, int]]]:
    """Per tree, the round and prompt of each of its texts."""
    runs = runs_by_method(table(run))
    return {name: {(turn, prompt) for prompt, turn in mine} for name, mine in runs.items()}


def every(rounds: int) -> set[tuple[int, int]]:
    return {(turn, prompt) for turn in range(rounds) for prompt in range(PROMPTS)}


def test_the_texts_that_were_counted_live_are_the_first_round(run: Run, texts: Texts) -> None:
    live = table(run, LIVE)
    assert Counter(texts.written) == dict.fromkeys((EMPTY, HYDRA_DEFAULT, *GIVEN), PROMPTS)
    assert {row["round"] for row in live} == {0}
    time_trees(run)
    rows = table(run)
    assert rows[: len(table(run, COSTS))] == table(run, COSTS)
    assert rows[len(table(run, COSTS)) :][: len(live)] == live
    candidates = run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA).to_pylist()
    steps = {row["tree"]: row["steps"] for row in candidates}
    assert all(steps[name] == PROMPTS * TOKENS for name in (EMPTY.id, HYDRA_DEFAULT.id, WIDE.id))


def test_one_round_is_the_live_one_and_nothing_runs_again(run: Run, texts: Texts) -> None:
    before = len(texts.written)
    time_trees(replace(run, config=replace(CONFIG, timing_rounds=1)))
    assert len(texts.written) == before
    assert set(map(frozenset, runs_of(run).values())) == {frozenset(every(1))}


def test_trees_that_lose_to_a_smaller_one_stop_and_all_others_run_to_the_end(
    run: Run, texts: Texts
) -> None:
    """The chain of 3 loses to the chain of 1, which loses only to a tree that is larger."""
    time_trees(run)
    runs = runs_of(run)
    for tree in (EMPTY, chain(1), WIDE):
        assert runs[tree.id] == every(ROUNDS), tree.id
    for tree in (chain(3), HYDRA_DEFAULT):
        assert runs[tree.id] == every(1), tree.id


def test_a_tree_is_dropped_as_soon_as_it_is_beaten_and_not_before(run: Run, texts: Texts) -> None:
    """After the first round, whose figures are near, the chain of 3 falls behind by a fifth."""
    texts.seconds = {**SECONDS, chain(3): 1.0}
    rows = table(run, LIVE)
    for row in rows:
        if row["tree"] == chain(3).id:
            near = next(r for r in rows if (r["tree"], r["prompt"]) == ("chain-1", row["prompt"]))
            row["seconds"] = near["seconds"]
    run.folder.write_table(LIVE, records.table(rows, records.TIMING_SCHEMA))
    time_trees(run)
    mine = runs_of(run)[chain(3).id]
    assert every(1) < mine < every(ROUNDS)
    order = sorted(every(ROUNDS))
    assert mine == set(order[: len(mine)])


def test_an_interrupted_race_goes_on_where_it_was(run: Run, texts: Texts) -> None:
    texts.stop_at = len(texts.written) + 4  # in the second prompt of the second round
    with pytest.raises(KeyboardInterrupt):
        time_trees(run)
    texts.stop_at = -1
    texts.written.clear()
    time_trees(run)
    assert runs_of(run)[EMPTY.id] == every(ROUNDS)
    assert Counter(texts.written)[EMPTY] == PROMPTS * (ROUNDS - 1) - 1  # one prompt was kept
    texts.written.clear()
    time_trees(run)
    assert texts.written == []


def test_figures_of_a_dropped_tree_are_paired_and_say_how_many_runs_they_are_of(run: Run) -> None:
    time_trees(run)
    found = {record["tree"]: record for record in timed_records(run)}
    assert found[EMPTY]["speedup_over_plain"] == Interval(1.0, 1.0, 1.0)
    assert (found[EMPTY]["runs"], found[EMPTY]["planned_runs"]) == (9, 9)
    dropped = found[chain(3)]
    assert (dropped["runs"], dropped["planned_runs"]) == (3, 9)
    assert dropped["speedup_over_plain"].value == pytest.approx(1 / 0.9, rel=0.03)
    assert dropped["tokens"] == PROMPTS * TOKENS
    assert found[WIDE]["tokens"] == PROMPTS * ROUNDS * TOKENS


def test_the_bank_is_the_frontier_of_the_trees_that_ran_to_the_end(run: Run) -> None:
    time_trees(run)
    timed = timed_records(run)
    flattering = Interval(1e6, 1e6, 1e6)  # whatever a dropped tree's few runs say
    timed = [
        record if record["tree"] != chain(3) else {**record, "tokens_per_second": flattering}
        for record in timed
    ]
    bank, candidates = select(run, timed)
    assert bank.frontier == (EMPTY, chain(1), WIDE)
    assert set(candidates) == {EMPTY, *GIVEN}


def test_a_reference_enters_the_bank_only_where_the_user_offers_it(
    inputs: Inputs, texts: Texts, tmp_path: Path
) -> None:
    texts.seconds = {**SECONDS, HYDRA_DEFAULT: 0.2, WIDE: 0.5}
    banks = []
    for number, mine in enumerate(({}, {HYDRA_DEFAULT: "medusa", WIDE: "wide"})):
        opened = open_run(
            CONFIG, inputs, tmp_path / f"run-{number}", trees=[chain(1)], user_trees=mine
        )
        with opened.folder:
            for stage in (rollout, measure_costs, recalibrate, time_trees):
                stage(opened)
            banks.append(select(opened, timed_records(opened))[0])
    assert [bank.frontier for bank in banks] == [
        (EMPTY, chain(1)),
        (EMPTY, chain(1), WIDE, HYDRA_DEFAULT),
    ]


def test_a_selection_is_made_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    time_trees(run)
    bank, _ = select(run, timed_records(run))
    monkeypatch.setattr(selecting, "fit_schedule", None)
    again, _ = select(run, timed_records(run))
    assert again.to_dict() == bank.to_dict()
