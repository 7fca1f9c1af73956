"""Drafting: as far as the policy asks and its tree needs, and no level twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import toys
from toy_heads import random_heads

from entmtp_calib.decoding import Decoder
from entmtp_calib.drafting import Draft, Scheme, Start
from entmtp_calib.errors import TreeError
from entmtp_calib.heads.model import Heads
from entmtp_calib.plan import Plan
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.signals import SignalSpec
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, Tree, chain

PROMPT = (2, 7, 1, 8, 2, 8)
SIDE = Tree.of([(1,), (3,), (1, 0), (3, 2), (3, 2, 1)])
TREES = [EMPTY, chain(1), SIDE, Tree.of([(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0)])]
LOOKING: list[Policy] = [
    Ladder(SignalSpec("chain_value", 2), (0.1, 0.2), (0, 1, 3)),
    Hysteresis(SignalSpec("path_value", 1), 1, 2, 0.25, 0.2),
    Staged(((), (0.4,), (0.2,)), ((DRAFT_ON,), (0, DRAFT_ON), (2, 3))),
]


@contextmanager
def counted(heads: Heads) -> Iterator[list[tuple[int, int]]]:
    """(depth, parents) of every level that is drafted."""
    calls: list[tuple[int, int]] = []
    original = heads.draft_level

    def counting(depth: int, vector: torch.Tensor, paths: torch.Tensor, n_probs: int):  # type: ignore[no-untyped-def]
        calls.append((depth, len(paths)))
        return original(depth, vector, paths, n_probs)

    heads.draft_level = counting  # type: ignore[method-assign]
    yield calls
    del heads.draft_level


def parents(tree: Tree, depth: int) -> int:
    return len({path[:-1] for path in tree.paths if len(path) == depth})


@pytest.mark.parametrize("policy", [*LOOKING, Static(0), Static(3)], ids=str)
def test_every_level_is_drafted_once_for_all_trees_while_looking_and_then_for_one(
    policy: Policy,
) -> None:
    target = toys.rand()
    heads = random_heads(target)
    decoder = Decoder(target, heads, TREES)
    scheme = decoder.scheme(policy)
    with counted(heads) as calls:
        steps = decoder.generate(PROMPT, policy, 30).steps
    expected = []
    for step in steps:
        if step.rows:
            tree = TREES[step.tree]
            for depth in range(1, max(step.levels, tree.depth) + 1):
                source = scheme.together.tree if depth <= step.levels else tree
                expected.append((depth, parents(source, depth)))
    assert calls == expected


def test_nothing_is_drafted_for_signals_of_the_target_and_plain_steps() -> None:
    target = toys.rand()
    heads = random_heads(target)
    decoder = Decoder(target, heads, TREES)
    for spec in (SignalSpec("entropy"), SignalSpec("base_top1", running=True)):
        with counted(heads) as calls:
            generated = decoder.generate(PROMPT, Ladder(spec, (9.0,), (0, 3)), 10)
        assert calls == []
        assert {step.levels for step in generated.steps} == {0}


@pytest.mark.parametrize("policy", LOOKING, ids=str)
@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_a_trees_tokens_are_the_same_however_far_was_looked(policy: Policy, kind: str) -> None:
    target = toys.rand()
    heads = random_heads(target, kind)
    plans = [Plan(compile_tree(tree), torch.device("cpu")) for tree in TREES]
    scheme = Scheme(policy, plans, heads)
    vector = torch.randn(target.hidden_size, generator=torch.Generator().manual_seed(1))
    start = Start(5, torch.zeros(target.vocab_size), vector, room=9)
    for index in policy.indices:
        alone = Draft(Scheme(Static(index), plans, heads), start).tokens(plans[index])
        for levels in range(scheme.together.tree.depth + 1):
            draft = Draft(scheme, start)
            draft.draft_to(levels)
            assert draft.levels == levels
            assert draft.tokens(plans[index]).tolist() == alone.tolist()


def test_the_chains_probabilities_are_those_of_the_greedy_path() -> None:
    target = toys.rand()
    heads = random_heads(target)
    plans = [Plan(compile_tree(tree), torch.device("cpu")) for tree in TREES]
    vector = torch.randn(target.hidden_size, generator=torch.Generator().manual_seed(2))
    start = Start(5, torch.zeros(target.vocab_size), vector, room=9)
    # The side tree has no node on the chain, so the chain is drafted beside it.
    policy = Ladder(SignalSpec("chain_value", 3), (0.5,), (0, 2))
    draft = Draft(Scheme(policy, plans, heads), start)
    draft.draft_to(2)
    draft.draft_to(1)
    draft.draft_to(3)
    path, expected = [5], []
    for depth in range(1, 4):
        ids, probs = heads.draft_level(depth, vector, torch.tensor([path]))
        expected.append(float(probs[0, 0]))
        path.append(int(ids[0, 0]))
    assert draft.chain_probs == pytest.approx(expected)


def test_probabilities_are_made_of_the_chain_alone_and_only_while_looking() -> None:
    target = toys.rand()
    heads = random_heads(target)
    plans = [Plan(compile_tree(tree), torch.device("cpu")) for tree in TREES]
    asked: list[int] = []
    original = heads.draft_level

    def asking(depth: int, vector: torch.Tensor, paths: torch.Tensor, n_probs: int):  # type: ignore[no-untyped-def]
        asked.append(n_probs)
        return original(depth, vector, paths, n_probs)

    heads.draft_level = asking  # type: ignore[method-assign]
    start = Start(5, torch.zeros(target.vocab_size), torch.randn(target.hidden_size), room=9)
    draft = Draft(Scheme(LOOKING[0], plans, heads), start)
    draft.draft_to(2)
    draft.tokens(plans[3])
    assert asked == [1, 1, 0]


def test_a_policy_cannot_look_deeper_than_the_heads() -> None:
    target = toys.rand()
    decoder = Decoder(target, random_heads(target, n_heads=2), [EMPTY, chain(2)])
    with pytest.raises(TreeError, match="depth 3, and there are 2 heads"):
        decoder.generate(PROMPT, Ladder(SignalSpec("chain_value", 3), (0.5,), (0, 1)), 5)
    headless = Decoder(target, None, [EMPTY])
    with pytest.raises(TreeError, match="there are 0 heads"):
        headless.generate(PROMPT, Ladder(SignalSpec("chain_value", 1), (), (0,)), 5)
    assert headless.generate(PROMPT, Ladder(SignalSpec("entropy"), (), (0,)), 5).steps


def test_a_policys_lookups_are_built_once() -> None:
    target = toys.rand()
    decoder = Decoder(target, random_heads(target), TREES)
    assert decoder.scheme(LOOKING[0]) is decoder.scheme(LOOKING[0])
