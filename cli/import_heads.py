"""`entmtp import-heads`: published Hydra or Medusa heads as a native heads folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import console, options

if TYPE_CHECKING:
    from entmtp_calib.stages.import_heads import Imported


def import_heads(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            parser=options.given,
            help="Published heads: a folder, one of its files, or a Hugging Face id.",
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="DST", parser=options.folder, help="For the heads.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            parser=options.given,
            help="The model that they were trained for; only its configuration is read. "
            "[the one that SRC names, where it is needed]",
        ),
    ] = None,
    json: console.JsonFile = None,
) -> None:
    """Import published Hydra or Medusa heads: .pt, .bin or safetensors, or a Medusa-2 model.

    They are checked, renamed and written as they are, a tensor at a time. --heads of the other
    commands takes SRC as well; it imports into the cache.
    """
    from entmtp_calib.stages.import_heads import import_heads as run

    with console.Reporter() as progress:
        imported = run(source, folder, model, progress)
    console.present(lambda: _print(imported), vars(imported), json)


def _print(imported: Imported) -> None:
    layers = f"{imported.n_layers} layer{'s' if imported.n_layers > 1 else ''}"
    size = f"{imported.size_bytes / 1e6:.1f} MB of {' and '.join(imported.dtypes)}"
    console.show_facts(
        [
            ("heads", f"{imported.layout}, {imported.n_heads} heads of {layers}"),
            ("made for", imported.target or "a model that they do not name"),
            ("sizes", f"hidden {imported.hidden_size}, vocabulary {imported.vocab_size}"),
            ("written", f"{imported.folder}, {size}"),
            *(("ignored", name) for name in imported.ignored),
            *(("note", note) for note in imported.notes),
        ]
    )
