"""What a scheduler's step costs beside drafting and verifying, against the size of the bank.

Per bank size, in random order: reading a signal off a row of logits (base_top1, entropy) or off
what is drafted already (chain_value); each policy's choice among the trees, its values given; the
switch, which is looking up the chosen tree's plan and putting its tokens together from what is
drafted already; that beyond the same where the tree is the only one; and the whole decision by
base_top1, as decoding makes it, where it is for plain decoding. Prints medians and 95th
percentiles; `--json` writes the same numbers.

    python benchmarks/switching.py --repetitions 2000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from entmtp_calib.drafting import Draft, PolicyProposer, Scheme, Start
from entmtp_calib.errors import EntmtpError
from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.plan import Plan
from entmtp_calib.policy import DRAFT_ON, Hysteresis, Ladder, Policy, Staged, Static
from entmtp_calib.provenance import hardware
from entmtp_calib.records import strict_json
from entmtp_calib.sampling import entropy, top1_probability
from entmtp_calib.signals import SignalSpec, signal_value
from entmtp_calib.stages.setup import open_heads
from entmtp_calib.targets.load import load_target
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, Tree

SIZES = (2, 4, 8, 16, 32, 64)
MAX_NODES, DEPTH, VOCAB, HIDDEN = 64, 4, 49152, 576
TARGET_MS = 0.1
FLAT = 1.5  # largest over smallest median that still counts as flat,
FLAT_MS = 0.01  # as does a difference below this one
TOP1, ENTROPY, CHAIN = map(SignalSpec.parse, ("base_top1", "entropy", "chain_value:2"))
Work = Callable[[], Any]


def main() -> None:
    """Parse, measure, print."""
    options = _options()
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    with torch.inference_mode():
        heads, facts = load_heads()
        start = Start(1, 4 * torch.randn(facts["vocab_size"]), torch.randn(HIDDEN), MAX_NODES)
        banks = {size: Bank.of_size(size, heads, start, draw) for size in options.sizes}
        times = measure(banks, options.repetitions, draw)
    rows = [summary(what, times) for what in sorted(next(iter(times.values())))]
    print(
        f"{facts['name']}, {facts['vocab_size']} tokens; {options.repetitions} repetitions, "
        f"{torch.get_num_threads()} threads; us, median (95th percentile)\n"
    )
    print_rows(rows, options.sizes)
    document = {
        "heads": facts,
        "repetitions": options.repetitions,
        "sizes": options.sizes,
        "target_ms": TARGET_MS,
        "hardware": hardware(),
        "rows": rows,
    }
    if options.json:
        options.json.write_text(strict_json(document, indent=1) + "\n")


def load_heads() -> tuple[Heads, dict[str, Any]]:
    """The default model's heads, or random ones of its size where it is not installed."""
    try:
        target = load_target(None)
        heads, facts = open_heads(None, target)
        return heads, {"name": facts["name"], "vocab_size": target.vocab_size}
    except EntmtpError:
        embedding = torch.randn(VOCAB, HIDDEN)
        config = HeadsConfig("hydra", DEPTH, HIDDEN, VOCAB)
        heads = Heads(config, embedding, embedding).eval().requires_grad_(False)
        return heads, {"name": "random heads", "vocab_size": VOCAB}


@dataclass(frozen=True)
class Bank:
    """Random trees of evenly spaced sizes, so that banks of all sizes switch to as many rows.

    Attributes:
        policies: by name, each over all the trees it can use.
        draft: of the ladder, with all its trees drafted to the end.
        alone: per tree the same where it is the only one.
        proposer: of a ladder that always ends at plain decoding.
    """

    plans: list[Plan]
    policies: dict[str, Policy]
    draft: Draft
    alone: list[Draft]
    proposer: PolicyProposer
    start: Start

    @classmethod
    def of_size(cls, size: int, heads: Heads, start: Start, draw: random.Random) -> Bank:
        """A bank of so many trees."""
        nodes = [round(MAX_NODES * (number + 0.5) / size) for number in range(size)]
        trees = [random_tree(max(1, n), draw) for n in nodes]
        plans = [Plan(compile_tree(tree), torch.device("cpu")) for tree in [EMPTY, *trees]]
        chosen = tuple(range(1, size + 1))
        policies: dict[str, Policy] = {
            "ladder": Ladder(TOP1, ranges(size), chosen),
            "hysteresis": Hysteresis(TOP1, chosen[0], chosen[-1], 0.6, 0.4),
            "staged": staged(chosen),
        }
        plain = Ladder(TOP1, tuple(2 + t for t in ranges(size)), (0, *chosen[1:]))

        def drafted(policy: Policy) -> Draft:
            draft = Draft(Scheme(policy, plans, heads), start)
            draft.draft_to(DEPTH)
            return draft

        return cls(
            plans,
            policies,
            drafted(policies["ladder"]),
            [drafted(Static(index)) for index in chosen],
            PolicyProposer(Scheme(plain, plans, heads)),
            start,
        )

    def works(self, draw: random.Random) -> dict[str, Work]:
        """What is timed once per repetition, with values drawn anew."""
        logits, plans, value = self.start.root_logits, self.plans, draw.random()
        number = draw.randrange(1, len(plans))
        chain_probs = self.draft.chain_probs
        one = self.alone[number - 1]
        works: dict[str, Work] = {
            "clock alone": lambda: None,
            "signal base_top1": lambda: signal_value(TOP1, top1_probability(logits), 0.0, ()),
            "signal chain_value:2": lambda: signal_value(CHAIN, 0.0, 0.0, chain_probs),
            "signal entropy": lambda: signal_value(ENTROPY, 0.0, entropy(logits), ()),
        }
        for name, policy in self.policies.items():
            works[f"choice of {name}"] = partial(policy.choose, 1, lambda spec: value)
        works["switch"] = lambda: self.draft.tokens(plans[number])
        works["the only tree"] = lambda: one.tokens(plans[number])
        works["whole decision for plain"] = lambda: self.proposer.propose(self.start)
        return works


