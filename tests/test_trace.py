"""A trace keeps whole texts, survives a table, and is refused where counts on it would be wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from traces import random_trace, trace_of

from entmtp_calib import records
from entmtp_calib.errors import DataError
from entmtp_calib.trace import Trace


def test_a_selection_keeps_whole_texts_in_the_order_asked() -> None:
    trace = random_trace(3)
    chosen = trace.select([2, 0])
    assert chosen.prompt.tolist() == [2] * trace.lengths[2] + [0] * trace.lengths[0]
    assert chosen.lengths.tolist() == [trace.lengths[2], trace.lengths[0]]
    assert (chosen.ranks == trace.ranks[trace.rows_of([2, 0])]).all()


def test_a_table_brings_each_split_back() -> None:
    search, report = random_trace(1), random_trace(2)
    table = pa.concat_tables([search.to_table("search"), report.to_table("report")])
    assert table.schema.equals(records.TRACE_SCHEMA, check_metadata=True)
    for split, trace in (("search", search), ("report", report)):
        read = Trace.from_table(table, split)
        for name in (
            "prompt",
            "position",
            "context",
            "token",
            "ranks",
            "chain_probs",
            "base_top1",
            "entropy",
        ):
            before, after = getattr(trace, name), getattr(read, name)
            assert (before == after).all()
            assert before.dtype == after.dtype
    with pytest.raises(DataError, match="no row of split 'select'"):
        Trace.from_table(table, "select")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": [[0], [0], [-1], [0], [0]]}, "past the end of a text"),
        ({"ranks": [[0], [-2], [-1], [0], [-1]]}, "ranks below -1"),
        ({"prompt": [0, 0, 1, 0, 0]}, "do not stand together"),
        ({"position": [0, 1, 2, 1, 2]}, "do not count up from 0"),
        ({"token": [1, 2]}, "columns of shapes"),
        ({"context": [1, 2]}, "columns of shapes"),
        ({"chain_probs": [[0.5, 0.5]] * 5}, "columns of shapes"),
    ],
)
def test_a_damaged_trace_is_refused(change: dict[str, list], problem: str) -> None:
    trace = trace_of([[[0], [0], [-1]], [[0], [-1]]])
    with pytest.raises(DataError, match=problem):
        replace(trace, **{name: np.array(value) for name, value in change.items()})


def test_joined_traces_keep_their_texts_apart() -> None:
    first, second = random_trace(1), random_trace(2)
    second = replace(second, prompt=second.prompt + first.n_prompts)
    both = Trace.joined([first, second])
    assert both.lengths.tolist() == [*first.lengths, *second.lengths]
    assert both.context.tolist() == [*first.context, *second.context]
    assert (both.select(range(first.n_prompts)).ranks == first.ranks).all()
    with pytest.raises(DataError, match="do not stand together"):
        Trace.joined([first, first.select([0])])


def test_an_empty_trace_is_refused() -> None:
    trace = trace_of([[[0], [-1]]])
    with pytest.raises(DataError, match="no rows"):
        replace(trace, prompt=trace.prompt[:0])
