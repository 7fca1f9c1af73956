"""The promise: whatever tree and policy, the text is token for token that of plain decoding."""

from __future__ import annotations

import random

import pytest
import toys
from toy_heads import perfect_cycle_heads, random_heads

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Decoder, Generation
from entmtp_calib.dynamic import Dynamic
from entmtp_calib.heads.model import Heads
from entmtp_calib.policy import Hysteresis, Ladder, Policy, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY, Tree, chain

PROMPT = [3, 1, 4, 1, 5]
SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(1.0, seed=1),
    SamplingConfig(0.7, top_p=0.8, seed=2),
    SamplingConfig(1.5, top_k=4, seed=3),
]


def random_tree(rng: random.Random, n_nodes: int, max_depth: int, n_ranks: int) -> Tree:
    """Any prefix-closed tree: sibling ranks may have gaps, and need not be the lowest."""
    paths: list[tuple[int, ...]] = []
    for _ in range(n_nodes):
        parent = rng.choice([(), *[path for path in paths if len(path) < max_depth]])
        path = (*parent, rng.randrange(n_ranks))
        if path not in paths:
            paths.append(path)
    return Tree.of(paths)


def plain(target: Target, prompt: list[int], n: int, sampling: SamplingConfig) -> Generation:
    return Decoder(target, None, [EMPTY], sampling).generate(prompt, Static(0), n)


def heads_of_every_kind(target: Target) -> list[Heads]:
    return [
        random_heads(target, "hydra"),
        random_heads(target, "hydra", prefix=True, n_layers=3),
        random_heads(target, "hydra", draft_ids=[1, 2, 3, 5, 7, 8]),
        random_heads(target, "medusa", own_projection=True),
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_random_trees_change_nothing(sampling: SamplingConfig) -> None:
    target, rng = toys.rand(), random.Random(0)
    expected = plain(target, PROMPT, 30, sampling).tokens
    for heads in heads_of_every_kind(target):
        trees = [random_tree(rng, rng.randrange(1, 20), 3, heads.n_ranks) for _ in range(6)]
        decoder = Decoder(target, heads, trees, sampling)
        for index in range(len(trees)):
            generated = decoder.generate(PROMPT, Static(index), 30)
            assert generated.tokens == expected, trees[index]


def policies(n_trees: int) -> list[Policy]:
    signals = [
        SignalSpec("path_value", 2),
        SignalSpec("expected_accepted", 3),
        SignalSpec("entropy"),
        SignalSpec("base_top1"),
        SignalSpec("acceptance_average"),
    ]
    middles = [0.2, 0.3, -1.0, 0.6, 0.5]
    ladders = [
        Ladder(s, (m / 2, m) if m > 0 else (2 * m, m), (0, 1, n_trees - 1))
        for s, m in zip(signals, middles, strict=True)
    ]
    pairs = [
        Hysteresis(s, 0, n_trees - 1, m, m - 0.1) for s, m in zip(signals, middles, strict=True)
    ]
    return [*ladders, *pairs]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_dynamic_trees_change_nothing(sampling: SamplingConfig) -> None:
    target = toys.rand()
    expected = plain(target, PROMPT, 30, sampling).tokens
    accepted = 0
    for heads in heads_of_every_kind(target):
        decoder = Decoder(target, heads, [EMPTY], sampling)
        for dynamic in (Dynamic(1, 2, 3), Dynamic(3, 7, 3), Dynamic(6, 30, 2)):
            generated = decoder.generate(PROMPT, dynamic, 30)
            assert generated.tokens == expected, dynamic
            accepted += sum(step.accepted_draft_tokens for step in generated.steps)
    assert accepted > 0


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_policies_change_nothing(sampling: SamplingConfig) -> None:
    target = toys.rand()
    expected = plain(target, PROMPT, 40, sampling).tokens
    trees = [EMPTY, chain(2), Tree.of([(0,), (1,), (1, 0), (0, 2), (0, 2, 1)])]
    used = set()
    for heads in heads_of_every_kind(target)[:2]:
        decoder = Decoder(target, heads, trees, sampling)
        for policy in policies(len(trees)):
            generated = decoder.generate(PROMPT, policy, 40)
            assert generated.tokens == expected, policy
            used |= {step.tree for step in generated.steps}
    assert used >= {0, 1, 2}


def test_a_tree_of_the_whole_vocabulary_accepts_every_step_in_full() -> None:
    """FULL: any other number than 2 accepted drafts is an error of mask, position or cache."""
    target = toys.rand()
    heads = random_heads(target, n_heads=2)
    everything = Tree.of([(a,) for a in range(10)] + [(a, b) for a in range(10) for b in range(10)])
    generated = Decoder(target, heads, [everything]).generate(PROMPT, Static(0), 60)
    assert [step.accepted_draft_tokens for step in generated.steps] == [2] * 20
    assert generated.tokens == plain(target, PROMPT, 60, SamplingConfig()).tokens


@pytest.mark.parametrize(
    ("limit", "tokens", "reason"),
    [
        (60, [1, 2, 3, 4], "stop"),
        (5, [1, 2, 3, 4], "stop"),
        (4, [1, 2, 3, 4], "stop"),
        (3, [1, 2, 3], "length"),
        (2, [1, 2], "length"),
        (1, [1], "length"),
    ],
)
def test_a_block_ends_at_the_stop_token_or_the_limit(
    limit: int, tokens: list[int], reason: str, tmp_path
) -> None:
    from entmtp_calib.targets.load import load_target

    target = load_target(toys.save_cycle(tmp_path / "cycle", config_eos=4))
    decoder = Decoder(target, perfect_cycle_heads(target), [chain(4)])
    for _ in range(2):  # the second text must not see leftovers of the first
        generated = decoder.generate([0], Static(0), limit)
        assert (generated.tokens, generated.reason) == (tokens, reason)
        assert len(generated.steps) == 1
        assert generated.steps[0].accepted_draft_tokens == len(tokens) - 1
    alone = Decoder(target, None, [EMPTY]).generate([0], Static(0), limit)
    assert (alone.tokens, alone.reason) == (tokens, reason)


def test_perfect_heads_are_accepted_to_the_full_depth() -> None:
    target = toys.cycle()
    for depth in range(1, 5):
        decoder = Decoder(target, perfect_cycle_heads(target), [chain(depth)])
        generated = decoder.generate([0], Static(0), 10 * (depth + 1))
        assert {step.accepted_draft_tokens for step in generated.steps} == {depth}


def test_heads_that_are_always_wrong_accept_nothing() -> None:
    target = toys.cycle()
    decoder = Decoder(target, perfect_cycle_heads(target, shift=7), [chain(4)])
    generated = decoder.generate([0], Static(0), 30)
    assert {step.accepted_draft_tokens for step in generated.steps} == {0}
    assert generated.tokens == [(1 + i) % 64 for i in range(30)]


def test_text_stops_cleanly_at_the_last_position() -> None:
    target = toys.rand()
    heads = random_heads(target)
    room = 9
    prompt = [t % 10 for t in range(target.max_positions - room)]
    expected = plain(target, prompt, 100, SamplingConfig())
    assert (len(expected.tokens), expected.reason) == (room, "positions")
    for tree in (
        chain(3),
        Tree.of([(a, b) for a in range(4) for b in range(2)] + [(a,) for a in range(4)]),
    ):
        for chooser in (Static(0), Dynamic(3, 9, 3)):
            generated = Decoder(target, heads, [tree]).generate(prompt, chooser, 100)
            assert (generated.tokens, generated.reason) == (expected.tokens, "positions")
