"""Time: what each tree brings end to end.

The texts of `recalibrate` are the first round. In further ones the trees that can still come into
the bank run whole prompts of the select split again, in random order on each prompt; a tree that
proves to be surely slower than one of no more nodes (see `racing`) is not run on the prompts that
are left. Plain decoding, which has the fewest nodes, and the fastest tree so far always run to the
end. Hydra's default tree has no part of its own: where it is slow, the first round is all that it
runs. The timing table holds all these runs and the timed steps they are explained by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.decoding import Decoder
from entmtp_calib.parts import Parts
from entmtp_calib.policy import Static
from entmtp_calib.racing import beaten, runs_by_method
from entmtp_calib.stages.cost import COSTS
from entmtp_calib.stages.recalibrate import CANDIDATES, LIVE, live_trees, timed_text, timing_row
from entmtp_calib.stages.recorded import TIMING
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import interleave
from entmtp_calib.tree import Tree

STAGE = "time"


def time_trees(run: Run) -> None:
    """Write `timing.parquet`: the timed steps, and a row per timed prompt."""
    schema = records.TIMING_SCHEMA
    inputs = {
        "text": run.text_inputs,
        "live": run.folder.sha256(LIVE),
        "costs": run.folder.sha256(COSTS),
        "rounds": run.config.timing_rounds,
        "seed": run.config.seed,
    }
    if run.folder.is_done(STAGE, inputs):
        return
    parts = run.folder.partial(STAGE, inputs)
    costs, live = (run.folder.read_table(name, schema) for name in (COSTS, LIVE))
    raced = _race(run, parts, live.to_pylist()) if run.config.timing_rounds > 1 else []
    run.folder.write_table(TIMING, pa.concat_tables([costs, live, *raced]))
    run.folder.mark_done(STAGE, inputs, [TIMING])


def _race(run: Run, parts: Parts, rows: list[dict[str, Any]]) -> list[pa.Table]:
    """The rounds after the first one, whose rows are given: a table per round and prompt."""
    known = set(parts.tables())
    trees = live_trees(run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA))
    decoder = Decoder(run.target, run.heads, trees, run.config.sampling)
    prompts = run.splits["select"]
    n_parts = (run.config.timing_rounds - 1) * len(prompts)
    left, tables = still_racing(trees, rows), []
    run.progress.start("timing prompts", n_parts * len(trees))
    if len(known) < n_parts:
        decoder.warm_up(prompts[0].ids, [Static(trees.index(tree)) for tree in left])
    for part in range(n_parts):
        if part not in known:
            timed = _time_prompt(run, decoder, left, part)
            parts.write_table(part, records.table(timed, records.TIMING_SCHEMA))
        tables.append(parts.read_table(part, records.TIMING_SCHEMA))
        rows = [*rows, *tables[-1].to_pylist()]
        left = still_racing(left, rows)
        run.progress.advance(len(trees), f"{len(left)} trees in the race")
    run.progress.done()
    return tables


def still_racing(trees: Sequence[Tree], rows: Sequence[dict[str, Any]]) -> list[Tree]:
    """Those of the trees, which have all had the same runs, that are not beaten yet."""
    runs = runs_by_method(rows)
    out = beaten({t.id: runs[t.id] for t in trees}, {t.id: t.n_nodes for t in trees})
    return [tree for tree in trees if tree.id not in out]


def _time_prompt(
    run: Run, decoder: Decoder, trees: Sequence[Tree], part: int
) -> list[dict[str, Any]]:
    """Every tree on one whole prompt, in random order."""
    prompts, limit = run.splits["select"], run.config.max_new_tokens
    turn, number = divmod(part, len(prompts))
    rows = []
    for _, tree in interleave(trees, 1, run.config.seed + len(prompts) + part):
        policy = Static(decoder.trees.index(tree))
        generated = decoder.generate(prompts[number].ids, policy, limit)
        rows.append(timing_row(tree, number, turn + 1, timed_text(generated)))
    return rows
