"""`entmtp grow`: the candidate trees of a run, grown from its trace, or live to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options, outcome
from cli.figures import UNDEFINED, bounds, number
from entmtp_calib.errors import UsageError

if TYPE_CHECKING:
    from entmtp_calib.growth import Grown
    from entmtp_calib.stages.grow_live import Comparison, Pair

COLUMNS = ("tree", "nodes", "depth", "joint emitted/step [95 %]", "replay emitted/step")
LIVE_COLUMNS = (
    "max depth",
    "nodes",
    "live tree",
    "joint emitted/step",
    "replay tree",
    "joint emitted/step",
    "equal",
)


def grow(
    run: options.RunArgument,
    score: Annotated[
        str,
        typer.Option(
            "--score",
            metavar="WAY",
            help="replay (on the trace), or live: the paper's way, a rollout per node, to compare.",
        ),
    ] = "replay",
    max_nodes: Annotated[
        int | None,
        typer.Option("--max-nodes", metavar="N", help="With --score live. [as in the run]"),
    ] = None,
    max_depth: Annotated[
        int | None,
        typer.Option("--max-depth", metavar="N", help="With --score live. [as in the run]"),
    ] = None,
    json: console.JsonFile = None,
) -> None:
    """Go on with a run: grow trees from its trace.

    With --score live nothing is written: trees grown both ways stand side by side, and the exit
    code is 1 if any differ.
    """
    if score not in ("replay", "live"):
        raise UsageError(f"--score {score}", "replay or live")
    if score == "live":
        _compare(run, max_nodes, max_depth, json)
        return
    for flag, value in (("--max-nodes", max_nodes), ("--max-depth", max_depth)):
        if value is not None:
            raise UsageError(f"{flag} {value} with --score replay", "--score live")
    _grow(run, json)


def _grow(run: Path, json: Path | None) -> None:
    from entmtp_calib.artifacts import RunFolder
    from entmtp_calib.records import CANDIDATES_SCHEMA
    from entmtp_calib.stages.build_bank import resume
    from entmtp_calib.stages.grow import STAGE
    from entmtp_calib.stages.recorded import GROWN

    with console.Reporter() as progress:
        done = resume(run, "grow", options.command_line(), progress)
    grown = outcome.read_table(done, GROWN, CANDIDATES_SCHEMA).to_pylist()
    effort = RunFolder.open(done.folder).effort(STAGE)
    seconds = effort.seconds if effort else None
    frontier = [row for row in grown if row["on_frontier"]]
    document = {
        "score": "replay",
        **outcome.document(done),
        "grown": len(grown),
        "seconds": seconds,
        "frontier": frontier,
    }
    took = f"{_fraction(seconds)} s for {len(grown)} trees, by replay of the trace"
    facts = [("growing", took), *outcome.facts(done, GROWN)]
    console.present(lambda: _print(frontier, len(grown), facts), document, json)


def _print(frontier: Sequence[Mapping[str, Any]], grown: int, facts: list[tuple[str, str]]) -> None:
    console.show_table(COLUMNS, map(_cells, frontier))
    console.write("\n")
    rule = f"{len(frontier)} of {grown} grown trees (more nodes, strictly more acceptance)"
    console.show_facts([("frontier", rule), *facts])


def _fraction(seconds: float | None) -> str:
    """Replay takes fractions of a second; a run of an earlier version did not note it."""
    return UNDEFINED if seconds is None else f"{seconds:.3g}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["tree"],
        str(row["n_nodes"]),
        str(row["depth"]),
        bounds(row["joint_emitted"], row["joint_low"], row["joint_high"], 3),
        number(row["replay_emitted"], 3),
    ]


def _compare(run: Path, max_nodes: int | None, max_depth: int | None, json: Path | None) -> None:
    from entmtp_calib.stages.grow_live import compare_growth

    with console.Reporter() as progress:
        found = compare_growth(run, max_nodes, max_depth, options.command_line(), progress)
    document = {
        "score": "live",
        **vars(found),
        "pairs": [_pair_document(pair) for pair in found.pairs],
        "differing": found.differing,
    }
    console.present(lambda: _print_comparison(found), document, json)
    if found.differing:
        raise typer.Exit(1)


def _print_comparison(found: Comparison) -> None:
    console.show_table(LIVE_COLUMNS, map(_pair_cells, found.pairs))
    console.write("\n")
    sizes, differing = len(found.pairs), found.differing
    verdict = f"{differing} of {sizes} differ" if differing else f"all {sizes} are equal"
    rollouts = f"{found.rollouts} rollouts of {found.prompts} prompts"
    console.show_facts(
        [
            ("trees", verdict),
            ("live", f"{found.live_seconds:.1f} s, {rollouts}"),
            ("replay", f"{_fraction(found.replay_seconds)} s, on the trace of one"),
            ("data", found.data),
        ]
    )


def _pair_cells(pair: Pair) -> list[str]:
    ways = [[way.tree.id, number(way.joint_emitted, 3)] for way in (pair.live, pair.replay)]
    size = [str(pair.live.max_depth), str(pair.live.tree.n_nodes)]
    return [*size, *ways[0], *ways[1], "yes" if pair.is_same else "NO"]


def _pair_document(pair: Pair) -> dict[str, Any]:
    return {
        "max_depth": pair.live.max_depth,
        "n_nodes": pair.live.tree.n_nodes,
        "live": _way_document(pair.live),
        "replay": _way_document(pair.replay),
        "equal": pair.is_same,
    }


def _way_document(grown: Grown) -> dict[str, Any]:
    return {
        "tree": grown.tree.id,
        "paths": grown.tree.to_list(),
        "joint_emitted": grown.joint_emitted,
        **vars(grown.joint),
    }
