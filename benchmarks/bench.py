"""How many tokens a step emits, and how fast that is, on a task's prompts.

Trees of 16 and 63 nodes grow on search prompts; on other prompts plain decoding, a chain, both
trees and Hydra's default tree then decode live, in random order on each prompt, and every text is
compared with plain decoding's. Prints one table; `--json` writes the same numbers.

    python benchmarks/bench.py --task gsm8k --data test.jsonl --prompts 40
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from entmtp_calib.decoding import Decoder
from entmtp_calib.growth import grow
from entmtp_calib.heads.validation import emitted_per_step
from entmtp_calib.policy import Static
from entmtp_calib.prompts import encode, load_prompts, split
from entmtp_calib.provenance import hardware
from entmtp_calib.records import strict_json
from entmtp_calib.stages.rollout import trace_prompt
from entmtp_calib.stages.setup import model_facts, open_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.timing import interleave, mean_interval, paired_bootstrap
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

SIZES = (4, 8, 16, 63)


def main() -> None:
    """Parse, measure, print."""
    options = _options()
    target = load_target(options.model, engine=options.engine)
    heads, facts = open_heads(options.heads, target)
    prompts = load_prompts(options.task, options.data)
    parts = split(prompts.prompts, (options.search, 0, options.prompts), options.seed)
    ids = {
        name: [encode(target.tokenizer, prompt.messages) for prompt in getattr(parts, name)]
        for name in ("search", "report")
    }
    tracer = Decoder(target, heads, [chain(min(2, heads.n_heads))])
    traces = [
        trace_prompt(tracer, tuple(prompt), options.max_new_tokens, number)
        for number, prompt in enumerate(ids["search"])
    ]
    trees = named_trees(Trace.joined(traces), heads.n_heads)
    if options.only:
        trees = {name: tree for name, tree in trees.items() if name in {"plain", *options.only}}
    texts = decode_all(target, heads, trees, ids["report"], options)
    rows = [row(name, tree, texts) for name, tree in trees.items()]
    print_rows(rows)
    document = {
        "task": options.task,
        "data": prompts.describe(),
        "prompts": len(ids["report"]),
        "max_new_tokens": options.max_new_tokens,
        "rounds": options.rounds,
        "model": model_facts(target),
        "heads": facts,
        "hardware": hardware(str(target.device)),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(strict_json(document, indent=1) + "\n")


def named_trees(trace: Trace, depth: int) -> dict[str, Tree]:
    """Plain decoding, a chain of every head, the best grown tree of each size, Hydra's default."""
    trees = {"plain": EMPTY, f"chain-{depth}": chain(depth)}
    grown = [entry.tree for d in range(1, depth + 1) for entry in grow(trace, d, max(SIZES), 32)]
    for size in SIZES:
        fitting = [tree for tree in grown if tree.n_nodes == size]
        if fitting:
            trees[f"best-{size}"] = max(fitting, key=lambda tree: emitted_per_step(trace, tree))
    if depth >= HYDRA_DEFAULT.depth:
        trees["hydra-default"] = HYDRA_DEFAULT
    return trees


def decode_all(
    target: Any,
    heads: Any,
    trees: dict[str, Tree],
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, list[dict[str, float]]]:
    """Per tree, a record per prompt: tokens, steps, seconds, and whether the text is plain's."""
    names = list(trees)
    decoder = Decoder(target, heads, list(trees.values()))
    for index in range(len(names)):
        decoder.generate(prompts[0], Static(index), 16)
    texts: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        sums = {name: {"tokens": 0, "steps": 0, "seconds": 0.0, "decode": 0.0} for name in names}
        written: dict[str, list[int]] = {}
        for _, name in interleave(names, options.rounds, options.seed + number):
            done = decoder.generate(prompt, Static(names.index(name)), options.max_new_tokens)
            written[name] = done.tokens
            sums[name]["tokens"] += len(done.tokens)
            sums[name]["steps"] += len(done.steps)
            sums[name]["decode"] += done.decode_seconds
            sums[name]["seconds"] += done.decode_seconds + done.prefill_seconds
        for name in names:
            texts[name].append({**sums[name], "same": written[name] == written["plain"]})
    return texts


def row(name: str, tree: Tree, texts: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The figures of one tree."""

    def column(of: str, key: str) -> list[float]:
        return [text[key] for text in texts[of]]

    length = mean_interval(column(name, "tokens"), column(name, "steps"))
    ratios = {
        key: paired_bootstrap(
            column(name, "tokens"),
            column(name, key),
            column("plain", "tokens"),
            column("plain", key),
        )
        for key in ("seconds", "decode")
    }
    return {
        "tree": name,
        "id": tree.id,
        "n_nodes": tree.n_nodes,
        "depth": tree.depth,
        "emitted_per_step": length,
        "accepted_draft_tokens_per_step": length.value - 1,
        "tokens_per_second": sum(column(name, "tokens")) / sum(column(name, "seconds")),
        "speedup_end_to_end": ratios["seconds"],
        "speedup_decode_only": ratios["decode"],
        "texts_equal_to_plain": int(sum(column(name, "same"))),
        "texts": len(texts[name]),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """The table."""
    print(
        f"{'tree':14} {'nodes':>5} {'emitted/step [95 %]':>22} {'tokens/s':>9} "
        f"{'x plain, end to end [95 %]':>27} {'x plain, decode only':>27} {'same text':>10}"
    )
    for r in rows:
        e, s, d = r["emitted_per_step"], r["speedup_end_to_end"], r["speedup_decode_only"]
        print(
            f"{r['tree']:14} {r['n_nodes']:5d} "
            f"{f'{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]':>22} {r['tokens_per_second']:9.2f} "
            f"{f'{s.value:.3f} [{s.low:.3f}, {s.high:.3f}]':>27} "
            f"{f'{d.value:.3f} [{d.low:.3f}, {d.high:.3f}]':>27} "
            f"{r['texts_equal_to_plain']:>5}/{r['texts']}"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--heads")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--search", type=int, default=40, help="prompts that trees grow on")
    parser.add_argument("--prompts", type=int, default=20, help="prompts that are measured")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--only", nargs="+", help="trees to run beside plain, such as best-16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
