"""The rollout records what live decoding sees, one row at a time, and resumes text by text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toys
from toy_bank import write_prompts
from toy_heads import random_heads, save_for, saved_and_loaded

from entmtp_calib import records
from entmtp_calib.config import SamplingConfig, build_config
from entmtp_calib.decoding import Decoder
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.policy import Static
from entmtp_calib.sampling import entropy, top1_probability
from entmtp_calib.stages import rollout as stage
from entmtp_calib.stages.recorded import TRACE
from entmtp_calib.stages.rollout import read_trace, rollout, traces
from entmtp_calib.stages.setup import Inputs, Run, open_run
from entmtp_calib.targets import texts
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.packed import can_pack
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY

ENGINES = ["transformers", *(["lean"] if can_pack() else [])]
PROMPTS = {4: (3, 1, 4), 7: (1, 5, 9, 2, 6, 5, 3), 5: (5,), 2: (2, 7), 0: (1, 8, 2, 8, 1)}
SAMPLED = SamplingConfig(0.9, seed=4)
LIMIT = 14


@pytest.fixture(scope="module", params=ENGINES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toys.save_rand(tmp_path_factory.mktemp("rand"), config_eos=7)
    return load_target(folder, engine=request.param)


def live(target: Target, heads: Heads, ids: tuple[int, ...], sampling: SamplingConfig) -> Any:
    """What decoding token by token sees: tokens, ranks, chain, top-1 and entropy by position."""
    tokens = Decoder(target, None, [EMPTY], sampling).generate(ids, Static(0), LIMIT).tokens
    cache, state = target.new_cache(len(ids) + len(tokens)), HeadState()
    passed = list(ids)
    rows = []
    for number, token in enumerate(tokens):
        positions = torch.arange(cache.length, cache.length + len(passed))
        hidden = target.forward(passed, positions, cache)
        cache.commit(range(len(passed)))
        heads.observe(state, hidden, positions)
        logits = target.logits(hidden[-1:])[0]
        after = tokens[number:]
        ranks, chain, path = [], [], [token]
        for depth in range(1, heads.n_heads + 1):
            children, _ = heads.draft_level(depth, state.vector, torch.tensor([after[:depth]]))
            order = children[0].tolist()
            known = depth < len(after) and after[depth] in order
            ranks.append(order.index(after[depth]) if known else -1)
            children, probs = heads.draft_level(depth, state.vector, torch.tensor([path]))
            path.append(int(children[0, 0]))
            chain.append(float(probs[0, 0]))
            if depth >= len(after):  # past the end nothing has a rank
                after = [*after, 0]
        rows.append((token, ranks, chain, top1_probability(logits), entropy(logits)))
        passed = [token]
    return list(zip(*rows, strict=True))


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
def test_a_trace_holds_what_decoding_sees(
    target: Target, sampling: SamplingConfig, prefix: bool, tmp_path: Path
) -> None:
    heads = saved_and_loaded(random_heads(target, prefix=prefix), target, tmp_path)
    found = dict(traces(target, heads, PROMPTS, LIMIT, sampling))
    assert found.keys() == PROMPTS.keys()
    for number, trace in found.items():
        tokens, ranks, chain, top1, nats = live(target, heads, PROMPTS[number], sampling)
        n = len(tokens)
        assert (set(trace.prompt.tolist()), trace.token.tolist()) == ({number}, list(tokens))
        assert trace.position.tolist() == list(range(n))
        assert (trace.context - trace.position == len(PROMPTS[number])).all()
        assert trace.ranks.tolist() == list(ranks)
        for column, expected in [("chain_probs", chain), ("base_top1", top1), ("entropy", nats)]:
            values = np.array(expected, dtype=np.float32)
            if target.engine == "lean":
                assert (getattr(trace, column) == values).all(), column
            else:
                np.testing.assert_allclose(getattr(trace, column), values, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
def test_a_trace_does_not_depend_on_the_texts_beside_it(prefix: bool, tmp_path: Path) -> None:
    target = load_target(toys.save_rand(tmp_path / "rand", config_eos=7), engine="lean")
    heads = saved_and_loaded(random_heads(target, prefix=prefix), target, tmp_path / "heads")
    together = dict(traces(target, heads, PROMPTS, LIMIT, SAMPLED))
    for number, ids in PROMPTS.items():
        [(_, alone)] = traces(target, heads, {number: ids}, LIMIT, SAMPLED)
        assert_equal(alone, together[number])


def assert_equal(one: Trace, other: Trace) -> None:
    assert one.to_table("any").equals(other.to_table("any"))


CONFIG = build_config(
    "quick",
    task="custom",
    search_prompts=3,
    select_prompts=2,
    report_prompts=1,
    max_new_tokens=10,
    temperature=0.9,
)


class Watch:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.total = self.done_units = 0
        self.notes: list[str] = []
        self.is_done = False

    def start(self, what: str, total: int) -> None:
        assert what == "rollout"
        self.total = total

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done_units += n
        self.notes += [note] if note else []

    def done(self) -> None:
        self.is_done = True


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("rollout")
    model, target = toys.save_rand(folder / "model", config_eos=[2, 7]), toys.rand()
    heads = save_for(random_heads(target, prefix=True), target, folder / "heads")
    data = write_prompts(folder / "data.jsonl", [f"t{n}" for n in range(10)], 6)
    engine = "lean" if can_pack() else "auto"
    return Inputs(str(model), str(heads), str(data), engine=engine)


def opened(inputs: Inputs, folder: Path) -> tuple[Run, Watch]:
    watch = Watch()
    return open_run(CONFIG, inputs, folder, progress=watch), watch


def test_every_split_is_recorded_whole_and_progress_counts_tokens(
    inputs: Inputs, tmp_path: Path
) -> None:
    run, watch = opened(inputs, tmp_path)
    with run.folder:
        rollout(run)
        lengths = {name: read_trace(run, name).lengths for name in run.splits}
        assert {name: len(found) for name, found in lengths.items()} == {
            "search": 3,
            "select": 2,
            "report": 1,
        }
        assert min(np.concatenate(list(lengths.values()))) < 10, "no text ended early"
        assert (watch.total, watch.done_units, watch.is_done) == (60, 60, True)
        assert watch.notes[-1] == "6 of 6 texts"
        before = run.folder.sha256(TRACE)
        rollout(run)
        assert (watch.done_units, run.folder.sha256(TRACE)) == (60, before)


class Interrupted(Exception):
    """As by a user."""


def test_an_interrupted_rollout_keeps_its_finished_texts_and_ends_as_if_uninterrupted(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MOST_SEQUENCES", 2)
    asked: list[int] = []

    def stopping(*arguments: Any) -> Iterator[tuple[int, Trace]]:
        asked.append(len(arguments[2]))
        for count, found in enumerate(traces(*arguments)):
            if count == 2:
                raise Interrupted
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(stage, "traces", stopping)
        for _ in range(2):
            run, _ = opened(inputs, tmp_path / "stopped")
            with run.folder, pytest.raises(Interrupted):
                rollout(run)
    assert asked == [6, 4]
    run, watch = opened(inputs, tmp_path / "stopped")
    with run.folder:
        rollout(run)
        assert watch.done_units == 60
        resumed = run.folder.read_table(TRACE, records.TRACE_SCHEMA)
    run, _ = opened(inputs, tmp_path / "whole")
    with run.folder:
        rollout(run)
        whole = run.folder.read_table(TRACE, records.TRACE_SCHEMA)
    assert resumed["token"].equals(whole["token"])
    assert resumed["ranks"].equals(whole["ranks"])
    if can_pack():
        assert resumed.equals(whole)
