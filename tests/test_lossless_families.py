"""The promise for every family: trees, policies and batches write what the model alone would write.

The models are small and random, with published configurations (`published_configs`). What is right
is computed by transformers' own forward over the whole text, without our cache or masks; texts are
longer than the sliding windows. Where that forward has no near-tie (`MARGIN`), a difference of
tokens is a fault and not rounding.

For another release of transformers, install it into a folder and let the folder come first:

    pip install --target FOLDER transformers==5.17.0
    PYTHONPATH=FOLDER pytest tests/targets tests/test_lossless.py tests/test_lossless_families.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import published_configs
import pytest
import tape
import torch
from published_configs import MODELS, VOCAB, WINDOW
from test_lossless import random_tree
from toy_heads import random_heads

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Chooser, Decoder, Generation
from entmtp_calib.dynamic import Dynamic
from entmtp_calib.policy import Ladder, Static
from entmtp_calib.sampling import noisy_scores
from entmtp_calib.signals import SignalSpec
from entmtp_calib.targets.graphed import GraphedEngine
from entmtp_calib.targets.graphs import Sizes
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.packed import can_pack
from entmtp_calib.targets.texts import plain_texts
from entmtp_calib.tree import EMPTY, Tree, chain

PROMPTS = [
    [(5 * i * i + 3 * i + 1) % VOCAB for i in range(20)],
    [3, 1, 4],
    [(7 * i + i * i) % VOCAB for i in range(15)],
]
N_TOKENS = 16
MARGIN = 1e-3  # a hundred times what float32 rounding does to these logits
SAMPLINGS = [SamplingConfig(), SamplingConfig(1.0, seed=1)]
EVERYTHING = Tree.of(
    [(a,) for a in range(VOCAB)] + [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
)
TREES = [EMPTY, EVERYTHING, chain(2), random_tree(random.Random(1), 14, 2, 8)]
ALL = Static(1)
CHOOSERS: list[Chooser] = [
    Static(3),
    Ladder(SignalSpec("entropy"), (-1.5, -0.5), (0, 2, 3)),
    Dynamic(3, 9, 2),
]
WINDOWED = [name for name, model in MODELS.items() if model.window == WINDOW]
LEAN = ["llama2", "llama3", "qwen2", "qwen3", "smollm2"]


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(name: str, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = published_configs.save(name, tmp_path_factory.mktemp("models") / name)
    return load_target(folder, engine="transformers")


def generate(
    target: Target, chooser: Chooser, sampling: SamplingConfig, prompt: Sequence[int]
) -> Generation:
    decoder = Decoder(target, random_heads(target, n_heads=2), TREES, sampling)
    return decoder.generate(prompt, chooser, N_TOKENS)


def plain(target: Target, sampling: SamplingConfig, prompt: Sequence[int]) -> list[int]:
    decoder = Decoder(target, None, [EMPTY], sampling)
    return decoder.generate(prompt, Static(0), N_TOKENS).tokens


def own_text(
    target: Target, sampling: SamplingConfig, prompt: Sequence[int], tokens: Sequence[int]
) -> list[int]:
    """What the model's own forward chooses at each position of a text, without near-ties."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    logits = target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
    positions = range(len(prompt), len(prompt) + len(tokens))
    scores = logits if sampling.temperature == 0 else noisy_scores(logits, positions, sampling)
    best = scores.topk(2)
    assert (best.values[:, 0] - best.values[:, 1]).min() > MARGIN, "a near-tie: take another seed"
    return best.indices[:, 0].tolist()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_every_tree_and_policy_writes_the_models_own_text(
    target: Target, sampling: SamplingConfig
) -> None:
    prompt = PROMPTS[0]
    expected = plain(target, sampling, prompt)
    assert len(set(expected)) >= 4, "one token again and again would prove little"
    assert own_text(target, sampling, prompt, expected) == expected
    for chooser in CHOOSERS:
        assert generate(target, chooser, sampling, prompt).tokens == expected, chooser
    generated = generate(target, ALL, sampling, prompt)
    assert generated.tokens == expected
    # The whole vocabulary twice: a draft that is not accepted is a fault of mask or position.
    assert [step.emitted_tokens for step in generated.steps] == [3, 3, 3, 3, 3, 1]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_texts_side_by_side_are_the_models_own(target: Target, sampling: SamplingConfig) -> None:
    texts = list(plain_texts(target, PROMPTS, N_TOKENS, sampling))
    assert sorted(text.prompt for text in texts) == [0, 1, 2]
    for text in texts:
        assert text.tokens == own_text(target, sampling, PROMPTS[text.prompt], text.tokens)


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWED, indirect=True)
def test_the_texts_are_long_enough_to_leave_the_sliding_windows(target: Target) -> None:
    config, ids = target.config.get_text_config(), torch.tensor([PROMPTS[0]])
    logits = target.model(input_ids=ids).logits
    assert config.sliding_window == WINDOW < len(PROMPTS[0])
    config.sliding_window = 1000
    try:
        whole = target.model(input_ids=ids).logits
    finally:
        config.sliding_window = WINDOW
    assert (whole - logits).abs().max() > 0.1


