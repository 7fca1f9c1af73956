"""Recorded work: sizes of columns, slots that are lent, and a recorder that gives up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import tape
import torch

from entmtp_calib.errors import EntmtpWarning
from entmtp_calib.targets.graphs import Recordings, Sizes, Slots

KEYS, VALUES = torch.ones(2, 3, 1, 4), torch.ones(2, 3, 1, 5)


class Borrower:
    """Anything that can be gone."""


def test_sizes_double_and_leave_a_margin() -> None:
    assert [Sizes().holding(rows) for rows in (1, 640, 641, 1152, 1153)] == [
        *(640, 640, 1152, 1152, 2176)
    ]
    assert Sizes(16, 8).between(3, 41) == [24, 40, 72]
    assert Sizes(16, 8).between(30, 40) == [40]


def test_a_slot_is_lent_again_with_its_recordings_and_without_its_contents() -> None:
    slots, first, second = Slots(), Borrower(), Borrower()
    one, two = slots.lend(first, 10, KEYS, VALUES), slots.lend(second, 10, KEYS, VALUES)
    assert one is not two
    assert slots.of(first) is one
    assert (one.keys.shape, one.values.shape) == ((2, 3, 10, 4), (2, 3, 10, 5))
    one.keys[:] = torch.nan
    one.recordings["a"] = 1
    memory = one.keys.data_ptr()
    del first
    gc.collect()
    again = slots.lend(Borrower(), 8, KEYS, VALUES)
    assert (again.keys.data_ptr(), again.recordings) == (memory, {"a": 1})
    assert not again.keys.any()


def test_a_borrower_that_needs_more_gets_another_slot_and_leaves_both() -> None:
    slots, borrower = Slots(), Borrower()
    small, large = slots.lend(borrower, 4, KEYS, VALUES), slots.lend(borrower, 9, KEYS, VALUES)
    assert slots.of(borrower) is large
    del borrower
    gc.collect()
    assert slots.lend(Borrower(), 3, KEYS, VALUES) is small
    assert slots.lend(Borrower(), 5, KEYS, VALUES) in (small, large)


def test_slots_made_under_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        slot = Slots().lend(Borrower(), 4, KEYS.clone(), VALUES.clone())
    slot.keys.add_(1)


def test_a_failure_is_said_once_and_what_was_recorded_stays() -> None:
    recorder: list[Any] = [tape.Recorder()]
    known: dict[Hashable, Any] = {}

    def record(work: Callable[[], Any]) -> Any:
        return recorder[0](work)

    def build(record: Any) -> str:
        record(lambda: torch.ones(1))
        return "built"

    recordings = Recordings(record, "this")
    assert recordings.get(known, "a", build) == "built"
    recorder[0] = tape.broken
    with pytest.warns(EntmtpWarning, match=r"^this runs without CUDA graphs, slower \([^\n]*\)$"):
        assert recordings.get(known, "b", build) is None
    assert recordings.get(known, "b", build) is None
    assert recordings.get(known, "a", build) == "built"


def test_other_errors_are_not_taken_for_a_failed_recording() -> None:
    def build(record: Any) -> None:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        Recordings(tape.Recorder(), "this").get({}, "a", build)
