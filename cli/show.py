"""`entmtp show`: a bank as a table, or a tree as a drawing. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import console
from cli.figures import TREE_COLUMNS, tree_cells
from cli.usage import memory_fact, print_usage
from entmtp_calib.errors import EntmtpError, UsageError
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, MEDUSA2_DEFAULT, Tree, chain, draw

if TYPE_CHECKING:
    from entmtp_calib.bank import Bank
    from entmtp_calib.policy import Policy, Staged

# Medusa and Hydra ship the same default tree.
NAMED = {
    EMPTY.id: EMPTY,
    HYDRA_DEFAULT.id: HYDRA_DEFAULT,
    "medusa-default": HYDRA_DEFAULT,
    MEDUSA2_DEFAULT.id: MEDUSA2_DEFAULT,
}
# Facts of the model, the heads and the machine that a reader needs; `--json` has all of them.
_MODEL = ("name", "dtype", "device", "engine", "fingerprint")
_HEADS = ("name", "kind", "n_heads", "fingerprint")
_HARDWARE = ("cpu", "device_name", "usable_cores", "torch_threads", "memory_gib", "torch_version")


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="BANK|TREE",
            help="A run folder or bank file; or a tree: plain, chain-N, hydra-default, "
            "medusa-default, medusa2-default, or rank paths such as '[[0], [1], [0, 0]]'.",
        ),
    ],
    tree: Annotated[
        str | None,
        typer.Option("--tree", metavar="ID", help="Draw this tree of the bank (its id or number)."),
    ] = None,
    json: console.JsonFile = None,
) -> None:
    """Show a bank as a table, or a tree as a drawing."""
    shown: Bank | Tree | None = None if os.path.exists(what) else parse_tree(what)
    if shown is None:
        bank = _load(what)
        shown = bank if tree is None else bank.trees[bank.find(tree)]
    elif tree is not None:
        raise UsageError(f"--tree {tree} with the tree {what}", "a bank to take it from")
    if isinstance(shown, Tree):
        console.present(lambda: print_tree(shown), tree_document(shown), json)
    else:
        took = _usage(Path(what))
        document = {**bank_document(shown), "usage": took}
        console.present(lambda: print_bank(shown, took), document, json)


def parse_tree(text: str) -> Tree | None:
    """The tree that a name or a list of paths means; None if the text is neither."""
    if text.lstrip().startswith(("[", "(")):
        return Tree.parse(text)
    if depth := re.fullmatch(r"chain-([1-9]\d?)", text):
        return chain(int(depth[1]))
    return NAMED.get(text)


def _load(what: str) -> Bank:
    from entmtp_calib.bank import Bank

    if not os.path.exists(what):
        raise EntmtpError(
            f"{what} is neither a bank nor a tree",
            "a run folder or bank file, plain, chain-N, hydra-default, or [[0], [1], [0, 0]]",
            "make a bank with entmtp build-bank",
        )
    return Bank.load(Path(what))


def _usage(bank: Path) -> dict[str, Any] | None:
    """What the bank's run took; None for a bank that stands alone."""
    from entmtp_calib.stages.usage import recorded_usage

    return recorded_usage(bank if bank.is_dir() else bank.parent)


def tree_document(tree: Tree) -> dict[str, Any]:
    """What is known of a tree by itself."""
    return {
        "id": tree.id,
        "n_nodes": tree.n_nodes,
        "depth": tree.depth,
        "max_rank": tree.max_rank,
        "paths": tree.to_list(),
    }


def print_tree(tree: Tree) -> None:
    """One line about the tree, then the tree."""
    console.write(f"{tree.id}: {tree.n_nodes} nodes, depth {tree.depth}\n{draw(tree)}\n")


def bank_document(bank: Bank) -> dict[str, Any]:
    """The bank's own document, each tree with its paths."""
    document = bank.to_dict()
    described = [*document["trees"], *document["extra_trees"]]
    for entry, tree in zip(described, bank.trees, strict=True):
        entry["paths"] = tree.to_list()
    return document


