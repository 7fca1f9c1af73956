"""SGLang's numbers, its adaptive file and vLLM's schedule: the exact text, and what is refused."""

from __future__ import annotations

import json

import pytest

from entmtp_calib.formats.chains import (
    AdaptiveRule,
    SglangNumbers,
    adaptive_file,
    adaptive_steps,
    schedule_config,
    schedule_steps,
    synthetic_config,
)


def test_sglangs_numbers_are_flags_and_read_back() -> None:
    numbers = SglangNumbers(steps=3, topk=2, draft_tokens=6)
    flags = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6"
    assert numbers.flags() == flags
    assert SglangNumbers.parse(f"serve --model m {flags.replace(' 3', '=3')} --port 1") == numbers
    assert SglangNumbers.parse(flags.rsplit(" ", 2)[0]) is None


def test_eagle_drafts_one_level_more_than_its_depth_and_counts_the_root() -> None:
    assert SglangNumbers(4, 10, 25).eagle == {"total_token": 25, "depth": 3, "top_k": 10}


@pytest.mark.parametrize("numbers", [(0, 1, 1), (2, 0, 3), (3, 1, 3), (3, 1, 5), (2, 2, 6)])
def test_numbers_that_sglang_refuses_or_changes_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="SglangNumbers"):
        SglangNumbers(*numbers)


def test_an_adaptive_file_has_the_documented_keys_for_old_and_new_releases() -> None:
    document = json.loads(adaptive_file([1, 3], AdaptiveRule()))
    assert document == {
        "candidate_steps": [1, 3],
        "ema_alpha": 0.2,
        "update_interval": 5,
        "warmup_batches": 10,
        "up_hysteresis": 0.0,
        "down_hysteresis": -0.25,
        "1": {"candidate_steps": [1, 3], "up_hysteresis": 0.0, "down_hysteresis": -0.25},
    }
    assert adaptive_steps(document) == [1, 3]


def test_the_steps_of_all_batch_sizes_are_read_and_none_is_no_chain() -> None:
    slots = {"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [0, 2]}}
    assert adaptive_steps(slots) == [1, 2, 3, 7]
    with pytest.raises(ValueError, match="not all integers"):
        adaptive_steps({"candidate_steps": [1, "3"]})


def test_a_schedule_is_ranges_of_batch_sizes_and_the_largest_depth() -> None:
    document = json.loads(schedule_config([(1, 4, 3), (5, 9, 1), (10, 16, 0)]))
    assert document == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 1], [10, 16, 0]],
    }
    assert schedule_steps(document) == [1, 3]


def test_a_load_test_accepts_by_the_marginal_rates() -> None:
    assert json.loads(synthetic_config([0.75, 1 / 3])) == {
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.75, 0.3333],
    }
