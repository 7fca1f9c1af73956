"""The accepted path and the end of a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.acceptance import accept, accept_typical, truncate
from entmtp_calib.config import AcceptanceConfig

ROOT = 9


def test_no_match_under_the_root_accepts_nothing() -> None:
    assert accept([-1, 0, 0], [ROOT, 1, 2], [3, 0, 0]) == []
    assert accept([-1], [ROOT], [1]) == []


def test_the_path_follows_the_targets_choices() -> None:
    #          root  1  2  1>3  2>4  2>4>5
    parents = [-1, 0, 0, 1, 2, 4]
    tokens = [ROOT, 1, 2, 3, 4, 5]
    assert accept(parents, tokens, [2, 3, 4, 0, 5, 0]) == [2, 4, 5]
    assert accept(parents, tokens, [2, 3, 7, 0, 5, 0]) == [2]
    assert accept(parents, tokens, [1, 3, 4, 5, 5, 0]) == [1, 3]


def test_a_matching_token_under_another_parent_is_not_accepted() -> None:
    assert accept([-1, 0, 0, 2], [ROOT, 1, 2, 3], [1, 3, 3, 0]) == [1]


def test_of_equal_siblings_the_lowest_row_wins() -> None:
    assert accept([-1, 0, 0, 2], [ROOT, 1, 1, 5], [1, 5, 5, 0]) == [1]


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_longest_matching_path_is_accepted(seed: int) -> None:
    tree = random_tree(seed)
    random = np.random.default_rng(seed)
    paths = [(), *tree.paths]
    choices = random.integers(0, 4, len(paths)).tolist()
    tokens = [ROOT] + [path[-1] for path in tree.paths]  # siblings never share a token
    matching = [
        path
        for path in tree.paths
        if all(choices[paths.index(path[:i])] == path[i] for i in range(len(path)))
    ]
    longest = max(matching, key=len, default=())
    rows = accept(list(tree.parents), tokens, choices)
    assert [paths[row] for row in rows] == [longest[: i + 1] for i in range(len(longest))]


TYPICAL = AcceptanceConfig("typical", epsilon=0.2, alpha=0.5)


def test_a_token_is_typical_above_the_lower_of_both_thresholds() -> None:
    # The lower threshold: epsilon 0.2 at entropy 0, alpha / 10 = 0.05 at entropy ln 10.
    for prob, nats, kept in (
        *((0.21, 0.0, True), (0.2, 0.0, False), (0.19, 0.0, False)),
        *((0.051, np.log(10), True), (0.049, np.log(10), False)),
    ):
        rows = accept_typical([-1, 0], [1.0, prob], [0.0, nats], TYPICAL)
        assert rows == ([1] if kept else []), (prob, nats)


def test_the_longest_typical_path_wins_and_of_equal_ones_the_first_row() -> None:
    #          root  1    2    1>3  2>4  2>5
    parents = [-1, 0, 0, 1, 2, 2]
    flat = [0.0] * 6
    assert accept_typical(parents, [1.0, 0.9, 0.9, 0.1, 0.3, 0.9], flat, TYPICAL) == [2, 4]
    assert accept_typical(parents, [1.0, 0.3, 0.9, 0.3, 0.9, 0.9], flat, TYPICAL) == [1, 3]
    assert accept_typical(parents, [1.0, 0.3, 0.9, 0.1, 0.1, 0.1], flat, TYPICAL) == [1]
    assert accept_typical([-1], [1.0], [0.0], TYPICAL) == []


def test_a_typical_token_under_one_that_is_not_is_not_accepted() -> None:
    assert accept_typical([-1, 0, 1, 2], [1.0, 0.1, 0.9, 0.9], [0.0] * 4, TYPICAL) == []


def test_no_probability_is_above_a_threshold_of_one() -> None:
    never = AcceptanceConfig("typical", epsilon=1.0, alpha=1e9)
    assert accept_typical([-1, 0, 1], [1.0, 1.0, 1.0], [0.0] * 3, never) == []


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_typical_acceptance_is_the_rule_written_out(seed: int) -> None:
    tree, random = random_tree(seed), np.random.default_rng(seed)
    paths = [(), *tree.paths]
    probs, nats = random.random(len(paths)), random.exponential(1.0, len(paths))
    likely = {
        path
        for path, p, h in zip(paths, probs, nats, strict=True)
        if p > min(0.2, 0.5 * np.exp(-h))
    }
    accepted = [
        path for path in tree.paths if all(path[: i + 1] in likely for i in range(len(path)))
    ]
    longest = max(accepted, key=len, default=())
    rows = accept_typical(list(tree.parents), probs.tolist(), nats.tolist(), TYPICAL)
    assert [paths[row] for row in rows] == [longest[: i + 1] for i in range(len(longest))]


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_lower_thresholds_accept_at_least_as_much(seed: int) -> None:
    tree, random = random_tree(seed), np.random.default_rng(seed)
    size = tree.n_nodes + 1
    rows = list(tree.parents), random.random(size).tolist(), random.exponential(1.0, size).tolist()
    lower = AcceptanceConfig("typical", TYPICAL.epsilon / 2, TYPICAL.alpha / 3)
    assert len(accept_typical(*rows, lower)) >= len(accept_typical(*rows, TYPICAL))


@pytest.mark.parametrize(
    ("room", "kept", "reason"),
    [
        (60, [1, 2, 3, 4], "stop"),
        (5, [1, 2, 3, 4], "stop"),
        (4, [1, 2, 3, 4], "stop"),
        (3, [1, 2, 3], "length"),
        (2, [1, 2], "length"),
        (1, [1], "length"),
        (0, [], "length"),
    ],
)
def test_the_stop_token_counts_before_the_limit_and_nothing_after_either(
    room: int, kept: list[int], reason: str
) -> None:
    assert truncate([1, 2, 3, 4, 5], {4}, room) == (kept, reason)


def test_a_text_goes_on_while_there_is_room_and_no_stop_token() -> None:
    assert truncate([1, 2, 3], {7}, 4) == ([1, 2, 3], None)
    assert truncate([1, 2, 3], {7}, 3) == ([1, 2, 3], "length")


def test_the_first_of_several_stop_tokens_ends_the_text() -> None:
    assert truncate((1, 5, 2, 4), frozenset({4, 5}), 10) == ([1, 5], "stop")
    assert truncate([4], {4}, 1) == ([4], "stop")


def test_choices_off_the_accepted_path_are_never_looked_at() -> None:
    class OnlyPath(dict[int, int]):
        def __missing__(self, row: int) -> int:
            raise AssertionError(f"row {row} is off the path")

    parents, tokens = [-1, 0, 0, 1, 1, 2], [9, 5, 6, 7, 8, 7]
    assert accept(parents, tokens, OnlyPath({0: 5, 1: 8, 4: 1})) == [1, 4]
