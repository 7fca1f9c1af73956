"""`entmtp export`: a bank's tree for another engine. Needs neither model nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli import console, options
from entmtp_calib.errors import UsageError
from entmtp_calib.formats.engines import FORMS


def export(
    bank: options.BankArgument,
    format: Annotated[str, typer.Option("--format", metavar="FORM", help=f"{', '.join(FORMS)}.")],
    tree: Annotated[
        str | None,
        typer.Option(
            "--tree",
            metavar="ID",
            parser=options.given,
            help="This tree of the bank. [the best fixed one; all for schedules]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", parser=options.folder, help="The file. [stdout]"),
    ] = None,
    costs: options.Costs = None,
) -> None:
    """Write a bank's tree for another engine.

    Who reads the file, what it cannot express and what that costs by replay is said on stderr.

    \b
    entmtp export RUN --format medusa > tree.json
    entmtp export RUN --format trtllm-bench --out medusa.yml
    entmtp export RUN --format sglang --tree chain-2
    """
    from entmtp_calib.files import write_bytes
    from entmtp_calib.stages.export import export as written

    if format == "sequoia" and out is None:
        raise UsageError("--format sequoia, a binary file", "--out FILE")
    exported = written(bank, format, tree, costs)
    if out is None:
        console.write(exported.content.decode())
    else:
        write_bytes(out, exported.content)
    for note in exported.notes:
        console.say(f"note: {note}")
