"""`entmtp build-bank`: the main job, from prompts to a bank of trees worth using."""

from __future__ import annotations

from typing import Any

from cli import console, options, outcome
from entmtp_calib.config import build_config


@options.build_settings
def build_bank(
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
    """Grow trees, measure them, write a bank of the best.

    Without --model and --heads it is the embedded default's. The same command again resumes.
    Trees of --trees are measured beside the grown ones and may enter the bank like them.
    """
    config = build_config(preset, task=task, **settings)
    from entmtp_calib.stages.build_bank import build_bank as build
    from entmtp_calib.stages.build_bank import read_user_trees
    from entmtp_calib.stages.setup import Inputs

    inputs = Inputs(model, heads, data, device, dtype, engine)
    mine = read_user_trees(trees or (), heads)
    command = options.command_line()
    with console.Reporter() as progress:
        built = build(config, inputs, out, command=command, progress=progress, user_trees=mine)
    outcome.present(built, json)
