"""Splits: disjoint, seeded, and blind to the order of the file."""

from __future__ import annotations

import random

import pytest

from entmtp_calib.errors import DataError, UsageError
from entmtp_calib.prompts import Prompt, Splits, split

PROMPTS = tuple(Prompt(str(n), (("user", f"prompt {n}"),)) for n in range(30))


def parts(splits: Splits) -> list[list[str]]:
    return [[p.id for p in part] for part in (splits.search, splits.select, splits.report)]


def test_splits_have_the_sizes_asked_for_and_share_nothing() -> None:
    search, select, report = parts(split(PROMPTS, (10, 7, 13), seed=1))
    assert (len(search), len(select), len(report)) == (10, 7, 13)
    assert len({*search, *select, *report}) == 30


def test_the_order_of_the_file_does_not_matter_and_the_seed_does() -> None:
    shuffled = list(PROMPTS)
    random.Random(3).shuffle(shuffled)
    assert split(PROMPTS, (9, 9, 9), seed=1) == split(shuffled, (9, 9, 9), seed=1)
    assert split(PROMPTS, (9, 9, 9), seed=1) != split(PROMPTS, (9, 9, 9), seed=2)


def test_white_space_neither_moves_a_prompt_nor_doubles_it() -> None:
    spaced = [Prompt(p.id, (("user", p.messages[0][1].replace(" ", " \n ")),)) for p in PROMPTS]
    assert parts(split(spaced, (9, 9, 9), seed=1)) == parts(split(PROMPTS, (9, 9, 9), seed=1))
    both = split([*PROMPTS, *spaced], (10, 10, 10), seed=1)
    assert len({i for part in parts(both) for i in part}) == 30


def test_a_split_may_be_empty_but_not_negative() -> None:
    assert parts(split(PROMPTS, (0, 5, 0), seed=1))[0] == []
    with pytest.raises(UsageError):
        split(PROMPTS, (5, -1, 5), seed=1)


def test_too_few_prompts_is_an_error_with_all_numbers() -> None:
    with pytest.raises(DataError) as caught:
        split(PROMPTS, (20, 10, 5), seed=1)
    for fact in ["30 distinct", "35", "20 search", "10 select", "5 report", "--data"]:
        assert fact in str(caught.value)
