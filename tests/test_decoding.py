"""The loop's records: replay predicts them step by step, and probing leaves no mark."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import toys
from test_lossless import random_tree
from toy_heads import random_heads, saved_and_loaded

from entmtp_calib.config import AcceptanceConfig, SamplingConfig
from entmtp_calib.decoding import Decoder
from entmtp_calib.errors import DataError, ModelError, TreeError, UsageError
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.replay import accepted
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.rollout import traces
from entmtp_calib.targets.load import load_target
from entmtp_calib.tree import EMPTY, Tree, chain
from entmtp_calib.walks import NOT_CHOSEN, walk_policy

PROMPT = (2, 7, 1, 8, 2, 8)
TREES = [EMPTY, chain(1), chain(3), Tree.of([(0,), (1,), (3,), (0, 1), (1, 0), (1, 0, 2)])]
POLICIES: list[Policy] = [
    *(Static(i) for i in range(len(TREES))),
    Ladder(SignalSpec("chain_value", 1), (0.35, 0.5), (0, 1, 3)),
    Ladder(SignalSpec("path_value", 2), (0.07, 0.12), (0, 1, 3)),
    Ladder(SignalSpec("expected_accepted", 3), (0.6,), (1, 2)),
    Ladder(SignalSpec("entropy"), (-1.2,), (0, 3)),
    Ladder(SignalSpec("chain_value", 2, running=True), (0.16, 0.18), (0, 3, 1)),
    Ladder(SignalSpec("acceptance_average"), (0.3, 0.6), (0, 3, 2)),
    Hysteresis(SignalSpec("base_top1"), 1, 3, 0.6, 0.4),
    Hysteresis(SignalSpec("entropy", running=True), 0, 3, -1.1, -1.2),
    Hysteresis(SignalSpec("acceptance_average"), 1, 2, 0.6, 0.3),
    Staged(((), (0.4,), (0.18, 0.24)), ((DRAFT_ON,), (0, DRAFT_ON), (1, 3, 2))),
    Staged(((), (0.4, 0.6), ()), ((DRAFT_ON,), (DRAFT_ON, 1, DRAFT_ON), (3,))),
    Staged(((),), ((3,),)),
]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.9, seed=4)], ids=str)
@pytest.mark.parametrize("prefix", [False, True])
def test_replay_equals_live_decoding_step_by_step(
    sampling: SamplingConfig, prefix: bool, tmp_path
) -> None:
    target = toys.rand()
    heads = saved_and_loaded(random_heads(target, prefix=prefix), target, tmp_path)
    decoder = Decoder(target, heads, TREES, sampling)
    [(_, trace)] = traces(target, heads, {0: PROMPT}, 50, sampling)
    lengths = np.stack([accepted(tree, trace.ranks) for tree in TREES])
    speculates = np.array([tree.n_nodes > 0 for tree in TREES])
    for policy in POLICIES:
        live = decoder.generate(PROMPT, policy, 50)
        assert live.tokens == trace.token.tolist()
        replayed = walk_policy(trace, lengths, policy, speculates)
        at = np.flatnonzero(replayed.visited)
        assert [s.position - len(PROMPT) for s in live.steps] == at.tolist(), policy
        chosen = [s.tree if s.rows else NOT_CHOSEN for s in live.steps]
        assert chosen == replayed.chosen[at].tolist(), policy
        taken = [s.accepted_draft_tokens for s in live.steps]
        assert taken == replayed.accepted[at].tolist(), policy
        assert [s.levels for s in live.steps] == replayed.levels[at].tolist(), policy
        values = [np.nan if s.signal is None else s.signal for s in live.steps]
        assert values == pytest.approx(replayed.values[at].tolist(), rel=1e-4, nan_ok=True), policy


def test_the_policies_of_these_tests_use_all_of_their_trees_and_levels() -> None:
    """Otherwise the comparison with replay would say little."""
    target = toys.rand()
    decoder = Decoder(target, random_heads(target), TREES, SamplingConfig(0.9, seed=4))
    for policy in POLICIES:
        steps = decoder.generate(PROMPT, policy, 100).steps
        assert {step.tree for step in steps if step.rows} == set(policy.indices), policy
        if isinstance(policy, Staged):
            wanted = {d for d, actions in enumerate(policy.actions) if set(actions) - {DRAFT_ON}}
            assert {step.levels for step in steps if step.rows} == wanted


def test_step_records_add_up() -> None:
    target = toys.rand()
    generated = Decoder(target, random_heads(target), TREES).generate(PROMPT, Static(3), 41)
    steps = generated.steps
    assert sum(step.emitted_tokens for step in steps) == len(generated.tokens) == 41
    assert all(step.emitted_tokens == step.accepted_draft_tokens + 1 for step in steps)
    assert steps[0].position == len(PROMPT)
    for before, after in pairwise(steps):
        assert after.position == before.position + before.emitted_tokens
    assert {step.rows for step in steps} <= {7, 0}


def test_plain_decoding_emits_one_token_a_step() -> None:
    generated = Decoder(toys.rand(), None, [EMPTY]).generate(PROMPT, Static(0), 17)
    assert generated.mean_emitted_tokens == 1.0


def test_a_probe_leaves_no_mark() -> None:
    target = toys.rand()
    heads = random_heads(target, prefix=True)
    decoder = Decoder(target, heads, TREES)
    expected = decoder.generate(PROMPT, Static(2), 30)
    state = decoder.start(PROMPT, Static(2), 30)
    while state.reason is None:
        for policy in POLICIES:
            assert state.probe(policy).rows > 0 or len(state.tokens) == 29
        state.step()
    assert state.tokens == expected.tokens
    assert [s.accepted_draft_tokens for s in state.steps] == [
        s.accepted_draft_tokens for s in expected.steps
    ]


def test_a_probe_is_a_whole_step_where_the_text_would_end(tmp_path) -> None:
    root = Decoder(toys.rand(), None, [EMPTY]).generate(PROMPT, Static(0), 1).tokens[0]
    target = load_target(toys.save_rand(tmp_path, config_eos=root))
    state = Decoder(target, random_heads(target), TREES).start(PROMPT, Static(2), 30)
    assert [state.probe(Static(i)).rows for i in range(len(TREES))] == [1, 2, 4, 7]
    assert state.step() == [root]
    assert state.reason == "stop"


def test_tokens_are_handed_on_as_they_are_accepted() -> None:
    target = toys.rand()
    seen: list[list[int]] = []
    decoder = Decoder(target, random_heads(target), TREES)
    generated = decoder.generate(PROMPT, Static(3), 20, on_tokens=seen.append)
    assert [len(tokens) for tokens in seen] == [s.emitted_tokens for s in generated.steps]
    assert [token for tokens in seen for token in tokens] == generated.tokens


def test_a_tree_must_fit_the_heads() -> None:
    target = toys.rand()
    with pytest.raises(TreeError, match="depth 4, and there are 3 heads"):
        Decoder(target, random_heads(target), [chain(4)])
    with pytest.raises(TreeError, match=r"child rank 3.*below 3"):
        Decoder(target, random_heads(target, draft_ids=[1, 2, 3]), [Tree.of([(3,)])])
    with pytest.raises(TreeError, match="there are 0 heads"):
        Decoder(target, None, [chain(1)])


@pytest.mark.parametrize("length", [0, 128, 200])
def test_a_prompt_must_leave_a_position(length: int) -> None:
    with pytest.raises(DataError, match=f"a prompt of {length} tokens; expected 1 to 127"):
        Decoder(toys.rand(), None, [EMPTY]).generate([1] * length, Static(0), 5)


def test_logits_that_are_not_finite_stop_decoding(tmp_path) -> None:
    target = load_target(toys.save_rand(tmp_path), engine="transformers")
    target.model.lm_head.weight.data[3] = float("inf")
    with pytest.raises(ModelError, match="not finite"):
        Decoder(target, None, [EMPTY]).generate(PROMPT, Static(0), 5)


def test_random_trees_have_gaps_and_reordered_ranks() -> None:
    """The lossless tests lean on it: a generator of tidy trees would test less."""
    import random

    trees = [random_tree(random.Random(seed), 12, 3, 8) for seed in range(10)]
    assert any((1,) in t.paths and (0,) not in t.paths for t in trees)


SAMPLED = SamplingConfig(0.9, seed=4)
TREE = Static(3)


def typical(epsilon: float, alpha: float, sampling: SamplingConfig = SAMPLED) -> Decoder:
    target = toys.rand()
    rule = AcceptanceConfig("typical", epsilon, alpha)
    return Decoder(target, random_heads(target), TREES, sampling, rule)


def test_typical_acceptance_is_not_lossless_and_exact_is() -> None:
    target = toys.rand()
    plain = Decoder(target, None, [EMPTY], SAMPLED).generate(PROMPT, Static(0), 40)
    exact = Decoder(target, random_heads(target), TREES, SAMPLED, AcceptanceConfig("exact", 0, 0))
    assert exact.generate(PROMPT, TREE, 40).tokens == plain.tokens
    assert typical(0.09, 0.3).generate(PROMPT, TREE, 40).tokens != plain.tokens


def test_a_threshold_of_zero_accepts_every_step_in_full() -> None:
    steps = typical(0.0, 0.0).generate(PROMPT, Static(2), 40).steps  # a chain of 3
    assert [step.accepted_draft_tokens for step in steps] == [3] * 10


def test_a_threshold_of_one_accepts_nothing_and_leaves_the_plain_text() -> None:
    generated = typical(1.0, 1e9).generate(PROMPT, TREE, 20)
    plain = Decoder(toys.rand(), None, [EMPTY], SAMPLED).generate(PROMPT, Static(0), 20)
    assert generated.mean_emitted_tokens == 1.0
    assert generated.tokens == plain.tokens


def test_of_a_certain_distribution_both_rules_accept_the_same() -> None:
    certain = SamplingConfig(1.0, top_k=1)
    target = toys.rand()
    exact = Decoder(target, random_heads(target), TREES, certain).generate(PROMPT, TREE, 40)
    found = typical(0.09, 0.3, certain).generate(PROMPT, TREE, 40)
    assert found.tokens == exact.tokens
    assert [s.rows for s in found.steps] == [s.rows for s in exact.steps]


def test_every_typical_step_follows_the_rule() -> None:
    """The text so far, run plainly, says what each accepted token's probability was."""
    from entmtp_calib.sampling import log_probabilities

    target, generated = toys.rand(), typical(0.2, 0.5).generate(PROMPT, TREE, 40)
    ids = [*PROMPT, *generated.tokens]
    cache = target.new_cache(len(ids))
    logits = target.logits(target.forward(ids, range(len(ids)), cache))
    log_probs = log_probabilities(logits, SAMPLED)
    nats = -(log_probs.exp() * log_probs).sum(-1)
    drafted = 0
    for step in generated.steps:
        for at in range(step.position + 1, step.position + step.emitted_tokens):
            threshold = min(0.2, 0.5 * float((-nats[at - 1]).exp()))
            assert float(log_probs[at - 1, ids[at]].exp()) > threshold
            drafted += 1
    assert drafted > 5


