"""`entmtp time`: what the live trees of a run cost and bring."""

from __future__ import annotations

from cli import console, options, outcome


def time(
    run: options.RunArgument,
    json: console.JsonFile = None,
) -> None:
    """Go on with a run: time its trees."""
    from entmtp_calib.stages.build_bank import resume
    from entmtp_calib.stages.recorded import TIMING

    with console.Reporter() as progress:
        done = resume(run, "time", options.command_line(), progress)

    def render() -> None:
        outcome.print_trees(done)
        console.write("\n")
        console.show_facts(outcome.facts(done, TIMING))

    console.present(render, outcome.document(done), json)
