"""Acceptance per pass, counted by hand, and Model Optimizer's document of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import random_trace, random_tree, trace_of

from entmtp_calib.errors import DataError
from entmtp_calib.formats.profile import Profile, speculation_profile
from entmtp_calib.tree import Tree, chain

# Passes at rows 0 and 2 of the first text, which ends with a token of its own; at 0 of the second.
TEXTS = [
    [[0, 1], [-1, -1], [0, -1], [-1, -1], [-1, -1]],
    [[0, 0], [0, -1], [-1, -1]],
]


def test_a_profile_counts_the_passes_of_a_tree_and_no_terminal_step() -> None:
    profile = Profile.of(trace_of(TEXTS), chain(2))
    assert profile.reached == (3, 3, 1)
    assert profile.marginal == [1.0, 1 / 3]
    assert profile.conditional == [1.0, 1 / 3]
    assert profile.histogram == {2: 2, 3: 1}
    assert profile.mean_emitted == pytest.approx(7 / 3)
    assert profile.mean_per_request == pytest.approx((4 / 2 + 3 / 1) / 2)


def test_a_depth_that_nothing_reaches_has_rate_0_everywhere() -> None:
    profile = Profile.of(trace_of([[[-1, -1], [-1, -1]]]), chain(2))
    assert (profile.conditional, profile.marginal) == ([0.0, 0.0], [0.0, 0.0])
    assert profile.histogram == {1: 1}


def test_texts_without_a_pass_have_no_profile() -> None:
    with pytest.raises(DataError, match="two or more tokens"):
        Profile.of(trace_of([[[-1, -1]]]), chain(2))


@given(st.integers(0, 10_000))
def test_the_mean_is_one_and_the_marginal_rates_which_never_rise(seed: int) -> None:
    trace, tree = random_trace(seed, max_length=9), random_tree(seed)
    if trace.terminal.all():
        return
    profile = Profile.of(trace, tree)
    assert profile.mean_emitted == pytest.approx(1 + sum(profile.marginal))
    assert profile.marginal == sorted(profile.marginal, reverse=True)
    histogram = profile.histogram
    assert sum(histogram.values()) == profile.passes
    assert sum(n * count for n, count in histogram.items()) == sum(profile.reached)


def test_the_document_has_the_draft_schemas_keys_and_figures() -> None:
    profile = Profile.of(trace_of(TEXTS), Tree.of([[0], [0, 0]]))
    document = json.loads(speculation_profile(profile, "hydra", "target", "heads", {"split": "x"}))
    assert document["schema_version"] == "1.0"
    assert (document["method"], document["num_speculative_tokens"]) == ("hydra", 2)
    assert document["marginal_accept_rates"] == [1.0, 0.333333]
    assert document["conditional_accept_rates"] == [1.0, 0.333333]
    assert document["mean_accept_length"] == 2.333333
    assert document["acceptance_length_histogram"] == {"2": 2, "3": 1}
    assert document["measurement_conditions"] == {"split": "x"}
    assert document["accept_length_by_k"] == {"2": 2.333333}
