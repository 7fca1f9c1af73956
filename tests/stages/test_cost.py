"""The cost table: every size at every context, nothing twice, nothing long that cannot win."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_bank import save_inputs
from toy_heads import random_heads

from entmtp_calib import records
from entmtp_calib.config import BuildConfig
from entmtp_calib.decoding import Decoding
from entmtp_calib.heads.model import RANK_CAP
from entmtp_calib.policy import Ladder, Static
from entmtp_calib.stages import cost
from entmtp_calib.stages.cost import (
    COSTS,
    hopeless,
    is_known,
    measure_costs,
    run_costs,
    timed_trees,
)
from entmtp_calib.stages.rollout import read_trace, rollout
from entmtp_calib.stages.setup import Inputs, Run, open_run
from entmtp_calib.steps import Step
from entmtp_calib.timing import Clock
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

CONFIG = BuildConfig(
    task="custom",
    search_prompts=2,
    select_prompts=2,
    report_prompts=1,
    max_new_tokens=12,
    max_nodes=70,
    step_repetitions=3,
    context_lengths=(8, 40, 500),
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return save_inputs(tmp_path_factory.mktemp("cost"), n_heads=4, n_prompts=5)


@pytest.fixture
def run(inputs: Inputs, tmp_path: Path) -> Iterator[Run]:
    """A run on RAND, of 128 positions and 10 tokens, that has its texts."""
    with (opened := open_run(CONFIG, inputs, tmp_path / "run")).folder:
        rollout(opened)
        yield opened


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sizes, and none of them hopeless, whatever this machine says."""
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 2, 5))
    monkeypatch.setattr(cost, "PARENT_COUNTS", (1, 3, 32))
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: set())


def table(run: Run) -> list[dict[str, Any]]:
    return run.folder.read_table(COSTS, records.TIMING_SCHEMA).to_pylist()


def test_every_size_is_timed_at_every_context_and_the_first_round_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: set())
    measure_costs(run)
    rows = table(run)
    steps = [row for row in rows if row["kind"] == "step"]
    levels = [row for row in rows if row["kind"] == "level"]
    assert len(steps) + len(levels) == len(rows)
    trees = timed_trees(run)
    # A context of 500 does not fit into 128 positions.
    wanted = {(tree.id, tree.n_nodes + 1, n) for tree in trees for n in (8, 40)}
    wanted |= {("plain with heads", 1, n) for n in (8, 40)}
    assert {(row["tree"], row["rows"], row["context_length"]) for row in steps} == wanted
    assert len(steps) == 3 * len(wanted)
    assert {row["round"] for row in rows} == {1, 2, 3}
    assert all(0 < row["draft_ms"] < row["step_ms"] for row in steps)
    depths = {(row["depth"], row["rows"]) for row in levels}
    assert depths == {(1, 1), *((d, n) for d in (2, 3, 4) for n in cost.PARENT_COUNTS)}
    # All trees that heads of ten tokens can draft have a price, Hydra's default among them.
    costs = run_costs(run)
    assert np.isfinite(costs.step_ms([*trees, HYDRA_DEFAULT])).all()
    assert costs.step_ms([chain(5)])[0] == np.inf


@pytest.mark.usefixtures("few")
def test_costs_hold_at_the_context_that_texts_have_on_average(run: Run) -> None:
    measure_costs(run)
    mean = float(read_trace(run, "search").context.mean())
    assert 8 < mean < 40
    at = {
        name: [
            np.median(
                [
                    row["step_ms"] - row["draft_ms"]
                    for row in table(run)
                    if (row["tree"], row["context_length"]) == (name, length)
                ]
            )
            for length in (8, 40)
        ]
        for name in ("plain", "plain with heads")
    }
    costs = run_costs(run)
    assert costs.plain_ms == pytest.approx(np.interp(mean, (8, 40), at["plain"]))
    assert costs.verify(1) == pytest.approx(np.interp(mean, (8, 40), at["plain with heads"]))


