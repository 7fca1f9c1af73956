"""Tables keep their declared types whatever their rows hold; JSON is strict."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pytest

from entmtp_calib import records


def candidate(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "tree": "chain-1",
        "paths": [[0]],
        "n_nodes": 1,
        "depth": 1,
        "on_frontier": True,
    }
    return row | changes


def strict_loads(text: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


NAMES = ["TRACE", "CANDIDATES", "TIMING", "POLICIES", "STEPS", "BENCH", "BENCH_RUNS"]


@pytest.mark.parametrize("name", NAMES)
def test_every_schema_carries_its_name_and_the_format_version(name: str) -> None:
    schema = getattr(records, f"{name}_SCHEMA")
    assert schema.metadata == {b"format_version": b"1", b"table": name.lower().encode()}
    assert schema is getattr(records, f"{name}_SCHEMA")


def test_a_schema_that_does_not_exist_is_an_attribute_error() -> None:
    for name in ("OTHER_SCHEMA", "TRACE_SCHEMAS", "TRACE"):
        with pytest.raises(AttributeError, match=name):
            getattr(records, name)


def test_types_do_not_depend_on_the_first_rows() -> None:
    unknown = records.table([candidate() for _ in range(20)], records.CANDIDATES_SCHEMA)
    known = records.table(
        [candidate(joint_emitted=2, conditional_acceptance=[1, None, 0.25])],
        records.CANDIDATES_SCHEMA,
    )
    both = pa.concat_tables([unknown, known])
    assert both.schema.equals(records.CANDIDATES_SCHEMA, check_metadata=True)
    assert both["joint_emitted"].to_pylist() == [None] * 20 + [2.0]
    assert both["conditional_acceptance"].to_pylist()[-1] == [1.0, None, 0.25]


def test_an_empty_table_has_all_columns() -> None:
    assert records.table([], records.STEPS_SCHEMA).schema.equals(records.STEPS_SCHEMA)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (candidate(speed=1.0), "speed"),
        ({"tree": "plain"}, "paths"),
        (candidate(n_nodes=None), "n_nodes"),
        (candidate(depth=math.nan), "depth"),
    ],
)
def test_a_row_with_unknown_or_missing_columns_is_refused(row: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"row 1: .*{named}"):
        records.table([candidate(), row], records.CANDIDATES_SCHEMA)


def test_undefined_numbers_are_null_in_tables() -> None:
    row = candidate(
        joint_low=math.nan,
        joint_high=np.float64("inf"),
        optimism=np.float32("nan"),
        marginal_acceptance=np.array([0.5, math.nan]),
    )
    (read,) = records.table([row], records.CANDIDATES_SCHEMA).to_pylist()
    assert read["joint_low"] is read["joint_high"] is read["optimism"] is None
    assert read["marginal_acceptance"] == [0.5, None]


def test_numpy_values_and_structs_are_accepted() -> None:
    row = {
        "policy": "ladder",
        "emitted_tokens": np.int64(7),
        "steps": 3,
        "share": [{"tree": "plain", "share": np.float64(0.25)}, {"tree": "chain-2", "share": 0.75}],
    }
    (read,) = records.table([row], records.POLICIES_SCHEMA).to_pylist()
    assert read["emitted_tokens"] == 7
    assert read["share"][1] == {"tree": "chain-2", "share": 0.75}
    assert read["capture"] is None


def test_timed_steps_levels_and_prompts_stand_in_one_table() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": "step", "tree": "plain", "context_length": 8, "rows": 1, "round": 1}
        | {"step_ms": 2.5, "draft_ms": 0.0},
        {"kind": "level", "depth": 2, "context_length": 8, "rows": 3, "round": 1, "draft_ms": 0.5},
        {"kind": "end_to_end", "tree": "plain", "rows": 1, "prompt": 0, "round": 0}
        | {"tokens": 12, "steps": 12, "seconds": 0.25},
    ]
    read = records.table(rows, records.TIMING_SCHEMA).to_pylist()
    for row, found in zip(rows, read, strict=True):
        assert found == dict.fromkeys(records.TIMING_SCHEMA.names) | row
    with pytest.raises(ValueError, match="kind"):
        records.table([{**rows[0], "kind": None}], records.TIMING_SCHEMA)


def test_a_policys_row_may_lack_what_was_not_measured_or_predicted() -> None:
    row = {"policy": "staged", "emitted_tokens": 7, "steps": 3, "share": []}
    (read,) = records.table([row], records.POLICIES_SCHEMA).to_pylist()
    unknown = {name for name, value in read.items() if value is None}
    assert unknown == set(read) - set(row)
    assert {
        *("ratio_to_plain", "ratio_to_static", "static_low", "static_high", "capture", "switches"),
        *("tokens_per_second_predicted", "oracle_tokens_per_second"),
        "feature_bound_tokens_per_second",
    } <= unknown


def test_json_has_null_for_undefined_numbers_and_leaves_text_alone() -> None:
    text = "BaNaNa Infinity NaN \u2028 \x85 caf\u00e9 \U0001f600 \udcff"
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "text": text}
    read = strict_loads(records.strict_json(value))
    assert read == {"a": None, "b": [None, None, 1.5], "text": text}
    records.strict_json(value).encode("ascii")


def test_json_takes_dataclasses_paths_and_numpy() -> None:
    @dataclass(frozen=True)
    class Inner:
        where: Path
        value: np.float64

    @dataclass(frozen=True)
    class Outer:
        inner: Inner
        counts: np.ndarray
        ids: frozenset[int]

    outer = Outer(
        Inner(Path("a/b"), np.float64("nan")), np.arange(3, dtype=np.int16), frozenset({2, 1})
    )
    assert strict_loads(records.strict_json({4: outer, "flag": np.bool_(True)})) == {
        "4": {"inner": {"where": "a/b", "value": None}, "counts": [0, 1, 2], "ids": [1, 2]},
        "flag": True,
    }


@pytest.mark.parametrize("value", [object(), b"bytes", {(1, 2): 3}, {True: 1}, int])
def test_json_does_not_guess(value: object) -> None:
    with pytest.raises(TypeError):
        records.strict_json(value)


def test_canonical_json_does_not_depend_on_order() -> None:
    assert records.canonical_json({"b": 1, "a": (1, 2)}) == '{"a":[1,2],"b":1}'
    assert list(strict_loads(records.strict_json({"b": 1, "a": 2}))) == ["b", "a"]


def test_importing_the_module_imports_neither_pyarrow_nor_pandas() -> None:
    code = "import sys, entmtp_calib.records; print({'pyarrow', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