def test_typical_acceptance_needs_a_temperature() -> None:
    with pytest.raises(UsageError, match="--temperature above 0"):
        typical(0.09, 0.3, SamplingConfig())


def test_a_cut_keeps_the_text_and_shortens_the_steps() -> None:
    decoder = Decoder(toys.rand(), random_heads(toys.rand()), TREES)
    whole = decoder.generate(PROMPT, TREE, 40)
    seen: list[int] = []

    def to_the_root(rows: list[int]) -> list[int]:
        seen.append(len(rows) - 1)
        return rows[:1]

    cut = decoder.generate(PROMPT, TREE, 40, cut=to_the_root)
    assert cut.tokens == whole.tokens
    assert cut.mean_emitted_tokens == 1.0
    assert max(seen) >= 1
    assert sum(seen) >= sum(step.accepted_draft_tokens for step in whole.steps)


def test_a_cut_sees_no_row_behind_the_end_of_the_text(tmp_path) -> None:
    from toy_heads import perfect_cycle_heads

    target = load_target(toys.save_cycle(tmp_path / "cycle", config_eos=4))
    decoder = Decoder(target, perfect_cycle_heads(target), [chain(4)])
    seen: list[list[int]] = []

    def drop_last(rows: list[int]) -> list[int]:
        seen.append(rows)
        return rows[: max(len(rows) - 1, 1)]

    generated = decoder.generate([0], Static(0), 30, cut=drop_last)
    assert seen == [[0, 1, 2, 3]]  # tokens 1 2 3 4, and 4 ends the text
    assert (generated.tokens, generated.reason) == ([1, 2, 3, 4], "stop")
    assert [step.emitted_tokens for step in generated.steps] == [3, 1]


def test_plain_decoding_spares_the_heads_and_a_policy_that_may_draft_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = toys.rand()
    heads = random_heads(target, prefix=True)
    calls = []
    observe = heads.observe
    monkeypatch.setattr(
        heads, "observe", lambda *arguments: (calls.append(1), observe(*arguments))[1]
    )
    decoder = Decoder(target, heads, TREES)
    plain = decoder.generate(PROMPT, Static(0), 20)
    assert not calls
    never = Ladder(SignalSpec("acceptance_average"), (1e9,), (0, 1))
    assert decoder.generate(PROMPT, never, 20).tokens == plain.tokens
    assert len(calls) == 20  # the prompt's pass, and every step but the last
