"""Recorded passes on a stand-in for CUDA graphs: static shapes write the same text."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import tape
import torch
import toys
from test_lossless import random_tree
from toy_heads import random_heads
from transformers import Qwen2Config, Qwen2ForCausalLM

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.dynamic import Dynamic
from entmtp_calib.errors import EntmtpWarning, ModelError
from entmtp_calib.heads.model import Heads
from entmtp_calib.policy import DRAFT_ON, Ladder, Policy, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.targets.graphed import GraphedEngine
from entmtp_calib.targets.graphs import Sizes, Slots
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.selfcheck import self_check
from entmtp_calib.tree import EMPTY, Tree, chain

PROMPT = [3, 1, 4, 1, 5]
TREES = [EMPTY, chain(2), Tree.of([(0,), (1,), (1, 0), (0, 2), (0, 2, 1)]), Tree.of([(1,), (0,)])]
SIZES = Sizes(first=16, margin=8)
POLICIES: list[Policy] = [
    Ladder(SignalSpec("path_value", 2), (0.1, 0.3), (0, 1, 2)),
    Ladder(SignalSpec("entropy", running=True), (-1.0,), (0, 3)),
    Staged(((), (0.4,), (0.2,)), ((DRAFT_ON,), (0, DRAFT_ON), (2, 3))),
]


def graphed(target: Target, record: tape.Recorder | None = None) -> Target:
    """The same target, its steps recorded."""
    engine = GraphedEngine(target.model, record or tape.Recorder(), SIZES)
    return Target(engine, target.tokenizer, target.facts)


def recorded(heads: Heads, record: tape.Recorder) -> Heads:
    heads.record(record, SIZES)
    return heads


def text(target: Target, chooser: Policy | Dynamic, n: int = 40, **options: object) -> list[int]:
    heads = random_heads(target, prefix=True)
    return Decoder(target, heads, TREES, **options).generate(PROMPT, chooser, n).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(), SamplingConfig(0.8, top_p=0.9, seed=3)], ids=str
)
@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_trees_policies_and_built_trees_write_the_ordinary_text(
    sampling: SamplingConfig, kind: str
) -> None:
    """40 tokens cross two sizes of columns, and every number of rows is met at several lengths."""
    plain, record = toys.rand(), tape.Recorder()
    target = graphed(plain, record)
    expected = Decoder(plain, None, [EMPTY], sampling).generate(PROMPT, Static(0), 40).tokens
    heads = recorded(random_heads(plain, kind, prefix=kind == "hydra"), record)
    trees = [*TREES, random_tree(random.Random(1), 12, 3, 8)]
    decoder = Decoder(target, heads, trees, sampling)
    choosers = [*map(Static, range(len(trees))), *POLICIES, Dynamic(3, 6, 3)]
    for chooser in choosers:
        assert decoder.generate(PROMPT, chooser, 40).tokens == expected, chooser
    assert record.replayed > 40 * len(choosers) / 4


def test_the_records_of_a_step_are_those_of_the_ordinary_path() -> None:
    plain = toys.rand()
    for policy in POLICIES:
        pair = []
        for target in (plain, graphed(plain)):
            heads = random_heads(plain, prefix=True)
            if target is not plain:
                heads.record(target.recorder, SIZES)
            steps = Decoder(target, heads, TREES).generate(PROMPT, policy, 40).steps
            pair.append([(s.tree, s.rows, s.levels, s.accepted_draft_tokens) for s in steps])
            signals = [s.signal for s in steps if s.signal is not None]
            pair.append(pytest.approx(signals, rel=1e-3))
        assert pair[0] == pair[2]
        assert pair[1].expected == pair[3]


def test_a_second_text_and_another_tree_of_as_many_rows_record_nothing_new() -> None:
    record = tape.Recorder()
    target = graphed(toys.rand(), record)
    first = text(target, Static(2))
    recorded_once = record.recorded
    assert text(target, Static(2)) == first
    assert record.recorded == recorded_once == 2 * 3  # plain and tree, three sizes of columns
    trees = [Tree.of([(0,), (1,), (2,), (3,), (4,)])]
    heads = random_heads(target, prefix=True)
    assert Decoder(target, heads, trees).generate(PROMPT, Static(0), 40).tokens == first
    assert record.recorded == recorded_once


def test_all_that_a_text_needs_is_recorded_before_its_prompt_is_passed() -> None:
    record = tape.Recorder()
    target = graphed(toys.rand(), record)
    heads = recorded(random_heads(target, prefix=True), record)
    for policy in [*POLICIES, Static(2)]:
        state = Decoder(target, heads, TREES).start(PROMPT, policy, 40)
        before = record.recorded
        while state.reason is None:
            state.step()
        assert record.recorded == before


def test_texts_that_are_written_side_by_side_do_not_meet() -> None:
    target = graphed(toys.rand())
    decoder = Decoder(target, random_heads(target, prefix=True), TREES)
    prompts = [PROMPT, [7, 7, 2], [0, 9, 8, 7, 6, 5]]
    expected = [decoder.generate(ids, Static(2), 30).tokens for ids in prompts]
    states = [decoder.start(ids, Static(2), 30) for ids in prompts]
    while any(state.reason is None for state in states):
        for state in states:
            if state.reason is None:
                state.step()
    assert [state.tokens for state in states] == expected


def test_a_probe_leaves_no_mark() -> None:
    record = tape.Recorder()
    target = graphed(toys.rand(), record)
    heads = recorded(random_heads(target, prefix=True), record)
    decoder = Decoder(target, heads, TREES)
    reading = POLICIES[0]  # looks at the logits that the root was chosen from
    expected = decoder.generate(PROMPT, reading, 30)
    state = decoder.start(PROMPT, reading, 30)
    while state.reason is None:
        for policy in [*POLICIES, *map(Static, range(len(TREES)))]:
            state.probe(policy)
        state.step()
    assert state.tokens == expected.tokens
    assert [s.signal for s in state.steps] == [s.signal for s in expected.steps]


def test_a_cache_that_was_written_before_its_first_step_is_taken_over() -> None:
    plain = toys.rand()
    passes = []
    for target in (plain, graphed(plain)):
        cache = target.new_cache(40)
        target.forward(PROMPT, range(5), cache)
        cache.commit(range(5))
        tree = torch.tensor([2, 6, 5]), torch.tensor([0, 1, 1])
        mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        passes.append(target.verify(*tree, cache, mask))
    torch.testing.assert_close(passes[0].hidden, passes[1].hidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(passes[0].logits, passes[1].logits, atol=1e-4, rtol=1e-4)
    assert passes[0].report.tolist() == passes[1].report.tolist()


def test_numbers_that_are_not_finite_do_not_outlive_their_text() -> None:
    target = graphed(toys.rand())
    expected = text(target, Static(2), 20)
    decoder = Decoder(target, random_heads(target, prefix=True), TREES)
    state = decoder.start(PROMPT, Static(2), 20)
    state.cache._store[:] = torch.nan  # type: ignore[index]
    with pytest.raises(ModelError, match="not finite"):
        state.step()
    del state
    assert text(target, Static(2), 20) == expected


def test_where_recording_fails_the_text_is_the_same_and_one_warning_says_so() -> None:
    plain = toys.rand()
    expected = text(plain, Static(2))
    target = Target(GraphedEngine(plain.model, tape.broken), plain.tokenizer, plain.facts)
    with pytest.warns(EntmtpWarning, match=r"the target runs without CUDA graphs, slower \(oper"):
        assert text(target, Static(2)) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(target, POLICIES[0]) == expected


def test_where_there_is_no_memory_for_a_slot_passes_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, target = text(toys.rand(), Static(2)), graphed(toys.rand())

    def lend(self: Slots, *arguments: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(Slots, "lend", lend)
    with pytest.warns(EntmtpWarning, match=r"slower \(out of memory\)"):
        assert text(target, Static(2)) == expected


@pytest.mark.parametrize("layers", [["sliding_attention"], ["sliding_attention", "full_attention"]])
def test_sliding_layers_see_their_window(layers: list[str]) -> None:
    """Of 8 positions, far below the sizes of columns."""
    config = Qwen2Config(
        vocab_size=10,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=(2 * layers)[:2],
    )
    torch.manual_seed(0)
    model, toy = Qwen2ForCausalLM(config).eval().requires_grad_(False), toys.rand()
    engine = GraphedEngine(model, tape.Recorder(), SIZES)
    targets = [Target(e, toy.tokenizer, toy.facts) for e in (TransformersEngine(model), engine)]
    plain, found = (text(target, Static(2)) for target in targets)
    assert plain == found
    model.config.sliding_window = 64
    assert text(Target(TransformersEngine(model), toy.tokenizer, toy.facts), Static(2)) != plain


def test_work_that_reads_a_tensor_on_the_host_cannot_be_recorded() -> None:
    """Otherwise these tests would not see what CUDA refuses."""
    value = torch.ones(3)
    with pytest.raises(RuntimeError, match="the host reads"):
        tape.Recorder()(lambda: value * float(value.sum()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_self_check_runs_the_recorded_passes(dtype: str, tmp_path: Path) -> None:
    model = load_target(toys.save_rand(tmp_path), dtype=dtype, engine="transformers").model
    record = tape.Recorder()
    self_check(GraphedEngine(model, record, SIZES), model)
    assert record.replayed == 2


def test_the_self_check_finds_a_mask_that_is_not_the_trees() -> None:
    class Faulty(GraphedEngine):
        def _attention_mask(self, allowed: torch.Tensor) -> torch.Tensor:
            return super()._attention_mask(torch.ones_like(allowed))

    model = toys.rand().model
    with pytest.raises(ModelError, match="graphed engine"):
        self_check(Faulty(model, tape.Recorder(), SIZES), model)


def test_without_cuda_the_engine_is_refused_and_never_chosen(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path)
    assert load_target(folder).engine == "transformers"
    with pytest.raises(ModelError, match="graphed engine cannot run this model: it runs on cuda"):
        load_target(folder, device="cpu", engine="graphed")
