"""`entmtp grow`: the candidate trees of a run, grown from its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli import console, options, outcome
from cli.figures import bounds, number

COLUMNS = ("tree", "nodes", "depth", "joint emitted/step [95 %]", "replay emitted/step")


def grow(
    run: options.RunArgument,
    json: console.JsonFile = None,
) -> None:
    """Go on with a run: grow trees from its trace."""
    from entmtp_calib.records import CANDIDATES_SCHEMA
    from entmtp_calib.stages.build_bank import resume
    from entmtp_calib.stages.grow import GROWN

    with console.Reporter() as progress:
        done = resume(run, "grow", options.command_line(), progress)
    grown = outcome.read_table(done, GROWN, CANDIDATES_SCHEMA).to_pylist()
    frontier = [row for row in grown if row["on_frontier"]]
    document = {**outcome.document(done), "grown": len(grown), "frontier": frontier}
    facts = outcome.facts(done, GROWN)
    console.present(lambda: _print(frontier, len(grown), facts), document, json)


def _print(frontier: Sequence[Mapping[str, Any]], grown: int, facts: list[tuple[str, str]]) -> None:
    console.show_table(COLUMNS, map(_cells, frontier))
    console.write("\n")
    rule = f"{len(frontier)} of {grown} grown trees (more nodes, strictly more acceptance)"
    console.show_facts([("frontier", rule), *facts])


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["tree"],
        str(row["n_nodes"]),
        str(row["depth"]),
        bounds(row["joint_emitted"], row["joint_low"], row["joint_high"], 3),
        number(row["replay_emitted"], 3),
    ]