def print_bank(bank: Bank, usage: Mapping[str, Any] | None = None) -> None:
    """The bank's trees with their costs, its policies, what all that holds for, and what it took.

    Args:
        usage: of its run, see `Usage.to_dict`; None where that is not known.
    """
    rows = [
        tree_cells(
            entry.tree,
            entry.mean_emitted_tokens,
            entry.step_ms,
            entry.tokens_per_second,
            entry.speedup_over_plain,
        )
        for entry in (*bank.entries, *bank.extras)
    ]
    rows[bank.best][0] += " *"
    for row in rows[len(bank.entries) :]:
        row[0] += " +"
    console.show_table(TREE_COLUMNS, rows)
    console.write("* in use with --policy static: the fastest fixed tree\n")
    if bank.extras:
        console.write("+ off the frontier: for policies, where it pays\n")
    console.write("\n")
    if usage:
        print_usage(usage, mark_reused=False)
        console.write("\n")
    console.show_facts([*_facts(bank), *([memory_fact(usage)] if usage else [])])


def _facts(bank: Bank) -> Iterator[tuple[str, str]]:
    names = [tree.id for tree in bank.trees]
    for name, policy in bank.policies.items():
        yield f"policy {name}", describe_policy(policy, names)
    yield "policy auto", bank.auto
    yield "task", bank.task
    yield "model", _listed(bank.model, _MODEL)
    yield "heads", _listed(bank.heads, _HEADS)
    yield "hardware", _listed(bank.hardware, _HARDWARE)
    if "data" in bank.splits:
        yield "data", str(bank.splits["data"].get("description", ""))
    yield "splits", _listed(bank.splits, ("search", "select", "report"))
    yield "seeds", _listed(bank.seeds, bank.seeds)
    yield "created", bank.created
    for note in bank.notes:
        yield "note", note


def describe_policy(policy: Policy, names: list[str]) -> str:
    """What the policy does, as `chain_value:2: chain-1, above 0.31 t8d3-1a2b3c`.

    Args:
        names: of the trees that its indices count.
    """
    from entmtp_calib.policy import Hysteresis, Ladder, Staged

    if len(policy.indices) == 1:
        return f"always {names[policy.indices[0]]}"
    if isinstance(policy, Staged):
        return "; ".join(_stages(policy, names))
    if isinstance(policy, Ladder):
        chosen = [names[index] for index in policy.indices]
        return f"{policy.signal}: {_ranges(policy.thresholds, chosen)}"
    assert isinstance(policy, Hysteresis)  # a static policy has one tree
    on, off = f"on above {policy.tau_on:.6g}", f"off at {policy.tau_off:.6g} and below"
    return f"{policy.signal}: {names[policy.small]}, with {names[policy.large]} {on}, {off}"


def _stages(policy: Staged, names: list[str]) -> Iterator[str]:
    from entmtp_calib.policy import DRAFT_ON

    levels = zip(policy.thresholds, policy.actions, strict=True)
    for depth, (thresholds, actions) in enumerate(levels):
        chosen = ["draft on" if a == DRAFT_ON else names[a] for a in actions]
        yield f"{f'level {depth}: ' if depth else ''}{_ranges(thresholds, chosen)}"


def _ranges(thresholds: Iterable[float], chosen: list[str]) -> str:
    steps = zip(thresholds, chosen[1:], strict=True)
    return chosen[0] + "".join(f", above {tau:.6g} {name}" for tau, name in steps)


def _listed(facts: Mapping[str, Any], names: Iterable[str]) -> str:
    """The facts of these names that are there; of lists only their size, of hashes the start."""
    return ", ".join(
        f"{name} {_brief(value)}" for name in names if (value := facts.get(name)) is not None
    )


def _brief(value: Any) -> str:
    if isinstance(value, list | dict):
        return str(len(value))
    return value[:12] if re.fullmatch("[0-9a-f]{64}", str(value)) else str(value)