@pytest.mark.usefixtures("few")
def test_what_is_timed_stays_and_an_interrupted_table_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels, lengths = cost._time_levels, []

    def interrupt(run: Run, state: Decoding, length: int, earlier: Any) -> list[dict[str, Any]]:
        lengths.append(length)
        if lengths == [8, 40]:
            raise KeyboardInterrupt
        return levels(run, state, length, earlier)

    monkeypatch.setattr(cost, "_time_levels", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_costs(run)
    assert not (run.folder.path / COSTS).exists()
    measure_costs(run)
    assert lengths == [8, 40, 40]
    before = (run.folder.path / COSTS).read_bytes()
    measure_costs(run)
    assert lengths == [8, 40, 40]
    assert (run.folder.path / COSTS).read_bytes() == before


@pytest.mark.usefixtures("few")
def test_other_settings_are_timed_anew(run: Run) -> None:
    measure_costs(run)
    changed = replace(run, config=replace(CONFIG, context_lengths=(8,)))
    measure_costs(changed)
    assert {row["context_length"] for row in table(changed)} == {8}


@pytest.mark.usefixtures("few")
def test_where_no_context_fits_the_longest_one_is_timed(run: Run) -> None:
    long = replace(run, config=replace(CONFIG, context_lengths=(500, 900)))
    measure_costs(long)
    (length,) = {row["context_length"] for row in table(long)}
    assert length < 128 - 4
    assert run_costs(long).verify(1) > 0


def test_sizes_found_hopeless_are_not_timed_to_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 2, 5, 9))
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: {5, 9})
    longer = replace(run, config=replace(CONFIG, step_repetitions=6))
    measure_costs(longer)
    timed = {
        (n, context): {
            row["round"]
            for row in table(longer)
            if row["kind"] == "step" and (row["rows"], row["context_length"]) == (n, context)
        }
        for n in (2, 5, 9)
        for context in (8, 40)
    }
    every = set(range(1, 7))
    assert timed == {
        (2, 8): every,
        (2, 40): every,
        (5, 8): {1, 2, 3},
        (5, 40): set(),
        (9, 8): {1, 2, 3},
        (9, 40): set(),
    }


def test_what_repeats_itself_is_not_repeated_to_the_end_but_for_the_smallest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 4, 5, 9))
    monkeypatch.setattr(cost, "PARENT_COUNTS", (2,))
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: set())
    probed: Counter[int] = Counter()

    def probe(self: Decoding, policy: Static | Ladder) -> Step:
        rows = self.decoder.trees[policy.indices[-1]].n_nodes + 1
        probed[rows] += 1
        step_ms = 20.0 + (probed[rows] % 2 if rows == 9 else 0.0)  # nine rows scatter
        return Step(0, 0, rows, 0, 0, 1, None, 5.0, step_ms - 5.0, step_ms)

    monkeypatch.setattr(Decoding, "probe", probe)
    longer = replace(run, config=replace(CONFIG, step_repetitions=8, max_nodes=8))
    measure_costs(longer)
    rounds = {
        n: {row["round"] for row in table(longer) if (row["kind"], row["rows"]) == ("step", n)}
        for n in (1, 4, 5, 9)
    }
    every = set(range(1, 9))
    assert rounds == {1: every, 4: every, 5: set(range(1, 6)), 9: every}


