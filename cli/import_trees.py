"""`entmtp import-trees`: a user's own trees as candidates for a bank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import console, options

if TYPE_CHECKING:
    from entmtp_calib.stages.import_trees import Imported

COLUMNS = ("tree", "id", "nodes", "depth", "written as")
MOST_PROBLEMS = 20


def import_trees(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON, YAML, a Python file or flags: lists of nodes or leaves, counts such as "
            "[1, 7, 6], vLLM strings, or what entmtp export wrote.",
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORM",
            parser=options.given,
            help="How it is written: a form of entmtp export, or dense. [recognised]",
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            "--heads",
            metavar="FOLDER",
            parser=options.folder,
            help="Check that these heads can draft the trees.",
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            "--tree", metavar="NAME", parser=options.given, help="Take this tree of the file only."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", parser=options.folder, help="The file. [stdout]"),
    ] = None,
) -> None:
    """Read your own trees and check them.

    Writes them as JSON, for build-bank --trees to measure beside the grown ones.

    \b
    entmtp import-trees medusa_choices.py --heads HEADS --out trees.json
    entmtp import-trees medusa_choices.py --tree mc_sim_7b_63 > trees.json
    entmtp import-trees leaves.txt --format trtllm --out trees.json
    """
    from entmtp_calib.records import strict_json
    from entmtp_calib.stages.import_trees import import_trees as read

    found = read(file, format, heads, tree)
    if len(found.problems) > 1:
        for problem in found.problems[:MOST_PROBLEMS]:
            console.say(f"entmtp: {problem}")
    document = found.document()
    if out is None:
        console.write(strict_json(document, indent=1) + "\n")
    else:
        from entmtp_calib.files import write_json

        write_json(out, document)
        console.show_table(COLUMNS, _rows(found))
    for each in found.listed:
        if each.implied:
            console.say(f"note: {each.name} lists leaves, which imply {each.implied} more nodes")


def _rows(found: Imported) -> list[list[str]]:
    return [
        [each.name, each.tree.id, str(each.tree.n_nodes), str(each.tree.depth), each.form]
        for each in found.listed
    ]
