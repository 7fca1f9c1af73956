"""Policies of a bank: fitted by replay on the traces, then run live on the report split.

Thresholds are fitted on search and select texts under the measured costs; the report split, which
chose nothing, gives the final figures beside the hindsight oracle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from entmtp_calib import records
from entmtp_calib.bank import Bank
from entmtp_calib.decoding import Decoder, Generation
from entmtp_calib.fitting import Fit, fit_hysteresis, fit_ladder, fit_static
from entmtp_calib.policy import Policy, Static
from entmtp_calib.replay import accepted, oracle_ms, prompt_ms, walk_policy
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.grow import reference_trees
from entmtp_calib.stages.rollout import TRACE, read_trace
from entmtp_calib.stages.setup import Run
from entmtp_calib.stages.time import signal_method
from entmtp_calib.timing import interleave, paired_bootstrap
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE, POLICIES = "policies", "policies.parquet"


@dataclass(frozen=True)
class Costs:
    """Measured step costs in ms: per tree, and per depth of a signal's chain beyond plain."""

    step_ms: np.ndarray
    chain_ms: tuple[float, ...]

    @classmethod
    def of(cls, trees: Sequence[Tree], costs: Mapping[str, float], n_heads: int) -> Costs:
        """From the timing stage's cost per method."""
        plain = costs[EMPTY.id]
        chain = [max(0.0, costs[signal_method(d)] - plain) for d in range(1, n_heads + 1)]
        return cls(np.array([costs[tree.id] for tree in trees]), (0.0, *chain))

    def signal_ms(self, trees: Sequence[Tree], depth: int) -> np.ndarray:
        """[K], what a chain to `depth` adds to a step of each tree, which reuses its own levels."""
        levels = np.diff(self.chain_ms)
        return np.array([levels[min(tree.depth, depth) : depth].sum() for tree in trees])


def fit_policies(
    trace: Trace, trees: Sequence[Tree], costs: Costs
) -> tuple[dict[str, Fit], dict[str, str]]:
    """The best static, ladder and hysteresis policy, and a line each on how it was found."""
    lengths = np.stack([accepted(tree, trace.ranks) for tree in trees])
    speculates = np.array([tree.n_nodes > 0 for tree in trees])
    fits = {"static": fit_static(trace, lengths, costs.step_ms)}
    for name, fit in (("ladder", fit_ladder), ("hysteresis", fit_hysteresis)):
        options = [
            fit(
                trace,
                lengths,
                costs.step_ms,
                signal,
                costs.signal_ms(trees, signal.chain_depth),
                speculates,
            )
            for signal in candidate_signals(max(tree.depth for tree in trees))
        ]
        # By texts not fitted on: in-sample rates favour whatever was searched hardest.
        fits[name] = max(options, key=lambda option: option.held_out_gain)
    return fits, {name: _explain(fit) for name, fit in fits.items()}


def candidate_signals(depth: int) -> list[SignalSpec]:
    """Signals worth their drafting: the first levels of the greedy chain, and past acceptance."""
    chain = [SignalSpec("path_value", d) for d in range(1, min(depth, 2) + 1)]
    return [*chain, SignalSpec("acceptance_average")]


def report(run: Run, bank: Bank, costs: Costs) -> list[dict[str, Any]]:
    """Write `policies.parquet`: plain, Hydra's default and every policy, live on the report split.

    Returns:
        The table's rows, for the closing summary.
    """
    inputs = {
        "text": run.text_inputs,
        "trace": run.folder.sha256(TRACE),
        "policies": {name: policy.to_dict() for name, policy in bank.policies.items()},
        "trees": [tree.to_list() for tree in bank.trees],
        "costs": costs.step_ms.tolist(),
    }
    schema = records.POLICIES_SCHEMA
    if run.folder.is_done(STAGE, inputs):
        return run.folder.read_table(POLICIES, schema).to_pylist()
    trees = list(bank.trees)
    methods: dict[str, Policy] = {"plain": Static(trees.index(EMPTY)), **bank.policies}
    if HYDRA_DEFAULT in reference_trees(run.max_depth, run.heads.n_ranks):
        if HYDRA_DEFAULT not in trees:
            trees.append(HYDRA_DEFAULT)
        methods["hydra-default"] = Static(trees.index(HYDRA_DEFAULT))
    texts = _run_live(run, trees, methods, inputs)
    trace = read_trace(run, "report")
    rows = [_row(name, texts, trees, trace, methods[name], bank, costs) for name in methods]
    run.folder.write_table(POLICIES, records.table(rows, schema))
    run.folder.mark_done(STAGE, inputs, [POLICIES])
    return run.folder.read_table(POLICIES, schema).to_pylist()


