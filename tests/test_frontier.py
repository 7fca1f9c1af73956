"""The strict Pareto set."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp_calib.frontier import strict_pareto


def test_an_entry_must_beat_every_smaller_one() -> None:
    assert strict_pareto([0, 1, 2, 3], [1.0, 3.0, 2.0, 4.0]) == [0, 1, 3]


def test_an_equal_value_at_a_larger_size_is_dropped() -> None:
    assert strict_pareto([1, 2], [3.0, 3.0]) == [0]


def test_of_equal_sizes_the_larger_value_stays_and_of_full_ties_the_first() -> None:
    assert strict_pareto([1, 1, 1], [2.0, 5.0, 5.0]) == [1]


def test_the_order_of_the_input_does_not_matter() -> None:
    assert strict_pareto([3, 1, 2], [4.0, 1.0, 2.0]) == [1, 2, 0]


def test_values_that_are_not_finite_never_stay() -> None:
    assert strict_pareto([1, 2, 3, 4], [math.nan, math.inf, 1.0, -math.inf]) == [2]
    assert strict_pareto([], []) == []


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_exactly_the_entries_that_nothing_dominates_stay(entries: list[tuple[int, int]]) -> None:
    def is_dominated(index: int) -> bool:
        size, value = entries[index]
        return any(
            (other_size <= size and other_value > value)
            or (other_size < size and other_value == value)
            or (other_size == size and other_value == value and other < index)
            for other, (other_size, other_value) in enumerate(entries)
        )

    kept = strict_pareto([size for size, _ in entries], [value for _, value in entries])
    assert sorted(kept) == [i for i in range(len(entries)) if not is_dominated(i)]
