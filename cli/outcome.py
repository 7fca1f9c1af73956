"""What the commands that measure show at their end: trees, policies, and where it all is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import console
from cli.figures import TREE_COLUMNS, number, row_bounds, tree_cells
from cli.show import bank_document
from cli.usage import memory_fact, print_usage

if TYPE_CHECKING:
    import pyarrow as pa

    from entmtp_calib.stages.build_bank import Outcome

POLICY_COLUMNS = (
    "policy",
    "tokens/s",
    "x plain [95 %]",
    "x static [95 %]",
    "emitted/step",
    "switches",
    "steps alone",
    "predicted",
    "bound",
    "oracle",
    "capture",
)
BOUNDS = """tokens/s and ratios: end to end, measured in one interleaved run; then the steps alone,
measured and predicted by replay, in tokens/s. bound: the policy's kind fitted to these very texts,
an upper bound. oracle: the best sequence of trees in hindsight.
"""
DROPPED = """runs: a tree that was surely slower than one of no more nodes stopped before the end;
it is not in the bank.
"""
FIGURES = ("mean_emitted_tokens", "step_ms", "tokens_per_second", "speedup_over_plain")


def present(outcome: Outcome, json: Path | None) -> None:
    """Show all that a run has come to, and write it as JSON if asked."""
    console.present(lambda: _print(outcome), document(outcome), json)


def document(outcome: Outcome) -> dict[str, Any]:
    """The figures on screen, as JSON values."""
    bank = outcome.bank
    return {
        "folder": outcome.folder,
        "reached": outcome.reached,
        "data": outcome.data,
        "trees": [_tree_document(record, outcome) for record in outcome.timed],
        "policies": outcome.policies,
        "bank": bank and bank_document(bank),
        "usage": outcome.usage and outcome.usage.to_dict(),
    }


def read_table(outcome: Outcome, name: str, schema: pa.Schema) -> pa.Table:
    """One of the tables that the run has written."""
    from entmtp_calib.artifacts import RunFolder

    return RunFolder.open(outcome.folder).read_table(name, schema)


def facts(outcome: Outcome, file: str | None = None) -> list[tuple[str, str]]:
    """Where the prompts came from, and where the result is."""
    place = ("file", outcome.folder / file) if file else ("run folder", outcome.folder)
    return [("data", outcome.data), (place[0], str(place[1]))]


def label(outcome: Outcome, tree_id: str) -> str:
    """The tree's id, and what the user calls it."""
    name = outcome.names.get(tree_id)
    return f"{tree_id} ({name})" if name else tree_id


def print_trees(outcome: Outcome) -> None:
    """The trees that ran end to end, and how often; with a bank, whether they are in it."""
    bank, rows = outcome.bank, []
    for record in outcome.timed:
        tree = record["tree"]
        cells = tree_cells(tree, *(record[name] for name in FIGURES))
        cells[0] = label(outcome, tree.id)
        cells.append(f"{record['runs']}/{record['planned_runs']}")
        rows.append([*cells, _membership(tree in bank.frontier)] if bank else cells)
    columns = [*TREE_COLUMNS, "runs"]
    console.show_table([*columns, "in bank"] if bank else columns, rows)
    if any(record["runs"] < record["planned_runs"] for record in outcome.timed):
        console.write(DROPPED)


def _print(outcome: Outcome) -> None:
    bank = outcome.bank
    print_trees(outcome)
    console.write("\n")
    if bank:
        if bank.trees[bank.best].n_nodes == 0:
            console.write("no grown tree is faster than plain decoding beyond doubt: use none\n")
        else:
            console.write(f"best: {label(outcome, bank.trees[bank.best].id)}\n")
        console.write("\non the report split, which chose nothing:\n")
        rows = [[label(outcome, row["policy"]), *_figures(row)] for row in outcome.policies]
        console.show_table(POLICY_COLUMNS, rows)
        console.write(BOUNDS + "\n")
    took = outcome.usage and outcome.usage.to_dict()
    if took:
        print_usage(took, mark_reused=True)
        console.write("\n")
    notes = [("note", note) for note in bank.notes] if bank else []
    memory = [memory_fact(took)] if took else []
    console.show_facts([*notes, *memory, *facts(outcome)])


def _membership(is_in: bool) -> str:
    return "yes" if is_in else "-"


def _tree_document(record: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    tree, bank = record["tree"], outcome.bank
    return {
        "id": tree.id,
        "name": outcome.names.get(tree.id),
        "n_nodes": tree.n_nodes,
        "depth": tree.depth,
        "paths": tree.to_list(),
        **{name: record[name] for name in FIGURES},
        "tokens": record["tokens"],
        "seconds": record["seconds"],
        "runs": record["runs"],
        "planned_runs": record["planned_runs"],
        "in_bank": bank and tree in bank.frontier,
    }


def _figures(row: Mapping[str, Any]) -> list[str]:
    """A policy's, under `POLICY_COLUMNS`."""
    return [
        number(row["tokens_per_second_measured"], 2),
        row_bounds(row, "ratio_to_plain", "low", "high", 3),
        row_bounds(row, "ratio_to_static", "static_low", "static_high", 3),
        number(row["mean_emitted_tokens"], 3),
        str(row["switches"]),
        number(row["decode_tokens_per_second"], 2),
        number(row["tokens_per_second_predicted"], 2),
        number(row["feature_bound_tokens_per_second"], 2),
        number(row["oracle_tokens_per_second"], 2),
        number(row["capture"], 3),
    ]
