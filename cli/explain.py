"""`entmtp explain`: what a tree's nodes do, and why a tree wins. Needs neither model nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console, options
from cli.figures import UNDEFINED, interval, number
from cli.show import parse_tree, tree_document
from cli.simulate import facts
from entmtp_calib.tree import Tree, stems

if TYPE_CHECKING:
    from entmtp_calib.ablation import NodeFigures
    from entmtp_calib.formats.fit import Figures
    from entmtp_calib.stages.explain import Explained, Explanation
    from entmtp_calib.timing import Interval

COLUMNS = (
    "tree",
    "nodes",
    "depth",
    "emitted/step [95 %]",
    "step ms",
    "tokens/s",
    "x plain [95 %]",
    "x hydra-default [95 %]",
    "never pay",
    "wasted rows",
)
NODE_COLUMNS = (
    "node",
    "reached",
    "accepted",
    "of reached",
    "+ emitted/step",
    "+ step ms",
    "tokens/ms",
    "tokens/s with",
    "without",
    "",
)
DEPTH_COLUMNS = ("depth", "nodes", "never pay", "marginal", "conditional")
PART_COLUMNS = ("most accepted nodes alone", "emitted/step", "step ms", "tokens/s", "")
SHOWN = 12  # nodes of a tree, unless --all is given
WORDS = """by exact replay, of the steps alone; intervals are over prompts.
hydra-default is Medusa's default, too; medusa2-default is Medusa-2's for Vicuna-7B.
wasted rows: drafted ones that a pass does not accept.
reached, accepted: share of the passes that accept a node's parent, the node.
+: what a node adds with those below it that pay; tokens/ms: the tokens it adds over that time, - if
the costs show none; then tokens/s of the tree with them, and without it and all below it. A node
never pays if tokens/s do not fall without it, or if a node above it never pays. It is judged with
all other nodes there: one that pays in a slow tree may be too dear for a fast one.
marginal: share of the passes that accept a node of this depth; conditional: of those that accept
one above it.
The most accepted nodes of a tree are picked on these very texts, which flatters them a little.
"""


def explain(
    bank: options.BankArgument,
    trees: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TREE",
            help="An id of the bank, hydra-default, medusa-default, medusa2-default, chain-N, "
            "rank paths such as '[[0], [0, 0]]', or a file as import-trees reads it. [all trees "
            "of the bank]",
        ),
    ] = None,
    split: options.Split = "report",
    costs: options.Costs = None,
    all_nodes: Annotated[
        bool, typer.Option("--all", help=f"Show every node, not the {SHOWN} most accepted ones.")
    ] = False,
    json: console.JsonFile = None,
) -> None:
    """Explain a tree: what each node adds, and which never pay.

    Beside Medusa's and Hydra's defaults and plain decoding, from a bank's recorded trace and its
    costs. Runs no model.

    \b
    entmtp explain RUN
    entmtp explain RUN hydra-default --all
    entmtp explain RUN '[[0], [1], [0, 0]]' --costs server/timing.parquet
    entmtp explain RUN medusa_choices.py --json explained.json
    """
    from entmtp_calib.stages.explain import explain as explained

    wanted = [text if os.path.isfile(text) else parse_tree(text) or text for text in trees or []]
    found = explained(bank, wanted, split, costs)
    console.present(lambda: _print(found, all_nodes), _document(found), json)


def _print(found: Explanation, all_nodes: bool) -> None:
    console.show_table(COLUMNS, (_cells(each, found.best) for each in found.trees))
    console.write("* the bank's best fixed tree\n")
    for index in found.asked:
        _print_tree(found.trees[index], all_nodes)
    console.write(f"\n{WORDS}\n")
    console.show_facts([*(("note", note) for note in found.notes), *facts(found.conditions)])


def _print_tree(each: Explained, all_nodes: bool) -> None:
    """A sentence, the nodes, the acceptance by depth, and what fewer of the nodes would do."""
    console.write(f"\n{console.printable(each.conclusion)}.\n\n")
    _print_nodes(each, all_nodes)
    console.write("\n")
    console.show_table(DEPTH_COLUMNS, _depth_rows(each))
    if each.tree.n_nodes > 1:
        console.write("\n")
        console.show_table(PART_COLUMNS, _part_rows(each))


def _print_nodes(each: Explained, all_nodes: bool) -> None:
    """The tree as a drawing with figures, to its most accepted nodes.

    A node is accepted no more often than its parent, so that the nodes shown are a tree.
    """
    passes, nodes = each.profile.passes, sorted(each.ablation.nodes, key=lambda n: -n.accepted)
    n_shown = len(nodes) if all_nodes else SHOWN
    shown = {node.path: node for node in nodes[:n_shown]}
    rows = [
        _node_cells(stem + ",".join(map(str, path)), shown[path], passes)
        for path, stem in stems(Tree(tuple(shown)))
    ]
    console.write(f"{console.printable(each.name)}, {passes} passes:\n")
    console.show_table(NODE_COLUMNS, rows)
    if more := nodes[n_shown:]:
        never = sum(node.never_pays for node in more)
        console.write(
            f"{len(more)} more, each accepted by at most {more[0].accepted} of {passes} passes; "
            f"{never} of them never pay (--all shows them)\n"
        )


def _depth_rows(each: Explained) -> Iterator[list[str]]:
    rates = zip(each.profile.marginal, each.profile.conditional, strict=True)
    for depth, (marginal, conditional) in enumerate(rates, start=1):
        nodes = [node for node in each.ablation.nodes if len(node.path) == depth]
        never = str(sum(n.never_pays for n in nodes)) if each.ablation.is_priced else UNDEFINED
        yield [str(depth), str(len(nodes)), never, number(marginal, 3), number(conditional, 3)]


def _part_rows(each: Explained) -> Iterator[list[str]]:
    """None of the nodes, 1, 2, 4, ..., all, and as many as are the fastest."""
    of, n = each.ablation, each.tree.n_nodes
    sizes = {0, of.best_part.n_nodes, n, *(2**k for k in range(n.bit_length()))}
    for size in sorted(sizes):
        part = of.parts[size]
        yield [
            f"{size}" + " (plain decoding)" * (not size) + " (the whole tree)" * (size == n),
            number(part.mean_emitted, 3),
            number(part.step_ms, 3),
            number(_rate(part), 2),
            "fastest" if size == of.best_part.n_nodes and of.is_priced else "",
        ]


def _cells(each: Explained, best: str) -> list[str]:
    of, tree = each.ablation, each.tree
    id_too = "" if each.name == tree.id else f" ({tree.id})"
    return [
        f"{each.name}{id_too}{' *' if tree.id == best else ''}",
        str(tree.n_nodes),
        str(tree.depth),
        interval(each.mean_emitted, 3),
        number(of.whole.step_ms, 3),
        number(_rate(of.whole), 2),
        _ratio(each, "plain"),
        _ratio(each, "hydra-default"),
        f"{len(of.never_pay)} of {tree.n_nodes}" if of.is_priced and of.nodes else UNDEFINED,
        number(of.wasted_rows, 2),
    ]


def _ratio(each: Explained, base: str) -> str:
    ratio = each.ratios.get(base)
    return interval(ratio, 3) if ratio else UNDEFINED


def _node_cells(label: str, node: NodeFigures, passes: int) -> list[str]:
    return [
        label,
        number(node.reached / passes, 3),
        number(node.accepted / passes, 3),
        number(node.conditional, 3),
        number(node.adds_emitted, 4),
        number(node.adds_ms, 3),
        number(node.tokens_per_ms, 4),
        number(_rate(node.within), 2),
        number(_rate(node.without), 2),
        "never pays" if node.never_pays else "",
    ]


def _document(found: Explanation) -> dict[str, Any]:
    return {
        **found.conditions,
        "notes": found.notes,
        "best": found.best,
        "trees": [_tree_document(each) for each in found.trees],
    }


def _tree_document(each: Explained) -> dict[str, Any]:
    of, passes = each.ablation, each.profile.passes
    return {
        "name": each.name,
        **tree_document(each.tree),
        "conclusion": each.conclusion,
        **_figures(of.whole),
        "mean_emitted_low": each.mean_emitted.low,
        "mean_emitted_high": each.mean_emitted.high,
        "mean_accepted_draft_tokens": of.whole.counts.mean_accepted,
        **{k: v for base, ratio in each.ratios.items() for k, v in _columns(base, ratio).items()},
        "passes": passes,
        "never_pay": len(of.never_pay) if of.is_priced else None,
        "wasted_rows": of.wasted_rows,
        "marginal": each.profile.marginal,
        "conditional": each.profile.conditional,
        "best_part": {
            "paths": of.best_part.to_list(),
            **_figures(of.best),
            **_columns("whole", each.best_part_ratio),
        },
        "most_accepted_alone": [_figures(part) for part in of.parts],
        "nodes": [_node_document(node, passes, of.is_priced) for node in of.nodes],
    }


def _columns(base: str, ratio: Interval | None) -> dict[str, float | None]:
    names = {f"ratio_to_{base}": "value", f"{base}_low": "low", f"{base}_high": "high"}
    return {column: getattr(ratio, name, None) for column, name in names.items()}


def _node_document(node: NodeFigures, passes: int, is_priced: bool) -> dict[str, Any]:
    return {
        "path": list(node.path),
        "reached": node.reached / passes,
        "accepted": node.accepted / passes,
        "conditional": node.conditional,
        "adds_emitted_tokens": node.adds_emitted,
        "adds_ms": node.adds_ms,
        "tokens_per_ms": node.tokens_per_ms,
        "within": _figures(node.within),
        "without": _figures(node.without),
        "never_pays": node.never_pays if is_priced else None,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "mean_emitted_tokens": figures.mean_emitted,
        "step_ms": figures.step_ms,
        "tokens_per_second": _rate(figures),
    }


def _rate(figures: Figures) -> float | None:
    return None if figures.step_ms is None else figures.tokens_per_second
