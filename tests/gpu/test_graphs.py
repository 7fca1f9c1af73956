"""Recorded steps on a CUDA device: the ordinary path's numbers and text, one wait per step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import toys
from toy_heads import random_heads, save_for

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import EntmtpWarning
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.heads.native import load_heads
from entmtp_calib.policy import DRAFT_ON, Ladder, Policy, Staged, Static
from entmtp_calib.sampling import noisy_scores
from entmtp_calib.signals import SignalSpec
from entmtp_calib.targets.graphed import GraphedEngine
from entmtp_calib.targets.graphs import CudaGraphs
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY, Tree, chain

PROMPT = [3, 1, 4, 1, 5]
TREES = [EMPTY, chain(2), Tree.of([(0,), (1,), (1, 0), (0, 2), (0, 2, 1)]), Tree.of([(1,), (0,)])]
LADDER = Ladder(SignalSpec("path_value", 2), (0.1, 0.3), (0, 1, 2))
STAGED = Staged(((), (0.4,), (0.2,)), ((DRAFT_ON,), (0, DRAFT_ON), (2, 3)))
CHOOSERS: list[Policy] = [*map(Static, range(len(TREES))), LADDER, STAGED]
DTYPES = ["float32", "float16", "bfloat16"]
NEAR = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.6}
"""Logits (which span about 10 here) that rounding of this type may bring into another order."""


@dataclass(frozen=True)
class Pair:
    """The same weights in two engines, each with heads of its own."""

    plain: Target
    plain_heads: Heads
    graphed: Target
    graphed_heads: Heads


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pair(dtype: str, tmp_path: Path) -> Pair:
    folder = toys.save_rand(tmp_path / "model")
    plain = load_target(folder, device="cuda", dtype=dtype, engine="transformers")
    graphed = load_target(folder, device="cuda", dtype=dtype)
    assert graphed.engine == "graphed"
    heads = save_for(random_heads(toys.rand(), prefix=True), plain, tmp_path / "heads")
    return Pair(plain, load_heads(heads, plain), graphed, load_heads(heads, graphed))


def test_replays_give_the_ordinary_logits_at_every_length(pair: Pair, dtype: str) -> None:
    ids = [(7 * i) % 10 for i in range(60)]
    tree = (torch.tensor(values, device="cuda") for values in ([2, 6, 5], [0, 1, 1]))
    tokens, depths = tree
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device="cuda")
    for length in (1, 7, 60):
        logits = []
        for target in (pair.plain, pair.graphed):
            cache = target.new_cache(70)
            target.forward(ids[:length], range(length), cache)
            cache.commit(range(length))
            logits.append(target.verify(tokens, depths, cache, mask).logits.clone())
        assert (logits[0] - logits[1]).abs().max() < NEAR[dtype], length


def test_recorded_heads_draft_and_follow_like_the_ordinary_ones(pair: Pair, dtype: str) -> None:
    hidden = torch.randn(12, 32, device="cuda", dtype=pair.plain.dtype)
    states = HeadState(), HeadState()
    for start, end in ((0, 8), (8, 9), (9, 12)):
        positions = torch.arange(start, end, device="cuda")
        for heads, state in zip((pair.plain_heads, pair.graphed_heads), states, strict=True):
            heads.observe(state, hidden[start:end], positions)
        difference = (states[0].vector - states[1].vector).abs().max()
        assert difference < NEAR[dtype]
    paths = torch.tensor([[1, 2], [3, 4]], device="cuda")
    _, expected = pair.plain_heads.draft_level(2, states[0].vector, paths)
    _, found = pair.graphed_heads.draft_level(2, states[0].vector, paths)
    assert (expected - found).abs().max() < NEAR[dtype]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, seed=3)], ids=str)
def test_texts_differ_at_near_ties_only(
    pair: Pair, dtype: str, sampling: SamplingConfig, record_property: Callable[[str, object], None]
) -> None:
    """A device cannot give the same bits for one row and for many: flips are counted and gauged."""
    gaps = []
    plain = Decoder(pair.plain, None, [EMPTY], sampling)
    for number in range(4):
        prompt = [*PROMPT, number]
        expected = plain.generate(prompt, Static(0), 100).tokens
        for target, heads in (
            (pair.plain, pair.plain_heads),
            (pair.graphed, pair.graphed_heads),
        ):
            decoder = Decoder(target, heads, TREES, sampling)
            for chooser in CHOOSERS:
                found = decoder.generate(prompt, chooser, 100).tokens
                assert len(found) == 100
                if found != expected:
                    gaps.append(gap(pair.plain, prompt, expected, found, sampling))
    texts, largest = 4 * 2 * len(CHOOSERS), max(gaps, default=0.0)
    record_property("flips", f"{len(gaps)} of {texts} texts, gaps up to {largest:.3g}")
    print(f"{dtype}: {len(gaps)} of {texts} texts flip, at gaps up to {largest:.3g}")
    assert largest < NEAR[dtype]


def gap(
    target: Target,
    prompt: list[int],
    expected: list[int],
    found: list[int],
    sampling: SamplingConfig,
) -> float:
    """How far plain decoding's token is ahead where two texts part."""
    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    ids = [*prompt, *expected[:at]]
    hidden = target.forward(ids, range(len(ids)), target.new_cache(len(ids)))
    logits = target.logits(hidden[-1:])
    if sampling.temperature:
        logits = noisy_scores(logits, [len(ids)], sampling)
    return abs(float(logits[0, expected[at]] - logits[0, found[at]]))