def test_levels_that_are_known_are_not_timed_at_further_contexts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not depend on the context; the clock here says that every call takes as long."""
    ticks = itertools.count()
    monkeypatch.setattr(Clock, "now", lambda self: float(next(ticks)))
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 2))
    monkeypatch.setattr(cost, "PARENT_COUNTS", (1, 3))
    longer = replace(run, config=replace(CONFIG, step_repetitions=6, max_nodes=1))
    measure_costs(longer)
    levels = [row for row in table(longer) if row["kind"] == "level"]
    counts = Counter((row["depth"], row["rows"]) for row in levels)
    assert counts == dict.fromkeys([(1, 1), *((d, n) for d in (2, 3, 4) for n in (1, 3))], 5)
    assert {row["context_length"] for row in levels} == {8}


def test_a_median_is_known_from_five_repetitions_that_scatter_little() -> None:
    assert not is_known([10.0] * 4)
    assert is_known([10.0] * 5)
    assert is_known([10.0, 10.01, 9.99, 10.02, 99.0])  # an outlier leaves the median alone
    assert not is_known([10.0, 10.5, 9.5, 11.0, 9.0])
    assert is_known([10.0, 10.5, 9.5, 11.0, 9.0] * 60)


def step(rows: int, step_ms: float) -> dict[str, Any]:
    return {"kind": "step", "rows": rows, "step_ms": step_ms}


def test_a_pass_is_hopeless_if_plain_decoding_emits_as_much_sooner() -> None:
    """Two heads emit at most three tokens a step, in 30 ms by plain decoding."""
    rows = [step(1, 10.0), step(1, 9.0), step(1, 400.0), step(4, 30.0), step(8, 30.1), step(9, 5.0)]
    rows += [step(9, 31.0), step(9, 32.0), step(64, 900.0), {"kind": "level", "rows": 1}]
    assert hopeless(rows, 2) == {8, 9}
    assert hopeless(rows, 3) == set()


def test_trees_have_every_size_up_to_the_largest_that_is_wanted(run: Run) -> None:
    trees = timed_trees(run)
    sizes = [tree.n_nodes + 1 for tree in trees]
    assert sizes == sorted({*(n for n in cost.ROW_COUNTS if n <= 71), 71})
    assert trees[0] == EMPTY
    assert HYDRA_DEFAULT in trees
    given = tuple(Tree.of([(a,) for a in range(n)]) for n in (3, 90))
    assert timed_trees(replace(run, trees=given))[-1].n_nodes == 90
    small = replace(run, config=replace(CONFIG, max_nodes=6))
    assert timed_trees(small)[-1] == HYDRA_DEFAULT


def test_the_users_trees_are_timed_to_the_end_at_their_very_sizes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is hopeless, larger than all others, with more parents than usual."""
    wide = Tree.of(
        [*((a,) for a in range(10)), *((a, b) for a in range(10) for b in range(4))]
        + [(a, b, 0) for a in range(10) for b in range(4)]
    )
    monkeypatch.setattr(cost, "ROW_COUNTS", (1, 2, 5))
    monkeypatch.setattr(cost, "PARENT_COUNTS", (1, 32))
    monkeypatch.setattr(cost, "hopeless", lambda rows, depth: {5, 91})
    longer = replace(run, config=replace(CONFIG, step_repetitions=5))
    mine = replace(longer, user_trees={chain(3): "small", wide: "wide"})
    measure_costs(longer)
    assert run_costs(longer).step_ms([wide])[0] == np.inf
    measure_costs(mine)
    assert np.isfinite(run_costs(mine).step_ms([wide, chain(3)])).all()
    rounds = {
        (row["rows"], row["context_length"], row["round"])
        for row in table(mine)
        if row["kind"] == "step"
    }
    assert {(n, context, 5) for n in (4, 91) for context in (8, 40)} <= rounds
    assert (5, 8, 5) not in rounds
    assert {row["rows"] for row in table(mine) if row["kind"] == "level"} == {1, 32, 40}


def test_heads_that_are_few_and_narrow_are_timed_with_what_they_can_draft(run: Run) -> None:
    target = run.target
    shallow = replace(run, heads=random_heads(target, n_heads=1))
    trees = timed_trees(shallow)
    assert [tree.n_nodes for tree in trees] == list(range(11))  # ten tokens, one level
    narrow = replace(run, heads=random_heads(target, n_heads=2, draft_ids=[1, 2, 3]))
    trees = timed_trees(narrow)
    assert [tree.n_nodes for tree in trees] == [*range(13)]  # three, and three under each
    assert len(set(trees)) == len(trees)
    for tree in trees:
        assert tree.depth <= 2
        assert tree.max_rank < 3 <= RANK_CAP
