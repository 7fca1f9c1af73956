"""The options that several commands share, and a flag for every setting of a configuration.

Defaults and checks belong to `entmtp_calib.config`; here stand the flags' names and help. A setting
whose flag is not given is left to the preset, to the run that is measured again, or to the
configuration's default. This module knows no stage and no torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from entmtp_calib.config import PRESETS, AcceptanceConfig, BuildConfig, Settings, TrainConfig

Command = Callable[..., None]


def given(text: str) -> str:
    """Refuse an empty value, such as that of an unset shell variable."""
    if not text.strip():
        raise typer.BadParameter("it is empty")
    return text


def folder(text: str) -> Path:
    """A path; the empty text would mean the working folder."""
    return Path(given(text))


Task = Annotated[
    str,
    typer.Option(
        "--task", metavar="TASK", help="gsm8k, humaneval, sharegpt, or custom (with --data)."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FILE",
        parser=given,
        help="Prompts: JSON, JSON lines, Parquet, CSV, or a hub id.",
    ),
]
Trees = Annotated[
    list[Path] | None,
    typer.Option(
        "--trees",
        metavar="FILE",
        parser=folder,
        help="Trees of yours to measure beside the grown ones, in any form that import-trees "
        "reads; may be repeated.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", parser=given, help="A folder, GGUF file or Hugging Face id."
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        "--heads",
        metavar="HEADS",
        parser=given,
        help="The model's drafting heads: a folder, or published ones (a folder, file or hub id).",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="DTYPE", help="auto, float32, float16 or bfloat16."),
]
Engine = Annotated[
    str, typer.Option("--engine", metavar="ENGINE", help="auto, graphed, lean or transformers.")
]
Preset = Annotated[
    str, typer.Option("--preset", metavar="PRESET", help=f"Sizes: {', '.join(PRESETS)}.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", parser=folder, help="The run folder; the same one resumes."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
BankArgument = Annotated[
    Path, typer.Argument(metavar="BANK", help="A run folder, or its bank.safetensors.")
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", help="Tokens generated per prompt.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="X", help="0 is greedy decoding.")
]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="X", help="Share of the likeliest tokens; 1 is all.")
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="N", help="Number of the likeliest tokens; 0 is all.")
]
Split = Annotated[str, typer.Option("--split", metavar="SPLIT", help="report, select or search.")]
Costs = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        parser=folder,
        help="Another machine's timing.parquet or costs.parquet. [the bank's own]",
    ),
]
Acceptance = Annotated[
    str,
    typer.Option(
        "--acceptance",
        metavar="RULE",
        help="exact, or typical: Medusa's rule, above temperature 0, NOT lossless.",
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon",
        metavar="X",
        help=f"Typical acceptance: highest threshold. [{AcceptanceConfig.epsilon:g}]",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        metavar="X",
        help=f"Typical acceptance: threshold at entropy 0. [{AcceptanceConfig.alpha:g}]",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the sampling.")]

BUILD_HELP = {
    "search_prompts": "Prompts that trees are grown on.",
    "select_prompts": "Prompts that trees are run and timed on.",
    "report_prompts": "Prompts of the final figures, used for nothing else.",
    "max_new_tokens": "Tokens generated per prompt.",
    "max_prompt_tokens": "Longer prompts are left out.",
    "max_nodes": "Nodes of the largest tree.",
    "max_depth": "Depth of the deepest tree; 0: as deep as the heads go.",
    "max_rank": "Choices under one node that a tree may use.",
    "max_candidates": "Grown trees that run live; 0: the whole acceptance frontier.",
    "timing_rounds": "Times that each prompt is timed with each tree that can still win.",
    "step_repetitions": "Timed steps per tree and context length; fewer where that is known well.",
    "context_lengths": "A context in tokens at which steps are timed; may be repeated.",
    "temperature": "Of the text that is measured; 0 is greedy decoding.",
    "top_p": "Share of the likeliest tokens; 1 is all.",
    "top_k": "Number of the likeliest tokens; 0 is all.",
    "prompt_mode": (
        "chat (the model's template), raw, a template by name (alpaca, chatml, vicuna), or auto: "
        "chat where there is one, vicuna for models of that name, else raw."
    ),
    "signal": "What ladder and hysteresis look at, such as chain_value:1; auto: try several.",
    "seed": "Of the splits and of the sampling.",
}
TRAIN_HELP = {
    "kind": "hydra (each head sees the tokens before it) or medusa (independent).",
    "n_heads": "Heads: the depth of the deepest tree.",
    "n_layers": "Layers of a head.",
    "prefix_width": "Inner width of the prefix layer; 0: no prefix layer.",
    "own_projection": "Heads have their own projection to the vocabulary.",
    "draft_vocab": "Tokens that can be drafted, the most frequent ones; 0: all.",
    "epochs": "Passes over the texts.",
    "batch_tokens": "Tokens per optimizer step.",
    "lr": "Highest learning rate.",
    "final_lr": "Last learning rate as a share of the highest.",
    "warmup": "Share of the steps in which the learning rate rises.",
    "weight_decay": "Of AdamW.",
    "dropout": "Share of a head's inputs that is dropped in training.",
    "soft_weight": "Share of the target's distribution in the label.",
    "held_out": "Texts kept for validation.",
    "checkpoint_seconds": "Seconds between checkpoints.",
    "seed": "Of order and weights.",
}
FLAG_NAMES = {
    "context_lengths": "--context-length",
    "own_projection": "--own-projection/--shared-projection",
}
# What a tree that exists already no longer depends on.
GROWTH = {"max_nodes", "max_depth", "max_rank", "max_candidates"}


def build_settings(command: Command) -> Command:
    """Add the flags of `BuildConfig`; what stands in brackets is the value of each preset."""
    return _with_settings(command, BuildConfig, BUILD_HELP, _preset_values)


def changed_settings(command: Command) -> Command:
    """Add the flags of `BuildConfig` that matter to trees which exist already."""
    kept = {name: text for name, text in BUILD_HELP.items() if name not in GROWTH}
    return _with_settings(command, BuildConfig, kept, lambda field: "")


def train_settings(command: Command) -> Command:
    """Add the flags of `TrainConfig`."""
    return _with_settings(
        command, TrainConfig, TRAIN_HELP, lambda field: f" [{_written(field.default)}]"
    )


def command_line() -> list[str]:
    """The command as it is recorded beside what it measured."""
    return ["entmtp", *sys.argv[1:]]


def _with_settings(
    command: Command,
    config: type[Settings],
    helps: Mapping[str, str],
    default: Callable[[Any], str],
) -> Command:
    """The command with a flag per setting; it gets those that were given as `settings`."""

    @wraps(command)
    def with_flags(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in helps}
        command(**values, settings={n: v for n, v in chosen.items() if v not in (None, [], ())})

    own = inspect.signature(command, eval_str=True)
    kinds = get_type_hints(config)
    flags = [
        _flag(field.name, kinds[field.name], helps[field.name] + default(field))
        for field in fields(config)  # type: ignore[arg-type]
        if field.name in helps
    ]
    parameters = [p for name, p in own.parameters.items() if name != "settings"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    parameters += flags
    with_flags.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_flags


def _flag(name: str, kind: Any, text: str) -> inspect.Parameter:
    flag = FLAG_NAMES.get(name, f"--{name.replace('_', '-')}")
    metavar = {int: "N", float: "X", str: "NAME", tuple[int, ...]: "N"}.get(kind)
    several = list[int] if kind == tuple[int, ...] else kind
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, flag, help=text, metavar=metavar),
        annotation=several | None,
    )


def _preset_values(field: Any) -> str:
    values = {name: changes.get(field.name, field.default) for name, changes in PRESETS.items()}
    if len(set(values.values())) == 1:
        return f" [{_written(field.default)}]"
    return " [" + ", ".join(f"{name} {_written(value)}" for name, value in values.items()) + "]"


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
