"""Recalibrate: candidates decode live on the select split, each with its own drafts and mask.

Joint scoring sees a candidate inside a larger tree; here each tree stands alone. The replay
predicts the same figure from the trace; they differ only where rounding flips a near-tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.decoding import Decoder
from entmtp_calib.frontier import strict_pareto
from entmtp_calib.policy import Static
from entmtp_calib.replay import accepted, step_counts, walk
from entmtp_calib.stages.cost import COSTS, run_costs
from entmtp_calib.stages.grow import (
    profile_columns,
    reference_trees,
    thin_out,
    tree_columns,
)
from entmtp_calib.stages.recorded import GROWN, TRACE
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.setup import Run
from entmtp_calib.steps import Generation
from entmtp_calib.timing import mean_interval
from entmtp_calib.tree import EMPTY, Tree

STAGE, CANDIDATES = "recalibrate", "candidates.parquet"


def recalibrate(run: Run) -> None:
    """Write `candidates.parquet`: every candidate, with what the live ones really accepted."""
    trees: Sequence[Tree] | None = run.trees
    grown = None if trees is not None else run.folder.read_table(GROWN, records.CANDIDATES_SCHEMA)
    references = reference_trees(run.max_depth, run.n_ranks)
    inputs = {
        "text": run.text_inputs,
        "trace": run.folder.sha256(TRACE),
        "grown": grown and run.folder.sha256(GROWN),
        "trees": [tree.to_list() for tree in trees or ()],
        "references": [tree.id for tree in references],
        "max_candidates": run.config.max_candidates,
        "costs": run.folder.sha256(COSTS),
    }
    if run.folder.is_done(STAGE, inputs):
        return
    rows = {row["tree"]: row for row in grown.to_pylist()} if grown else {}
    if trees is None:
        trees = _promising(run, rows.values())
    live = {tree.id: tree for tree in [*references, *trees]}
    measured = _measure(run, list(live.values()), inputs)
    for name, tree in live.items():
        row = rows.setdefault(name, {**tree_columns(tree, tree.depth), "on_frontier": False})
        row |= _live_columns(run, tree, measured[name])
        if row.get("joint_emitted") is not None:
            row["optimism"] = row["joint_emitted"] - row["recalibrated_emitted"]
    ordered = sorted(rows.values(), key=lambda row: (row["n_nodes"], row["depth"], row["tree"]))
    run.folder.write_table(CANDIDATES, records.table(ordered, records.CANDIDATES_SCHEMA))
    run.folder.mark_done(STAGE, inputs, [CANDIDATES])


def _promising(run: Run, rows: Iterable[Mapping[str, Any]]) -> list[Tree]:
    """The grown trees to run live.

    All of the acceptance frontier where `max_candidates` is 0, as in the paper. Else at most so
    many of those that replay predicts to be faster than every smaller one: others cannot come into
    the bank but by noise.
    """
    if not run.config.max_candidates:
        return [Tree.of(row["paths"]) for row in rows if row["on_frontier"]]
    grown = [(Tree.of(row["paths"]), row["replay_emitted"]) for row in rows]
    step_ms = run_costs(run).step_ms([tree for tree, _ in grown])
    rates = [emitted / ms for (_, emitted), ms in zip(grown, step_ms, strict=True)]
    kept = strict_pareto([tree.n_nodes for tree, _ in grown], rates)
    return thin_out([grown[index][0] for index in kept], run.config.max_candidates)


def live_trees(table: pa.Table) -> list[Tree]:
    """The trees of a candidates table that ran live, smallest first."""
    return [
        Tree.of(row["paths"])
        for row in table.to_pylist()
        if row["recalibrated_emitted"] is not None
    ]


def _measure(run: Run, trees: Sequence[Tree], inputs: Any) -> dict[str, list[dict[str, Any]]]:
    """Per tree id, a record per select prompt: tokens, steps, and steps reaching each depth."""
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.values())
    decoder = Decoder(run.target, run.heads, trees, run.config.sampling)
    prompts = run.splits["select"]
    run.progress.start("recalibration", len(trees) * len(prompts))
    measured: dict[str, list[dict[str, Any]]] = {}
    for index, tree in enumerate(trees):
        if tree == EMPTY:  # a token a step by definition, and the text is the trace's
            measured[tree.id] = _plain_records(run)
            run.progress.advance(len(prompts))
            continue
        if index not in known:
            texts = []
            for prompt in prompts:
                generated = decoder.generate(prompt.ids, Static(index), run.config.max_new_tokens)
                texts.append(_record(generated, tree.depth))
                run.progress.advance(1, f"{tree.id}: {generated.mean_emitted_tokens:.2f}")
            parts.write_json(index, texts)
        else:
            run.progress.advance(len(prompts))
        measured[tree.id] = parts.read_json(index)
    run.progress.done()
    return measured


def _plain_records(run: Run) -> list[dict[str, Any]]:
    lengths = read_trace(run, "select").lengths.tolist()
    return [{"tokens": n, "steps": n, "reaching": [n]} for n in lengths]


def _record(generated: Generation, depth: int) -> dict[str, Any]:
    lengths = [step.accepted_draft_tokens for step in generated.steps]
    return {
        "tokens": len(generated.tokens),
        "steps": len(lengths),
        "reaching": [sum(a >= d for a in lengths) for d in range(depth + 1)],
    }


def _live_columns(run: Run, tree: Tree, texts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    interval = mean_interval([t["tokens"] for t in texts], [t["steps"] for t in texts])
    reaching = [sum(counts) for counts in zip(*(t["reaching"] for t in texts), strict=True)]
    trace = read_trace(run, "select")
    lengths = accepted(tree, trace.ranks)
    return {
        "recalibrated_emitted": interval.value,
        "recalibrated_low": interval.low,
        "recalibrated_high": interval.high,
        "replay_emitted": step_counts(trace, lengths, walk(trace, lengths)).mean_emitted,
        "steps": sum(t["steps"] for t in texts),
        **profile_columns(reaching),
    }