@pytest.mark.parametrize("name", ["mistral", "gemma2", "qwen2-window", "gpt-oss"])
def test_recorded_passes_keep_to_the_windows(name: str, tmp_path: Path) -> None:
    """Recorded by a stand-in for CUDA graphs; the text crosses two sizes of columns."""
    sampling, record = SAMPLINGS[1], tape.Recorder()
    plain_target = load_target(published_configs.save(name, tmp_path), engine="transformers")
    engine = GraphedEngine(plain_target.model, record, Sizes(first=16, margin=8))
    target = Target(engine, plain_target.tokenizer, plain_target.facts)
    expected = plain(plain_target, sampling, PROMPTS[0])
    assert plain(target, sampling, PROMPTS[0]) == expected
    assert generate(target, Static(3), sampling, PROMPTS[0]).tokens == expected
    assert record.replayed > N_TOKENS


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_tree_may_be_deeper_than_the_window(name: str, tmp_path: Path) -> None:
    """A window of 2 ends inside a branch whose rows do not follow each other."""
    target = load_target(published_configs.save(name, tmp_path, sliding_window=2))
    recorded = GraphedEngine(target.model, tape.Recorder(), Sizes(first=16, margin=8))
    parents = [-1, 0, 0, 2, 3, 4]  # below the root a leaf, and a chain of four
    tree = torch.tensor([[3, 1, 4, 1, 5, 9], [0, 1, 1, 2, 3, 4]])
    mask = torch.eye(6, dtype=torch.bool)
    for row, parent in enumerate(parents[1:], start=1):
        mask[row] |= mask[parent]
    chain_ids = [*PROMPTS[1], *tree[0, [0, 2, 3, 4, 5]].tolist()]
    expected = target.model(input_ids=torch.tensor([chain_ids])).logits[0, len(PROMPTS[1]) :]
    for one in (target, Target(recorded, target.tokenizer, target.facts)):
        cache = one.new_cache(20)
        one.forward(PROMPTS[1], range(3), cache)
        cache.commit(range(3))
        logits = one.verify(*tree, cache, mask).logits[[0, 2, 3, 4, 5]]
        assert (logits - expected).abs().max() < MARGIN


@pytest.mark.skipif(not can_pack(), reason="this torch has no FBGEMM kernels")
@pytest.mark.parametrize("name", LEAN)
def test_the_lean_engine_writes_its_own_plain_text(name: str, tmp_path: Path) -> None:
    target = load_target(published_configs.save(name, tmp_path), engine="lean")
    for sampling in SAMPLINGS:
        expected = plain(target, sampling, PROMPTS[0])
        for chooser in (ALL, *CHOOSERS):
            assert generate(target, chooser, sampling, PROMPTS[0]).tokens == expected, chooser
        (text,) = plain_texts(target, PROMPTS[:1], N_TOKENS, sampling)
        assert text.tokens == expected


def test_gemma_3_with_its_whole_vocabulary(tmp_path: Path) -> None:
    vocab = 262144
    target = load_target(published_configs.save("gemma3", tmp_path, vocab_size=vocab))
    assert target.vocab_size == vocab
    prompt = [(104729 * i) % vocab for i in range(15)]
    for sampling in SAMPLINGS:
        expected = plain(target, sampling, prompt)
        assert own_text(target, sampling, prompt, expected) == expected
        assert generate(target, Static(3), sampling, prompt).tokens == expected
