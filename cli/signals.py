"""`entmtp signals`: how well each signal tells what a step will accept. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cli import console, options
from cli.figures import bounds, number, percent
from cli.simulate import facts

if TYPE_CHECKING:
    from entmtp_calib.stages.signals import Predictions

COLUMNS = ("signal", "rank correlation [95 %]", "AUROC [95 %]", "ms ahead", "of a plain step")


def signals(
    bank: options.BankArgument,
    split: options.Split = "report",
    json: console.JsonFile = None,
) -> None:
    """Say how well each signal predicts acceptance.

    Judged on a bank's recorded trace, at the steps of its static tree, beside what it costs to know
    the signal there. Runs no model.
    """
    from entmtp_calib.stages.signals import measure_signals

    found = measure_signals(bank, split)
    document = {**found.conditions, "signals": found.rows}
    console.present(lambda: _print(found), document, json)


def _print(found: Predictions) -> None:
    known = found.conditions
    console.show_table(COLUMNS, map(_cells, found.rows))
    small, large, more = (known[key] for key in ("small_tree", "large_tree", "large_accepts_more"))
    console.write(
        f"\nrank correlation: Spearman's, with the draft tokens that {large} accepts.\n"
        f"AUROC: how often the signal is higher where {large} accepts more than {small},\n"
        f"as it does at {percent(more)} of the steps. Intervals are over prompts.\n"
        "ms ahead: per step, for head levels that the static tree does not draft anyway.\n\n"
    )
    steps = f"{known['steps']}, where those of {known['static_tree']} start"
    plain = f"{number(known['plain_step_ms'], 3)} ms"
    console.show_facts([("steps", steps), ("plain step", plain), *facts(known)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["signal"],
        _bounded(row, "rank_correlation"),
        _bounded(row, "auroc"),
        number(row["drafted_ahead_ms"], 3),
        percent(row["share_of_plain_step"]),
    ]


def _bounded(row: Mapping[str, Any], name: str) -> str:
    return bounds(row[name], row[f"{name}_low"], row[f"{name}_high"], 3)
