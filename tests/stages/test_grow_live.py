"""Live growth, a rollout per node, grows the trees that replay grows on one recorded rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import toys
from toy_bank import write_prompts
from toy_heads import random_heads, save_for

from entmtp_calib.config import BuildConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import UsageError
from entmtp_calib.growth import grow
from entmtp_calib.stages import setup
from entmtp_calib.stages.grow_live import compare_growth
from entmtp_calib.stages.rollout import read_trace, rollout
from entmtp_calib.stages.setup import Inputs, Run, open_run, reopen_run
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import chain

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RAND with stop tokens that its texts run into, and random heads beside it."""
    folder = tmp_path_factory.mktemp("rand")
    path = toys.save_rand(folder / "model", config_eos=[2, 7])
    target = load_target(path)
    save_for(random_heads(target, n_heads=3), target, folder / "heads")
    return path


@pytest.fixture(autouse=True)
def _load_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run that is opened again has the same target, which takes a second to load."""
    target = load_target(model)
    monkeypatch.setattr(setup, "load_target", lambda *_, **__: target)


def new_run(folder: Path, model: Path, **changes: Any) -> Path:
    """A run folder without any stage."""
    data = write_prompts(folder / "prompts.jsonl", [f"t{n}" for n in range(10)], 5)
    sizes = {"search_prompts": 3, "select_prompts": 1, "report_prompts": 1, "max_new_tokens": 24}
    config = BuildConfig(task="custom", max_nodes=7, max_rank=4, **{**sizes, **changes})
    inputs = Inputs(str(model), str(model.with_name("heads")), str(data))
    with open_run(config, inputs, folder / "run").folder:
        return folder / "run"


@pytest.fixture(params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def run(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Path:
    return new_run(tmp_path, model, **request.param)


@pytest.fixture
def greedy_run(tmp_path: Path, model: Path) -> Path:
    return new_run(tmp_path, model)


def search_trace(run: Run) -> Any:
    with run.folder:
        rollout(run)
        return read_trace(run, "search")


def test_both_ways_grow_the_same_trees_with_the_same_counts(run: Path) -> None:
    found = compare_growth(run, max_depth=2)
    assert [(pair.live.max_depth, pair.live.tree.n_nodes) for pair in found.pairs] == [
        *((1, size) for size in (1, 2, 3, 4)),  # four ranks: no more trees of depth 1
        *((2, size) for size in range(1, 8)),
    ]
    for pair in found.pairs:
        assert pair.live == pair.replay
    assert found.differing == 0
    assert found.rollouts == 3 + 6
    assert found.live_seconds > found.replay_seconds > 0
    trace = search_trace(reopen_run(run))
    assert [pair.replay for pair in found.pairs[4:]] == grow(trace, 2, 7, 4)
    assert (trace.lengths < 24).any()
    assert any(pair.live.tree.max_rank > 1 for pair in found.pairs)


def interrupted(run: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> int:
    """Calls of `generate` until the work was cut short, or to its end."""
    generate, calls = Decoder.generate, 0

    def counted(self: Decoder, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if calls == after:
            raise KeyboardInterrupt
        calls += 1
        return generate(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "generate", counted)
        try:
            compare_growth(run, max_nodes=4, max_depth=2)
        except KeyboardInterrupt:
            return calls
    return calls


def test_it_resumes_at_the_node_it_was_at(
    greedy_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search_trace(reopen_run(greedy_run))
    # Three nodes and two prompts of the next, then the six nodes less three.
    assert interrupted(greedy_run, monkeypatch, after=3 * 3 + 2) == 11
    assert interrupted(greedy_run, monkeypatch, after=99) == 3 * 3
    assert interrupted(greedy_run, monkeypatch, after=0) == 0
    resumed = compare_growth(greedy_run, max_nodes=4, max_depth=2)
    larger = compare_growth(greedy_run, max_nodes=5, max_depth=2)
    assert larger.pairs[:4] == resumed.pairs[:4]
    assert larger.pairs[4:8] == resumed.pairs[4:]


def test_the_run_stays_as_it_was(greedy_run: Path) -> None:
    search_trace(reopen_run(greedy_run))
    with reopen_run(greedy_run).folder as folder:
        folder.finish({})
        folder.verify()
    before = {path: path.read_bytes() for path in greedy_run.iterdir() if path.is_file()}
    assert compare_growth(greedy_run, max_nodes=2, max_depth=1).differing == 0
    assert {path: path.read_bytes() for path in greedy_run.iterdir() if path.is_file()} == before


def test_a_tree_of_one_node_is_where_both_start(greedy_run: Path) -> None:
    (pair,) = compare_growth(greedy_run, max_nodes=1, max_depth=1).pairs
    assert pair.live == pair.replay
    assert pair.live.tree == chain(1)
    assert len(compare_growth(greedy_run, max_nodes=3, max_depth=1).pairs) == 3


@pytest.mark.parametrize(("limit", "value"), [("max_nodes", 0), ("max_depth", 0), ("max_depth", 4)])
def test_limits_that_cannot_be_are_refused(limit: str, value: int, greedy_run: Path) -> None:
    with pytest.raises(UsageError, match=f"--{limit.replace('_', '-')} {value}"):
        compare_growth(greedy_run, **{limit: value})
