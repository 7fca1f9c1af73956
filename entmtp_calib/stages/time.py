"""Time: what each tree brings end to end.

The trees that can still win run whole prompts of the select split against plain decoding, in random
order on each prompt. The timing table holds these runs and the timed steps they are explained by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.costs import Costs
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Policy, Static
from entmtp_calib.stages.cost import COSTS, run_costs
from entmtp_calib.stages.recalibrate import CANDIDATES, live_trees
from entmtp_calib.stages.recorded import TIMING
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import interleave
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE = "time"
HOPELESS = 0.85
"""A tree predicted below this share of the best one is not run end to end."""


@dataclass(frozen=True)
class Method:
    """A row label of the timing table, and the policy that is timed under it."""

    name: str
    policy: Policy
    rows: int


def time_trees(run: Run) -> None:
    """Write `timing.parquet`: the timed steps, and a row per timed prompt."""
    config, schema = run.config, records.TIMING_SCHEMA
    inputs = {
        "text": run.text_inputs,
        "candidates": run.folder.sha256(CANDIDATES),
        "costs": run.folder.sha256(COSTS),
        "rounds": config.timing_rounds,
        "seed": config.seed,
    }
    if run.folder.is_done(STAGE, inputs):
        return
    candidates = run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA)
    trees = live_trees(candidates)
    decoder = Decoder(run.target, run.heads, trees, config.sampling)
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.tables())
    methods = contenders(trees, candidates, run_costs(run))
    prompts = run.splits["select"]
    decoder.warm_up(prompts[0].ids, [method.policy for method in methods])
    run.progress.start("timing prompts", len(prompts) * config.timing_rounds * len(methods))
    for number, prompt in enumerate(prompts):
        if number not in known:
            rows = time_prompt(run, decoder, methods, number, prompt.ids, config.timing_rounds)
            parts.write_table(number, records.table(rows, schema))
        else:
            run.progress.advance(config.timing_rounds * len(methods))
    run.progress.done()
    tables = [parts.read_table(n, schema) for n in range(len(prompts))]
    run.folder.write_table(
        TIMING, pa.concat_tables([run.folder.read_table(COSTS, schema), *tables])
    )
    run.folder.mark_done(STAGE, inputs, [TIMING])


def time_prompt(
    run: Run,
    decoder: Decoder,
    methods: Sequence[Method],
    number: int,
    prompt_ids: Sequence[int],
    rounds: int,
) -> list[dict[str, Any]]:
    """Every method on one whole prompt, prefill included, in random order per round."""
    rows = []
    for turn, method in interleave(methods, rounds, run.config.seed + number):
        generated = decoder.generate(prompt_ids, method.policy, run.config.max_new_tokens)
        rows.append(
            {
                "kind": "end_to_end",
                "tree": method.name,
                "rows": method.rows,
                "prompt": number,
                "round": turn,
                "tokens": len(generated.tokens),
                "steps": len(generated.steps),
                "seconds": generated.prefill_seconds + generated.decode_seconds,
            }
        )
        run.progress.advance(1, method.name)
    return rows


def contenders(trees: Sequence[Tree], candidates: pa.Table, costs: Costs) -> list[Method]:
    """Plain decoding, Hydra's default, and the trees whose predicted rate is near the best."""
    emitted = {row["tree"]: row["recalibrated_emitted"] for row in candidates.to_pylist()}
    step_ms = costs.step_ms(trees)
    rate = [emitted[tree.id] / ms for tree, ms in zip(trees, step_ms, strict=True)]
    return [
        Method(tree.id, Static(i), tree.n_nodes + 1)
        for i, tree in enumerate(trees)
        if tree in (EMPTY, HYDRA_DEFAULT) or rate[i] >= HOPELESS * max(rate)
    ]
