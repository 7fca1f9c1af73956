"""Grow: candidate trees from the search split's trace, and the acceptance frontier among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

from entmtp_calib import records
from entmtp_calib.growth import Grown, acceptance_frontier, grow_all
from entmtp_calib.replay import accepted, counts_by_prompt, reached, step_counts, walk
from entmtp_calib.stages.recorded import GROWN, TRACE
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import mean_interval
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE = "grow"


def grow(run: Run) -> None:
    """Write `grown.parquet`: every grown tree, with its joint-scored acceptance."""
    inputs = {
        "trace": run.folder.sha256(TRACE),
        "max_nodes": run.config.max_nodes,
        "max_depth": run.max_depth,
        "ranks": run.n_ranks,
    }
    if run.folder.is_done(STAGE, inputs):
        return
    trace = read_trace(run, "search")
    started = perf_counter()
    grown = grow_all(trace, run.max_depth, run.config.max_nodes, run.n_ranks, run.progress)
    seconds = perf_counter() - started
    kept = {entry.tree for entry in acceptance_frontier(grown)}
    rows = [_row(trace, entry, entry.tree in kept) for entry in grown]
    rows.sort(key=lambda row: (row["n_nodes"], row["depth"], row["tree"]))
    run.folder.write_table(GROWN, records.table(rows, records.CANDIDATES_SCHEMA))
    run.folder.mark_done(STAGE, inputs, [GROWN], seconds)


def thin_out(trees: Sequence[Tree], most: int) -> list[Tree]:
    """At most `most` trees (0: all), smallest and largest kept, sizes spaced evenly in the log.

    Neighbouring sizes cost and accept nearly the same, so what is left out is close to what stays.
    """
    ordered = sorted(trees, key=lambda tree: tree.n_nodes)
    if not most or len(ordered) <= most:
        return ordered
    if most == 1:
        return ordered[:1]
    ratio = ordered[-1].n_nodes / ordered[0].n_nodes
    chosen: dict[Tree, None] = {}
    for step in range(most):
        wanted = ordered[0].n_nodes * ratio ** (step / (most - 1))
        left = [tree for tree in ordered if tree not in chosen]
        chosen[min(left, key=lambda tree: abs(tree.n_nodes - wanted))] = None
    return sorted(chosen, key=lambda tree: tree.n_nodes)


def reference_trees(max_depth: int, n_ranks: int) -> list[Tree]:
    """Trees that stand beside the grown ones: none, and Hydra's default where the heads allow."""
    fits = HYDRA_DEFAULT.depth <= max_depth and HYDRA_DEFAULT.max_rank < n_ranks
    return [EMPTY, HYDRA_DEFAULT] if fits else [EMPTY]


def _row(trace: Trace, entry: Grown, on_frontier: bool) -> dict[str, Any]:
    tree = entry.tree
    lengths = accepted(tree, trace.ranks)
    visited = walk(trace, lengths)
    by_prompt = counts_by_prompt(trace, lengths, visited)
    interval = mean_interval([c.emitted_tokens for c in by_prompt], [c.steps for c in by_prompt])
    # The joint score has its own steps; the interval's widths are those of the tree's own walk.
    joint = entry.joint_emitted
    return {
        **tree_columns(tree, entry.max_depth),
        "joint_emitted": joint,
        "joint_low": joint - (interval.value - interval.low),
        "joint_high": joint + (interval.high - interval.value),
        "replay_emitted": step_counts(trace, lengths, visited).mean_emitted,
        "on_frontier": on_frontier,
        **profile_columns(reached(lengths, visited, tree.depth).tolist()),
    }


def tree_columns(tree: Tree, max_depth: int) -> dict[str, Any]:
    """The columns that name a tree."""
    return {
        "tree": tree.id,
        "paths": tree.to_list(),
        "n_nodes": tree.n_nodes,
        "depth": tree.depth,
        "max_depth": max_depth,
    }


def profile_columns(reaching: Sequence[int]) -> dict[str, Any]:
    """Acceptance by depth, from the steps that accepted at least 0, 1, ... draft tokens.

    Conditional: accepted at a depth, of those accepted one before; marginal: of all steps.
    """
    conditional = [after / before if before else None for before, after in pairwise(reaching)]
    return {
        "conditional_acceptance": conditional,
        "marginal_acceptance": [count / reaching[0] for count in reaching[1:]],
    }
