"""`entmtp recalibrate`: measure a bank's trees again, or the grown trees of an unfinished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import console, options, outcome
from cli.figures import bounds, number
from entmtp_calib.bank import FILE_NAME
from entmtp_calib.errors import UsageError

COLUMNS = (
    "tree",
    "nodes",
    "depth",
    "joint emitted/step",
    "recalibrated [95 %]",
    "replay",
    "optimism",
)
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="TASK", help="gsm8k, humaneval, sharegpt, or custom."),
]
Choice = Annotated[str | None, typer.Option(metavar="NAME", help="Other than the bank's.")]


@options.changed_settings
def recalibrate(
    bank: options.BankArgument,
    task: Task = None,
    data: options.Data = None,
    model: options.Model = None,
    heads: options.Heads = None,
    out: options.Out = None,
    device: Choice = None,
    dtype: Choice = None,
    engine: Choice = None,
    json: console.JsonFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure a bank again: on new heads, data or hardware.

    The bank stays as it is; the new one has a run folder of its own, beside it or at --out. What
    is not given is as it was. For a run without a bank it is the stage after grow.
    """
    changes = {
        "task": task,
        "data": data,
        "model": model,
        "heads": heads,
        "device": device,
        "dtype": dtype,
        "engine": engine,
        **settings,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if bank.is_dir() and not (bank / FILE_NAME).exists():
        _go_on(bank, {**changes, "out": out} if out else changes, json)
        return
    from entmtp_calib.stages.build_bank import recalibrate_bank

    with console.Reporter() as progress:
        done = recalibrate_bank(bank, changes, out, options.command_line(), progress)
    outcome.present(done, json)


def _go_on(run: Path, changes: Mapping[str, Any], json: Path | None) -> None:
    """The stage of a run that has no bank yet, under the settings it was begun with."""
    if changes:
        flag = f"--{next(iter(changes)).replace('_', '-')}"
        raise UsageError(
            f"{flag} with {run}, a run without a bank",
            "a bank to measure under other settings",
            f"finish it, or leave {flag} away",
        )
    from entmtp_calib.records import CANDIDATES_SCHEMA
    from entmtp_calib.stages.build_bank import resume
    from entmtp_calib.stages.recalibrate import CANDIDATES

    with console.Reporter() as progress:
        done = resume(run, "recalibrate", options.command_line(), progress)
    table = outcome.read_table(done, CANDIDATES, CANDIDATES_SCHEMA).to_pylist()
    live = [
        {**row, "name": done.names.get(row["tree"])}
        for row in table
        if row["recalibrated_emitted"] is not None
    ]
    document = {**outcome.document(done), "candidates": live}
    rows = [[outcome.label(done, row["tree"]), *_figures(row)] for row in live]
    console.present(lambda: _print(rows, outcome.facts(done, CANDIDATES)), document, json)


def _print(rows: Sequence[Sequence[str]], facts: list[tuple[str, str]]) -> None:
    console.show_table(COLUMNS, rows)
    console.write("\n")
    console.show_facts(facts)


def _figures(row: Mapping[str, Any]) -> list[str]:
    """A tree's, under `COLUMNS`."""
    emitted, low, high = (row[f"recalibrated_{name}"] for name in ("emitted", "low", "high"))
    return [
        str(row["n_nodes"]),
        str(row["depth"]),
        number(row["joint_emitted"], 3),
        bounds(emitted, low, high, 3),
        number(row["replay_emitted"], 3),
        number(row["optimism"], 3),
    ]
