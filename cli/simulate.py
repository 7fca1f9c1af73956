"""`entmtp simulate`: a bank's policies under any machine's costs. Needs neither model nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import UNDEFINED, bounds, number, percent
from cli.show import describe_policy

if TYPE_CHECKING:
    from entmtp_calib.stages.simulate import Refit, Simulation

COLUMNS = (
    "policy",
    "tokens/s",
    "x plain [95 %]",
    "x static [95 %]",
    "emitted/step",
    "switches",
    "capture",
    "bound",
    "oracle",
)
REFIT_COLUMNS = (*COLUMNS[:7], "x the bank's [95 %]", "unseen gain")
WORDS = """predicted by exact replay, in tokens/s of the steps alone; intervals are over prompts.
capture: the share of the oracle's gain over static. bound and oracle are upper bounds: the policy's
kind fitted to these very texts, and the best sequence of trees in hindsight.
"""


def simulate(
    bank: options.BankArgument,
    costs: options.Costs = None,
    split: options.Split = "report",
    signal: Annotated[
        str | None,
        typer.Option(
            "--signal", metavar="NAME", parser=options.given, help="As in build-bank. [the bank's]"
        ),
    ] = None,
    json: console.JsonFile = None,
) -> None:
    """Replay a bank's policies under any machine's costs.

    Runs no model. With --costs it also says what would be fitted to these.
    """
    from entmtp_calib.stages.simulate import simulate as replay

    with console.Reporter() as progress:
        done = replay(bank, costs, split, signal, progress)
    console.present(lambda: _print(done), _document(done), json)


def _document(done: Simulation) -> dict[str, Any]:
    refit = done.refit
    return {
        **done.conditions,
        "notes": done.notes,
        "policies": done.rows,
        "refit": refit
        and {
            "auto": refit.auto,
            "changed": refit.changed,
            "trees": {tree.id: tree.to_list() for tree in refit.trees},
            "policies": [
                {**row, "fitted": refit.policies[row["policy"]].to_dict()} for row in refit.rows
            ],
        },
    }


def _print(done: Simulation) -> None:
    console.show_table(COLUMNS, map(_cells, done.rows))
    console.write("\n")
    console.show_facts((f"steps of {row['policy']}", _shares(row)) for row in done.rows)
    if done.refit:
        _print_refit(done.refit)
    console.write(f"\n{WORDS}\n")
    console.show_facts([*(("note", note) for note in done.notes), *facts(done.conditions)])


def _print_refit(refit: Refit) -> None:
    console.write("\nfitted to these costs, on the search and select splits:\n")
    console.show_table(REFIT_COLUMNS, map(_refit_cells, refit.rows))
    console.write("\n")
    names = [tree.id for tree in refit.trees]
    described = {name: describe_policy(policy, names) for name, policy in refit.policies.items()}
    described["auto"] = refit.auto
    console.show_facts(
        (f"policy {name}", f"{text} ({'changed' if name in refit.changed else 'as in the bank'})")
        for name, text in described.items()
    )


def facts(conditions: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What figures from a recorded trace hold for."""
    hardware = conditions["hardware"] or {}
    machine = ", ".join(
        f"{hardware[name]}{unit}"
        for name, unit in (("cpu", ""), ("device_name", ""), ("usable_cores", " cores"))
        if hardware.get(name) not in (None, "cpu")
    )
    return [
        ("data", conditions["data"]),
        (
            "texts",
            f"{conditions['prompts']} prompts of the {conditions['split']} split, "
            f"{conditions['positions']} positions",
        ),
        (
            "costs",
            f"{conditions['costs']}{f' ({machine})' if machine else ''}, "
            f"at {conditions['context_tokens']:.0f} tokens of context",
        ),
        ("bank", str(conditions["bank"])),
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["policy"],
        number(row["tokens_per_second_predicted"], 2),
        _ratio(row, "plain"),
        _ratio(row, "static"),
        number(row["mean_emitted_tokens"], 3),
        str(row["switches"]),
        number(row["capture"], 3),
        number(row.get("feature_bound_tokens_per_second"), 2),
        number(row.get("oracle_tokens_per_second"), 2),
    ]


def _refit_cells(row: Mapping[str, Any]) -> list[str]:
    gain = UNDEFINED if row["policy"] == "static" else f"{100 * row['held_out_gain']:+.1f} %"
    return [*_cells(row)[:7], _ratio(row, "bank"), gain]


def _ratio(row: Mapping[str, Any], name: str) -> str:
    return bounds(row.get(f"ratio_to_{name}"), row.get(f"{name}_low"), row.get(f"{name}_high"), 3)


def _shares(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{entry['tree']} {percent(entry['share'])}" for entry in row["share"])
