"""Time: what a step costs with each tree, and what each tree brings end to end.

Step costs are taken at fixed contexts, trees in random order, one warm-up each, and every timed
step is taken back, so all trees meet the same state. End to end, the trees that can still win run
whole prompts of the select split against plain decoding, again in random order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from entmtp_calib import records
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Ladder, Policy, Static
from entmtp_calib.provenance import hardware, hardware_fingerprint
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.recalibrate import CANDIDATES, live_trees
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import interleave, median
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE, TIMING = "time", "timing.parquet"
STEP_PART, FIRST_PROMPT_PART = 0, 1
HOPELESS = 0.85
"""A tree predicted below this share of the best one is not run end to end."""


@dataclass(frozen=True)
class Method:
    """A row label of the timing table, and the policy that is timed under it."""

    name: str
    policy: Policy
    rows: int


def time_trees(run: Run) -> None:
    """Write `timing.parquet`, a row per timed step and per timed prompt."""
    config = run.config
    inputs = {
        "text": run.text_inputs,
        "candidates": run.folder.sha256(CANDIDATES),
        "hardware": hardware_fingerprint(hardware(str(run.target.device))),
        "engine": run.target.engine,
        "settings": [config.timing_rounds, config.step_repetitions, config.context_lengths],
        "seed": config.seed,
    }
    if run.folder.is_done(STAGE, inputs):
        return
    candidates = run.folder.read_table(CANDIDATES, records.CANDIDATES_SCHEMA)
    trees = live_trees(candidates)
    decoder = Decoder(run.target, run.heads, trees, config.sampling)
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.tables())
    schema = records.TIMING_SCHEMA
    if STEP_PART not in known:
        parts.write_table(STEP_PART, records.table(time_steps(run, decoder), schema))
    steps = parts.read_table(STEP_PART, schema)
    methods = contenders(trees, candidates, step_costs(steps))
    prompts = run.splits["select"]
    decoder.warm_up(prompts[0].ids, [method.policy for method in methods])
    run.progress.start("timing prompts", len(prompts) * config.timing_rounds * len(methods))
    for number, prompt in enumerate(prompts):
        if FIRST_PROMPT_PART + number not in known:
            rows = time_prompt(run, decoder, methods, number, prompt.ids, config.timing_rounds)
            parts.write_table(FIRST_PROMPT_PART + number, records.table(rows, schema))
        else:
            run.progress.advance(config.timing_rounds * len(methods))
    run.progress.done()
    tables = [parts.read_table(n, schema) for n in range(FIRST_PROMPT_PART + len(prompts))]
    run.folder.write_table(TIMING, pa.concat_tables(tables))
    run.folder.mark_done(STAGE, inputs, [TIMING])


def time_steps(run: Run, decoder: Decoder) -> list[dict[str, Any]]:
    """Timed single steps of every tree, and of plain steps that also draft a signal's chain."""
    methods = [Method(tree.id, Static(i), tree.n_nodes + 1) for i, tree in enumerate(decoder.trees)]
    methods += [
        Method(signal_method(depth), _plain_with_signal(decoder.trees, depth), 1)
        for depth in range(1, run.heads.n_heads + 1)
    ]
    repetitions = run.config.step_repetitions
    lengths = [n for n in run.config.context_lengths if n < _longest_context(run, decoder)]
    lengths = lengths or [max(1, _longest_context(run, decoder) - 1)]
    run.progress.start("timing steps", len(lengths) * (repetitions + 1) * len(methods))
    rows = []
    for length in lengths:
        state = decoder.start(_context(run, length), methods[0].policy, run.config.max_new_tokens)
        for number, method in interleave(methods, repetitions + 1, run.config.seed + length):
            step = state.probe(method.policy)
            run.progress.advance()
            if number > 0:
                rows.append(
                    {
                        "kind": "step",
                        "tree": method.name,
                        "context_length": length,
                        "rows": method.rows,
                        "round": number,
                        "step_ms": step.step_ms,
                    }
                )
    run.progress.done()
    return rows


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


def step_costs(timing: pa.Table) -> dict[str, float]:
    """ms of a step per method: the mean over context lengths of the median over repetitions."""
    samples: dict[str, dict[int, list[float]]] = {}
    for row in timing.to_pylist():
        if row["kind"] == "step":
            by_length = samples.setdefault(row["tree"], {})
            by_length.setdefault(row["context_length"], []).append(row["step_ms"])
    return {
        name: float(np.mean([median(values) for values in by_length.values()]))
        for name, by_length in samples.items()
    }


def signal_method(depth: int) -> str:
    """The timing table's name for a plain step that first drafts the greedy chain to `depth`."""
    return f"plain+chain-{depth}"


def contenders(
    trees: Sequence[Tree], candidates: pa.Table, costs: dict[str, float]
) -> list[Method]:
    """Plain decoding, Hydra's default, and the trees whose predicted rate is near the best."""
    emitted = {row["tree"]: row["recalibrated_emitted"] for row in candidates.to_pylist()}
    rate = {tree.id: emitted[tree.id] / costs[tree.id] for tree in trees}
    best = max(rate.values())
    return [
        Method(tree.id, Static(i), tree.n_nodes + 1)
        for i, tree in enumerate(trees)
        if tree in (EMPTY, HYDRA_DEFAULT) or rate[tree.id] >= HOPELESS * best
    ]


def _plain_with_signal(trees: Sequence[Tree], depth: int) -> Policy:
    plain = list(trees).index(EMPTY)
    return Ladder(SignalSpec("expected_accepted", depth), (0.0,), (plain, plain))


def _longest_context(run: Run, decoder: Decoder) -> int:
    """Contexts that leave every tree its positions."""
    deepest = max(tree.depth for tree in decoder.trees)
    return run.target.max_positions - deepest - 1


def _context(run: Run, length: int) -> list[int]:
    """`length` tokens of real text: select prompts and what the target wrote to them."""
    trace = read_trace(run, "select")
    ids: list[int] = []
    while len(ids) < length:
        for number, prompt in enumerate(run.splits["select"]):
            rows = trace.rows_of([number])
            ids += [*prompt.ids, *trace.token[rows].tolist()]
    return ids[:length]
