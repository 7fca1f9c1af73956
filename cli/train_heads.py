"""`entmtp train-heads`: heads that learn the target's own text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import number
from entmtp_calib.config import TrainConfig
from entmtp_calib.errors import UsageError

if TYPE_CHECKING:
    from entmtp_calib.stages.train_heads import Trained

WORK = Path("artifacts", "training")  # ignored by git, unlike the heads


@options.train_settings
def train_heads(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", parser=options.folder, help="For the heads.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompts",
            metavar="NAME=TASK[:FILE][@LIMIT]",
            help="Prompts that the target writes continuations to; may be repeated.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts", metavar="FILE", help="A corpus: source, prompt_ids, completion_ids per line."
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            metavar="DIR",
            parser=options.folder,
            help=f"For texts, hidden states, checkpoints. [{WORK}/NAME OF OUT]",
        ),
    ] = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_new_tokens: options.MaxNewTokens = 192,
    json: console.JsonFile = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Train drafting heads for a model on its own text.

    The same command again resumes. Use no prompts that a bank is built or judged on.
    """
    config = _config(settings)
    if not prompts and not texts:
        raise UsageError("no --prompts", "--prompts NAME=TASK[:FILE][@LIMIT] or --texts FILE")
    if max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {max_new_tokens}", "a whole number of at least 1")
    from entmtp_calib.stages.train_heads import Source
    from entmtp_calib.stages.train_heads import train_heads as train

    sources = [Source.parse(text) for text in prompts or ()]
    with console.Reporter() as progress:
        trained = train(
            config,
            sources,
            out,
            work or WORK / out.resolve().name,
            model,
            device,
            dtype,
            max_new_tokens,
            texts,
            options.command_line(),
            progress,
        )
    document = {**vars(trained), "settings": config.to_dict()}
    console.present(lambda: _print(trained), document, json)


def _config(settings: Mapping[str, Any]) -> TrainConfig:
    """The settings; where nothing else is said, Medusa heads have no prefix layer."""
    is_medusa = settings.get("kind") == "medusa"
    return TrainConfig(**{**({"prefix_width": 0} if is_medusa else {}), **settings})


def _print(trained: Trained) -> None:
    rows = list(_rows(trained.history))
    trees = sorted(rows[0][1]["emitted"], key=lambda name: (not name.startswith("chain"), name))
    columns = ("epoch", "loss", "source", "top-1 per head", "top-5 per head", *trees)
    console.show_table(columns, (_cells(record, figures, trees) for record, figures in rows))
    console.write("\ntrees: emitted tokens per step on held-out texts\n")
    console.show_facts(
        [
            ("trained on", f"{trained.positions} positions"),
            ("parameters", str(trained.parameters)),
            ("heads", str(trained.folder)),
        ]
    )


def _rows(
    history: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], dict[str, Any]]]:
    """An epoch's record with the figures of each source of text in it."""
    for record in history:
        for source, figures in record.items():
            if isinstance(figures, dict):
                yield record, {**figures, "source": source}


def _cells(record: Mapping[str, Any], figures: Mapping[str, Any], trees: list[str]) -> list[str]:
    return [
        str(record["epoch"]),
        number(record["loss"], 4),
        figures["source"],
        " ".join(number(share, 3) for share in figures["top1"]),
        " ".join(number(share, 3) for share in figures["top5"]),
        *(number(figures["emitted"][tree], 3) for tree in trees),
    ]
