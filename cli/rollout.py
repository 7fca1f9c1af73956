"""`entmtp rollout`: the first stage of build-bank alone, the trace of the target's own text."""

from __future__ import annotations

from typing import Any

from cli import console, options, outcome
from entmtp_calib.config import build_config


@options.build_settings
def rollout(
    task: options.Task = "gsm8k",
    data: options.Data = None,
    trees: options.Trees = None,
    preset: options.Preset = "default",
    model: options.Model = None,
    heads: options.Heads = None,
    out: options.Out = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    engine: options.Engine = "auto",
    json: console.JsonFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Begin a run: generate on the prompts and write the trace.

    The options are those of build-bank; grow, recalibrate and time go on from here.
    """
    config = build_config(preset, task=task, **settings)
    from entmtp_calib.records import TRACE_SCHEMA
    from entmtp_calib.stages.build_bank import build_bank, read_user_trees
    from entmtp_calib.stages.recorded import TRACE
    from entmtp_calib.stages.setup import Inputs

    inputs = Inputs(model, heads, data, device, dtype, engine)
    mine = read_user_trees(trees or (), heads)
    command = options.command_line()
    with console.Reporter() as progress:
        done = build_bank(config, inputs, out, "rollout", command, progress, mine)
    table = outcome.read_table(done, TRACE, TRACE_SCHEMA)
    counts = _counts(table.select(["split", "prompt"]).to_pylist())
    console.present(
        lambda: _print(counts, outcome.facts(done, TRACE)),
        {**outcome.document(done), "splits": counts},
        json,
    )


def _counts(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Prompts and generated tokens per split, in the order of the table."""
    prompts: dict[str, list[int]] = {}
    for row in rows:
        prompts.setdefault(row["split"], []).append(row["prompt"])
    return {
        split: {"prompts": len(set(numbers)), "tokens": len(numbers)}
        for split, numbers in prompts.items()
    }


def _print(counts: dict[str, dict[str, int]], facts: list[tuple[str, str]]) -> None:
    rows = ([split, *map(str, count.values())] for split, count in counts.items())
    console.show_table(("split", "prompts", "tokens"), rows)
    console.write("\n")
    console.show_facts(facts)
