"""The columns of every table we write, declared once, and the one way to write JSON.

A declared schema keeps a column's type the same in every run, whatever the first rows hold. Units
stand in the column names; every schema carries its table's name and the format version. An
undefined number (NaN, infinity) becomes null, in tables and in JSON. This module knows no files and
imports pyarrow only when a schema is asked for, so that commands that need none start fast.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    TRACE_SCHEMA: pa.Schema
    CANDIDATES_SCHEMA: pa.Schema
    TIMING_SCHEMA: pa.Schema
    POLICIES_SCHEMA: pa.Schema
    STEPS_SCHEMA: pa.Schema
    BENCH_SCHEMA: pa.Schema
    BENCH_RUNS_SCHEMA: pa.Schema

FORMAT_VERSION = 1

# Column -> type; a trailing "?" allows nulls, for what may not have been measured or defined.
_COLUMNS: dict[str, dict[str, str]] = {
    # A row per generated position, as a possible step start.
    "trace": {
        "split": "string",
        "prompt": "int32",
        "position": "int32",
        "context": "int32",
        "token": "int32",
        "ranks": "list<int16>",
        "chain_probs": "list<float32>",
        "base_top1": "float32",
        "entropy": "float32",
    },
    # A row per candidate tree; *_emitted is emitted tokens per step.
    "candidates": {
        "tree": "string",
        "paths": "list<list<int16>>",
        "n_nodes": "int32",
        "depth": "int32",
        "max_depth": "int32?",
        "joint_emitted": "float64?",
        "joint_low": "float64?",
        "joint_high": "float64?",
        "recalibrated_emitted": "float64?",
        "recalibrated_low": "float64?",
        "recalibrated_high": "float64?",
        "replay_emitted": "float64?",
        "optimism": "float64?",
        "steps": "int64?",
        "on_frontier": "bool",
        "conditional_acceptance": "list<float64>?",
        "marginal_acceptance": "list<float64>?",
    },
    # A row per timed repetition. kind step: a step at a context length, draft_ms of it drafting;
    # kind level: drafting one depth under `rows` parents; kind end_to_end: a whole prompt.
    "timing": {
        "kind": "string",
        "tree": "string?",
        "depth": "int32?",
        "context_length": "int32?",
        "rows": "int32",
        "prompt": "int32?",
        "round": "int32",
        "step_ms": "float64?",
        "draft_ms": "float64?",
        "tokens": "int32?",
        "steps": "int32?",
        "seconds": "float64?",
    },
    # A row per policy on the report split. Rates are end to end, decode and predicted ones of the
    # steps alone; low and high bound ratio_to_plain. A feature bound is fitted to the very texts
    # it is scored on: no function of the policy's signal does better.
    "policies": {
        "policy": "string",
        "tokens_per_second_predicted": "float64?",
        "tokens_per_second_measured": "float64?",
        "decode_tokens_per_second": "float64?",
        "ratio_to_plain": "float64?",
        "low": "float64?",
        "high": "float64?",
        "ratio_to_hydra": "float64?",
        "hydra_low": "float64?",
        "hydra_high": "float64?",
        "ratio_to_static": "float64?",
        "static_low": "float64?",
        "static_high": "float64?",
        "emitted_tokens": "int64",
        "steps": "int64",
        "mean_emitted_tokens": "float64?",
        "mean_accepted_draft_tokens": "float64?",
        "seconds": "float64?",
        "switches": "int64?",
        "share": "shares",
        "oracle_tokens_per_second": "float64?",
        "feature_bound_tokens_per_second": "float64?",
        "capture": "float64?",
    },
    # A row per decoding step.
    "steps": {
        "prompt": "int32",
        "step": "int32",
        "position": "int32",
        "tree": "string",
        "rows": "int32",
        "levels": "int32",
        "accepted_draft_tokens": "int32",
        "emitted_tokens": "int32",
        "signal": "float64?",
        "draft_ms": "float64",
        "verify_ms": "float64",
        "step_ms": "float64",
    },
    # A row per method of a bench; figures are totals over totals, null for a method that failed.
    "bench": {
        "method": "string",
        "claims_lossless": "bool",
        "texts": "int32",
        "tokens_compared": "int64",
        "divergences": "int32",
        "tokens": "int64?",
        "seconds": "float64?",
        "prefill_seconds": "float64?",
        "decode_seconds": "float64?",
        "tokens_per_second": "float64?",
        "tokens_per_second_low": "float64?",
        "tokens_per_second_high": "float64?",
        "decode_tokens_per_second": "float64?",
        "ratio_to_plain": "float64?",
        "ratio_to_plain_low": "float64?",
        "ratio_to_plain_high": "float64?",
        "ratio_to_hydra_default": "float64?",
        "ratio_to_hydra_default_low": "float64?",
        "ratio_to_hydra_default_high": "float64?",
        "ratio_to_static": "float64?",
        "ratio_to_static_low": "float64?",
        "ratio_to_static_high": "float64?",
        "steps": "int64?",
        "passes": "int64?",
        "mean_emitted_tokens": "float64?",
        "mean_accepted_draft_tokens": "float64?",
        "step_ms": "float64?",
        "switches": "int64?",
        "nll": "float64?",
        "nll_difference": "float64?",
        "error": "string?",
    },
    # A row per timed text of a bench; passes are the target's, the prompt's own left out; nll, in
    # nats per token under the target, is for texts that need not be plain decoding's.
    "bench_runs": {
        "method": "string",
        "prompt": "string",
        "round": "int32",
        "tokens": "int32",
        "steps": "int32",
        "passes": "int32",
        "switches": "int32?",
        "seconds": "float64",
        "prefill_seconds": "float64",
        "decode_seconds": "float64",
        "same": "bool",
        "nll": "float64?",
    },
}


@lru_cache
def schema(table_name: str) -> pa.Schema:
    """The declared schema of a table, by its name in `_COLUMNS`: "trace", "bench_runs"."""
    import pyarrow as pa

    fields = [
        pa.field(column, _arrow_type(kind.removesuffix("?")), nullable=kind.endswith("?"))
        for column, kind in _COLUMNS[table_name].items()
    ]
    return pa.schema(fields, metadata={"format_version": str(FORMAT_VERSION), "table": table_name})


def __getattr__(name: str) -> Any:
    """TRACE_SCHEMA and its siblings, built at first use."""
    table_name, _, suffix = name.partition("_SCHEMA")
    if name.endswith("_SCHEMA") and not suffix and table_name.lower() in _COLUMNS:
        return schema(table_name.lower())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def table(rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as a table of exactly this schema.

    Raises:
        ValueError: a row has an unknown column, lacks a required one, or has an undefined value in
            it. Rows are made by our own code, so this is a bug and not a user's error.
    """
    import pyarrow as pa

    clean = [_plain(row) for row in rows]
    known = set(schema.names)
    required = [field.name for field in schema if not field.nullable]
    for number, row in enumerate(clean):
        unknown = sorted(set(row) - known)
        missing = [column for column in required if row.get(column) is None]
        if unknown or missing:
            raise ValueError(f"row {number}: unknown columns {unknown}, without value {missing}")
    return pa.Table.from_pylist(clean, schema=schema)


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON that every strict parser reads, in the order given; undefined numbers are null.

    Non-ASCII text is escaped, so that no line separator, encoding or unpaired surrogate in it can
    break a reader.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def canonical_json(value: Any) -> str:
    """The one JSON text of a value, for hashing: sorted keys, no spaces."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    if kind.startswith("list<"):
        return pa.list_(_arrow_type(kind[len("list<") : -1]))
    if kind == "shares":  # share of the steps per tree
        return pa.list_(pa.struct({"tree": pa.string(), "share": pa.float64()}))
    return pa.type_for_alias(kind)


def _plain(value: Any) -> Any:
    """The value as JSON's own types, undefined as None; TypeError where it would be a guess."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return str(int(key))
    raise TypeError(f"{key!r} cannot be a JSON key")