def _run_live(
    run: Run, trees: Sequence[Tree], methods: Mapping[str, Policy], inputs: Any
) -> dict[str, list[dict[str, Any]]]:
    """Per method, a record per report prompt; methods in random order on each prompt."""
    parts = run.folder.partial(STAGE, inputs)
    known = set(parts.values())
    decoder = Decoder(run.target, run.heads, trees, run.config.sampling)
    prompts = run.splits["report"]
    texts: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    decoder.warm_up(prompts[0].ids, methods.values())
    run.progress.start("report", len(prompts) * len(methods))
    for number, prompt in enumerate(prompts):
        if number not in known:
            done = {}
            for _, name in interleave(list(methods), 1, run.config.seed + number):
                generated = decoder.generate(prompt.ids, methods[name], run.config.max_new_tokens)
                done[name] = _record(generated)
                run.progress.advance(1, name)
            parts.write_json(number, done)
        else:
            run.progress.advance(len(methods))
        for name, record in parts.read_json(number).items():
            texts[name].append(record)
    run.progress.done()
    return texts


def _record(generated: Generation) -> dict[str, Any]:
    chosen = [step.tree for step in generated.steps if step.rows]
    return {
        "tokens": len(generated.tokens),
        "steps": len(generated.steps),
        "seconds": generated.prefill_seconds + generated.decode_seconds,
        "chosen": chosen,
        "switches": sum(a != b for a, b in pairwise(chosen)),
    }


def _row(
    name: str,
    texts: Mapping[str, Sequence[Mapping[str, Any]]],
    trees: Sequence[Tree],
    trace: Trace,
    policy: Policy,
    bank: Bank,
    costs: Costs,
) -> dict[str, Any]:
    mine, plain = texts[name], texts["plain"]
    tokens, steps = sum(t["tokens"] for t in mine), sum(t["steps"] for t in mine)
    seconds = sum(t["seconds"] for t in mine)
    ratio = paired_bootstrap(
        [t["tokens"] for t in mine],
        [t["seconds"] for t in mine],
        [t["tokens"] for t in plain],
        [t["seconds"] for t in plain],
    )
    chosen = [index for t in mine for index in t["chosen"]]
    share = [
        {"tree": tree.id, "share": chosen.count(index) / len(chosen)}
        for index, tree in enumerate(trees)
        if index in chosen
    ]
    return {
        "policy": name,
        "tokens_per_second_measured": tokens / seconds,
        "ratio_to_plain": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "emitted_tokens": tokens,
        "steps": steps,
        "mean_emitted_tokens": tokens / steps,
        "mean_accepted_draft_tokens": (tokens - steps) / steps,
        "seconds": seconds,
        "switches": sum(t["switches"] for t in mine),
        "share": share,
        **_replayed(trace, policy, bank, costs),
    }


def _replayed(trace: Trace, policy: Policy, bank: Bank, costs: Costs) -> dict[str, Any]:
    """What replay predicts for a policy over the bank's trees, and the oracle's bound.

    Predicted rates are of the steps alone; the prompt's own pass is no part of a trace.
    """
    trees, n = bank.trees, len(trace)
    if max(policy.indices) >= len(trees):
        return {}
    lengths = np.stack([accepted(tree, trace.ranks) for tree in trees])
    static_ms = min(_policy_ms(trace, lengths, Static(k), trees, costs) for k in range(len(trees)))
    best_ms = float(oracle_ms(trace, lengths, costs.step_ms).sum())
    mine_ms = _policy_ms(trace, lengths, policy, trees, costs)
    possible = n / best_ms - n / static_ms
    return {
        "tokens_per_second_predicted": 1000 * n / mine_ms,
        "oracle_tokens_per_second": 1000 * n / best_ms,
        "capture": (n / mine_ms - n / static_ms) / possible if possible > 0 else None,
    }


def _policy_ms(
    trace: Trace, lengths: np.ndarray, policy: Policy, trees: Sequence[Tree], costs: Costs
) -> float:
    speculates = np.array([tree.n_nodes > 0 for tree in trees])
    chosen = walk_policy(trace, lengths, policy, speculates).chosen
    depth = policy.signal.chain_depth if policy.signal else 0
    price = costs.step_ms + costs.signal_ms(trees, depth)
    return float(prompt_ms(trace, chosen, price).sum())


def _explain(fit: Fit) -> str:
    policy = fit.policy
    if policy.signal is None:
        return "the best static tree; no signal gained on texts it was not fitted on"
    depth = f" to depth {policy.signal.depth}" if policy.signal.depth else ""
    gain = 100 * fit.held_out_gain
    return f"{policy.signal.kind}{depth}, {gain:+.1f} % over the best static tree on held-out texts"
