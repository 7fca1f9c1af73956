"""Policies of a bank, run live on the report split, which chose nothing.

Beside what was measured stands what replay predicts from the split's trace and the measured costs:
the two must agree, and the bounds say how much more there is to gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from entmtp_calib import records
from entmtp_calib.bank import Bank
from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Policy, Static
from entmtp_calib.stages.cost import COSTS, run_costs
from entmtp_calib.stages.grow import reference_trees
from entmtp_calib.stages.recorded import TRACE
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.schedule import predict, usable
from entmtp_calib.stages.setup import Run
from entmtp_calib.steps import Generation
from entmtp_calib.task import Task
from entmtp_calib.timing import interleave, paired_bootstrap
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE, POLICIES = "report", "policies.parquet"


def report(run: Run, bank: Bank, candidates: Sequence[Tree]) -> list[dict[str, Any]]:
    """Write `policies.parquet`: every policy live on the report split, and what to compare with.

    That is plain decoding, Hydra's default and the user's trees, these by their ids.

    Args:
        candidates: the trees that the bank's policies were chosen from, for the bounds.

    Returns:
        The table's rows, for the closing summary.
    """
    inputs = {
        "text": run.text_inputs,
        "trace": run.folder.sha256(TRACE),
        "policies": {name: policy.to_dict() for name, policy in bank.policies.items()},
        "trees": [tree.to_list() for tree in (*bank.trees, *run.user_trees)],
        "candidates": [tree.id for tree in candidates],
        "costs": run.folder.sha256(COSTS),
    }
    schema = records.POLICIES_SCHEMA
    if run.folder.is_done(STAGE, inputs):
        return run.folder.read_table(POLICIES, schema).to_pylist()
    trees = list(bank.trees)
    methods: dict[str, Policy] = {"plain": Static(trees.index(EMPTY)), **bank.policies}
    for tree in [*reference_trees(run.max_depth, run.heads.n_ranks), *run.user_trees]:
        if tree not in trees:
            trees.append(tree)
        methods[tree.id] = Static(trees.index(tree))
    texts = _run_live(run, trees, methods, inputs)
    costs, trace = run_costs(run), read_trace(run, "report")
    possible = Task.of(trace, usable([*candidates, *bank.trees], costs), costs)
    predicted = predict(Task.of(trace, trees, costs), methods, possible, run.config.signal)
    rows = [{**_row(name, texts, trees), **predicted[name]} for name in methods]
    run.folder.write_table(POLICIES, records.table(rows, schema))
    run.folder.mark_done(STAGE, inputs, [POLICIES])
    return run.folder.read_table(POLICIES, schema).to_pylist()


def _run_live(
    run: Run, trees: Sequence[Tree], methods: Mapping[str, Policy], inputs: Any
) -> dict[str, list[dict[str, Any]]]:
    """Per method, a record per report prompt; methods in random order on each prompt.

    Methods that do the same at every step, such as two policies that came out as one fixed tree,
    run once, under the first one's name.
    """
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.values())
    decoder = Decoder(run.target, run.heads, trees, run.config.sampling)
    prompts = run.splits["report"]
    first: dict[Any, str] = {}
    runs_as = {name: first.setdefault(_behaviour(p), name) for name, p in methods.items()}
    names = list(first.values())
    if len(known) < len(prompts):
        decoder.warm_up(prompts[0].ids, [methods[name] for name in names])
    run.progress.start("report", len(prompts) * len(names))
    for number, prompt in enumerate(prompts):
        if number in known:
            run.progress.advance(len(names))
            continue
        done = {}
        for _, name in interleave(names, 1, run.config.seed + number):
            generated = decoder.generate(prompt.ids, methods[name], run.config.max_new_tokens)
            done[name] = _record(generated)
            run.progress.advance(1, name)
        parts.write_json(number, done)
    run.progress.done()
    texts = [parts.read_json(number) for number in range(len(prompts))]
    return {name: [done[runs_as[name]] for done in texts] for name in methods}


def _behaviour(policy: Policy) -> Any:
    """Equal for policies that do the same: the tree, where it is a fixed one by whatever name."""
    return policy if policy.signals else policy.indices


def _record(generated: Generation) -> dict[str, Any]:
    return {
        "tokens": len(generated.tokens),
        "steps": len(generated.steps),
        "prefill_seconds": generated.prefill_seconds,
        "decode_seconds": generated.decode_seconds,
        "seconds": generated.prefill_seconds + generated.decode_seconds,
        "chosen": generated.chosen,
        "switches": generated.switches,
    }


def _row(
    name: str, texts: Mapping[str, Sequence[Mapping[str, Any]]], trees: Sequence[Tree]
) -> dict[str, Any]:
    """What was measured of one method."""
    mine = texts[name]
    tokens, steps, seconds, decode_seconds = (
        sum(text[key] for text in mine) for key in ("tokens", "steps", "seconds", "decode_seconds")
    )
    chosen = [index for text in mine for index in text["chosen"]]
    share = [
        {"tree": tree.id, "share": chosen.count(index) / len(chosen)}
        for index, tree in enumerate(trees)
        if index in chosen
    ]
    return {
        "policy": name,
        "tokens_per_second_measured": tokens / seconds,
        "decode_tokens_per_second": tokens / decode_seconds,
        **_ratio("plain", mine, texts["plain"]),
        **_ratio("hydra", mine, texts.get(HYDRA_DEFAULT.id)),
        **_ratio("static", mine, texts["static"]),
        "emitted_tokens": tokens,
        "steps": steps,
        "mean_emitted_tokens": tokens / steps,
        "mean_accepted_draft_tokens": (tokens - steps) / steps,
        "seconds": seconds,
        "switches": sum(text["switches"] for text in mine),
        "share": share,
    }


def _ratio(
    name: str, mine: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Columns of the paired ratio of end-to-end rates; that to plain has the plain names."""
    if base is None:
        return {}
    ratio = paired_bootstrap(
        [text["tokens"] for text in mine],
        [text["seconds"] for text in mine],
        [text["tokens"] for text in base],
        [text["seconds"] for text in base],
    )
    low, high = ("low", "high") if name == "plain" else (f"{name}_low", f"{name}_high")
    return {f"ratio_to_{name}": ratio.value, low: ratio.low, high: ratio.high}
