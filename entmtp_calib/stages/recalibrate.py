"""Recalibrate: candidates decode live on the select split, each with its own drafts and mask.

Joint scoring sees a candidate inside a larger tree; here each tree stands alone. The replay
predicts the same figure from the trace; they differ only where rounding flips a near-tie. The trees
run interleaved, in random order on each prompt, so the very texts that say what they accept are
timed: they are the first round of `time`, and no tree writes a text only to be counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.decoding import Decoder
from entmtp_calib.frontier import strict_pareto
from entmtp_calib.parts import Parts
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
from entmtp_calib.timing import interleave, mean_interval
from entmtp_calib.tree import Tree

STAGE, CANDIDATES, LIVE = "recalibrate", "candidates.parquet", "live.parquet"

Texts = Mapping[str, Mapping[str, Any]]
"""Per tree id, its `timed_text` of one prompt, and the steps that reached each depth."""


def recalibrate(run: Run) -> None:
    """Write `candidates.parquet`: every candidate, with what the live ones really accepted.

    Beside it, `live.parquet` holds their texts as rows of the timing table.
    """
    trees: Sequence[Tree] | None = run.trees
    grown = None if trees is not None else run.folder.read_table(GROWN, records.CANDIDATES_SCHEMA)
    references = reference_trees(run.max_depth, run.n_ranks)
    inputs = {
        "text": run.text_inputs,
        "trace": run.folder.sha256(TRACE),
        "grown": grown and run.folder.sha256(GROWN),
        "trees": [tree.to_list() for tree in run.ungrown],
        "references": [tree.id for tree in references],
        "max_candidates": run.config.max_candidates,
        "costs": run.folder.sha256(COSTS),
    }
    if run.folder.is_done(STAGE, inputs):
        return
    parts = run.folder.partial(STAGE, inputs)
    rows = {row["tree"]: row for row in grown.to_pylist()} if grown else {}
    if trees is None:
        trees = _promising(run, rows.values())
    live = list({tree.id: tree for tree in [*references, *run.user_trees, *trees]}.values())
    texts = _run_live(run, live, parts)
    for tree in live:
        row = rows.setdefault(tree.id, {**tree_columns(tree, tree.depth), "on_frontier": False})
        row |= _live_columns(run, tree, [of_prompt[tree.id] for of_prompt in texts])
        if row.get("joint_emitted") is not None:
            row["optimism"] = row["joint_emitted"] - row["recalibrated_emitted"]
    ordered = sorted(rows.values(), key=lambda row: (row["n_nodes"], row["depth"], row["tree"]))
    run.folder.write_table(CANDIDATES, records.table(ordered, records.CANDIDATES_SCHEMA))
    timed = [timing_row(t, n, 0, of[t.id]) for n, of in enumerate(texts) for t in live]
    run.folder.write_table(LIVE, records.table(timed, records.TIMING_SCHEMA))
    run.folder.mark_done(STAGE, inputs, [CANDIDATES, LIVE])


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


def _run_live(run: Run, trees: Sequence[Tree], parts: Parts) -> list[Texts]:
    """Per select prompt, the text of every tree; finished prompts are parts."""
    known = set(parts.values())
    prompts, limit = run.splits["select"], run.config.max_new_tokens
    decoder = Decoder(run.target, run.heads, trees, run.config.sampling)
    run.progress.start("recalibration", len(trees) * len(prompts))
    if len(known) < len(prompts):
        decoder.warm_up(prompts[0].ids, [Static(index) for index in range(len(trees))])
    for number, prompt in enumerate(prompts):
        if number in known:
            run.progress.advance(len(trees))
            continue
        texts = {}
        for _, index in interleave(range(len(trees)), 1, run.config.seed + number):
            generated = decoder.generate(prompt.ids, Static(index), limit)
            texts[trees[index].id] = {
                **timed_text(generated),
                "reaching": _reaching(generated, trees[index].depth),
            }
            run.progress.advance(1, f"{trees[index].id}: {generated.mean_emitted_tokens:.2f}")
        parts.write_json(number, texts)
    run.progress.done()
    return [parts.read_json(number) for number in range(len(prompts))]


def timed_text(generated: Generation) -> dict[str, Any]:
    """Tokens, steps and seconds of a whole text, the prompt's own pass included."""
    return {
        "tokens": len(generated.tokens),
        "steps": len(generated.steps),
        "seconds": generated.prefill_seconds + generated.decode_seconds,
    }


def timing_row(tree: Tree, prompt: int, turn: int, text: Mapping[str, Any]) -> dict[str, Any]:
    """A `timed_text`'s row of the timing table; `turn` is the round."""
    figures = {name: text[name] for name in ("tokens", "steps", "seconds")}
    row = {"kind": "end_to_end", "tree": tree.id, "rows": tree.n_nodes + 1}
    return {**row, "prompt": prompt, "round": turn, **figures}


def _reaching(generated: Generation, depth: int) -> list[int]:
    """[depth + 1], the steps that accepted at least 0, 1, ... draft tokens."""
    lengths = [step.accepted_draft_tokens for step in generated.steps]
    return [sum(length >= d for length in lengths) for d in range(depth + 1)]


def _live_columns(run: Run, tree: Tree, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