@contextmanager
def waits() -> Iterator[list[str]]:
    """What waited for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    seen: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield seen
        seen += [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, seed=3)], ids=str)
@pytest.mark.parametrize(
    ("chooser", "most"), [(Static(0), 1), (Static(2), 1), (LADDER, 2), (STAGED, 3)], ids=str
)
def test_a_step_waits_once_and_once_more_per_look_at_a_signal(
    pair: Pair, sampling: SamplingConfig, chooser: Policy, most: int
) -> None:
    decoder = Decoder(pair.graphed, pair.graphed_heads, TREES, sampling)
    decoder.generate(PROMPT, chooser, 30)
    state = decoder.start(PROMPT, chooser, 30)
    counts = []
    while len(state.tokens) < 20:
        with waits() as seen:
            state.step()
        counts.append(len(seen))
    assert min(counts) >= 1
    assert max(counts) <= most, counts


def test_a_capture_that_fails_leaves_the_ordinary_text(tmp_path: Path) -> None:
    class Reading(GraphedEngine):
        """It looks at the device in the middle of a pass, which no graph can hold."""

        def _attention_mask(self, allowed: torch.Tensor) -> torch.Tensor:
            assert bool(allowed.any())
            return super()._attention_mask(allowed)

    plain = load_target(toys.save_rand(tmp_path), device="cuda", engine="transformers")
    expected = Decoder(plain, None, [EMPTY]).generate(PROMPT, Static(0), 40).tokens
    engine = Reading(plain.model, CudaGraphs(plain.device))
    target = Target(engine, plain.tokenizer, plain.facts)
    with pytest.warns(EntmtpWarning, match="the target runs without CUDA graphs"):
        found = Decoder(target, None, [EMPTY]).generate(PROMPT, Static(0), 40).tokens
    assert found == expected


def test_a_text_longer_than_the_smallest_size_of_columns_goes_on(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path, max_position_embeddings=2048)
    texts = []
    for engine in ("transformers", "graphed"):
        target = load_target(folder, device="cuda", dtype="float32", engine=engine)
        decoder = Decoder(target, None, [EMPTY])
        texts.append(decoder.generate([1] * 600, Static(0), 80).tokens)
    assert texts[0] == texts[1]