def random_tree(n_nodes: int, draw: random.Random) -> Tree:
    """A tree grown node by node, each at a random place."""
    tree = EMPTY
    while tree.n_nodes < n_nodes:
        tree = tree.with_node(draw.choice(tree.growth_candidates(DEPTH, 10)))
    return tree


def ranges(n: int) -> tuple[float, ...]:
    """Thresholds that cut 0 to 1 into n ranges."""
    return tuple((np.arange(1, n) / n).tolist())


def staged(chosen: Sequence[int]) -> Staged:
    """A policy with its trees spread over the levels; above each level's ranges it drafts on."""
    levels = [part.tolist() for part in np.array_split(chosen, DEPTH) if len(part)]
    actions = [(DRAFT_ON,), *((*level, DRAFT_ON) for level in levels[:-1]), tuple(levels[-1])]
    return Staged(tuple(ranges(len(level)) for level in actions), tuple(actions))


def measure(
    banks: dict[int, Bank], repetitions: int, draw: random.Random
) -> dict[int, dict[str, list[float]]]:
    """Per bank size and work, ms of each repetition, after a tenth as many to warm up."""
    times: dict[int, dict[str, list[float]]] = {size: {} for size in banks}
    for number in range(-repetitions // 10, repetitions):
        for size in draw.sample(list(banks), len(banks)):
            works = banks[size].works(draw)
            for what in draw.sample(list(works), len(works)):
                work = works[what]
                started = perf_counter_ns()
                work()
                elapsed = perf_counter_ns() - started
                if number >= 0:
                    times[size].setdefault(what, []).append(elapsed / 1e6)
    for each in times.values():
        pairs = zip(each["switch"], each.pop("the only tree"), strict=True)
        each["switch beyond one tree"] = [switch - alone for switch, alone in pairs]
    return times


def summary(what: str, times: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Medians and 95th percentiles per size in ms, and whether they meet the target."""
    medians = {size: float(np.median(each[what])) for size, each in times.items()}
    least, most = min(medians.values()), max(medians.values())
    return {
        "what": what,
        "median_ms": medians,
        "p95_ms": {size: float(np.quantile(each[what], 0.95)) for size, each in times.items()},
        "ratio": most / least if least > 0 else None,
        "flat": most - least < FLAT_MS or 0 < most <= FLAT * least,
        "under_target": most < TARGET_MS,
    }


def print_rows(rows: list[dict[str, Any]], sizes: Sequence[int]) -> None:
    """The table: per bank size the median and, in brackets, the 95th percentile."""
    print(f"{'trees in the bank':27}" + "".join(f"{size:>15}" for size in sizes) + "  max/min")
    for row in rows:
        cells = (f"{1000 * row['median_ms'][n]:.1f} ({1000 * row['p95_ms'][n]:.1f})" for n in sizes)
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        print(f"{row['what']:27}" + "".join(f"{cell:>15}" for cell in cells) + f"{ratio:>9}")
    print()
    slow = [row["what"] for row in rows if not row["under_target"]]
    uneven = [row["what"] for row in rows if not row["flat"]]
    print(f"medians of {TARGET_MS} ms and more: {', '.join(slow) or 'none'}")
    print(f"growing with the bank (x {FLAT} and {FLAT_MS} ms): {', '.join(uneven) or 'none'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
