"""The accepted path and the end of a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import random_tree

from entmtp_calib.acceptance import accept, truncate

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
