"""What a step costs on a GPU, for a model of Vicuna-7B's shape with heads of Hydra++'s shape.

In one interleaved run for the engine with recorded graphs and the one without: steps by rows and
context, drafting by depth and parents, and switching trees; then plain decoding beside what reading
the weights takes at the bandwidth measured here. Writes costs.parquet (of the graphs;
costs-transformers.parquet of the other), which `entmtp simulate --costs` takes, and gpu.json;
prints a table.

    python benchmarks/gpu.py --out artifacts/gpu
    python benchmarks/gpu.py --out FOLDER --device cpu --tiny
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from random_model import HEADS, TINY, VICUNA_7B, Engine, Shape, make_engines, make_network

from entmtp_calib import records
from entmtp_calib.costs import LEVEL, STEP
from entmtp_calib.decoding import Decoder, Decoding
from entmtp_calib.policy import Ladder, Policy, Static
from entmtp_calib.provenance import hardware
from entmtp_calib.signals import SignalSpec
from entmtp_calib.targets.load import resolve_device
from entmtp_calib.timing import Clock, interleave, median
from entmtp_calib.tree import EMPTY

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
PARENTS = (1, 2, 4, 8, 16, 32)
SWITCH_ROWS = (24, 32)
NEVER = 1e9  # accepted draft tokens that no average reaches
WITH_HEADS: Policy = Ladder(SignalSpec("acceptance_average"), (NEVER,), (0, 1))
PLAIN_WITH_HEADS = "plain with heads"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model, measure, write, print."""
    options = _options(arguments)
    started = time.perf_counter()
    device, shape = resolve_device(options.device), TINY if options.tiny else VICUNA_7B
    torch.manual_seed(options.seed)
    network = make_network(shape, device, getattr(torch, options.dtype))
    engines = make_engines(network, shape, ROWS)
    rows: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    switches: dict[str, list[float]] = {engine.name: [] for engine in engines}
    states: dict[str, Decoding] = {}
    with torch.no_grad():
        for context in shape.contexts:
            states.clear()  # their caches are lent to the next ones
            states |= {engine.name: start(engine, context, shape) for engine in engines}
            time_steps(engines, states, context, options, rows)
            time_levels(engines, states, context, options, rows)
        for engine in engines:
            switches[engine.name] += time_switches(states[engine.name], options.repetitions)
        texts = [time_text(engine, shape) for engine in engines]
        floor = plain_floor(network, shape, device)
    document = {
        "shape": vars(shape) | {"contexts": list(shape.contexts)},
        "dtype": options.dtype,
        "seed": options.seed,
        "repetitions": options.repetitions,
        "hardware": hardware(str(device)),
        "torch": torch.__version__,
        "step_ms": {name: medians(rows[name], STEP) for name in rows},
        "level_ms": {name: medians(rows[name], LEVEL) for name in rows},
        "switch_ms": {name: median(switches[name]) for name in switches},
        "plain": [text | floor for text in texts],
        "seconds": time.perf_counter() - started,
    }
    write(options.out, rows, document)
    show(document, shape)


def start(engine: Engine, context: int, shape: Shape) -> Decoding:
    """A text of random tokens, whose heads follow it."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, shape.vocab, (context,), generator=generator).tolist()
    return engine.decoder.start(ids, Static(len(ROWS) - 1), 8)


def time_steps(
    engines: Sequence[Engine],
    states: dict[str, Decoding],
    context: int,
    options: argparse.Namespace,
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """Steps of every number of rows; plain decoding with and without heads that follow."""
    methods: list[tuple[str, Policy, int]] = [
        (tree.id, Static(k), tree.n_nodes + 1) for k, tree in enumerate(engines[0].decoder.trees)
    ]
    methods.append((PLAIN_WITH_HEADS, WITH_HEADS, 1))
    jobs = [(engine.name, method) for engine in engines for method in methods]
    for turn, (name, (tree, policy, n_rows)) in interleave(jobs, options.repetitions + 1, context):
        step = states[name].probe(policy)
        if turn:  # the first round records and warms up
            rows[name].append(
                {
                    "kind": STEP,
                    "tree": tree,
                    "context_length": context,
                    "rows": n_rows,
                    "round": turn,
                    "step_ms": step.step_ms,
                    "draft_ms": step.draft_ms,
                }
            )


def time_levels(
    engines: Sequence[Engine],
    states: dict[str, Decoding],
    context: int,
    options: argparse.Namespace,
    rows: dict[str, list[dict[str, Any]]],
) -> None:
    """Head calls for 1 to many parents at each depth, behind a whole step as in decoding."""
    jobs = [(engine, parents) for engine in engines for parents in PARENTS]
    for turn, (engine, parents) in interleave(jobs, options.repetitions + 1, context):
        state = states[engine.name]
        state.probe(WITH_HEADS)
        for depth in range(1, HEADS + 1):
            n_paths = parents if depth > 1 else 1
            paths = torch.randint(
                0, engine.target.vocab_size, (n_paths, depth), device=engine.target.device
            )
            began = state.clock.now()
            _, probs = engine.heads.draft_level(depth, state.head_state.vector, paths, 1)
            float(probs[0, 0])  # as a policy reads it
            ended = state.clock.now()
            if turn:
                rows[engine.name].append(
                    {
                        "kind": LEVEL,
                        "depth": depth,
                        "context_length": context,
                        "rows": n_paths,
                        "round": turn,
                        "draft_ms": 1000 * (ended - began),
                    }
                )


def time_switches(state: Decoding, repetitions: int) -> list[float]:
    """ms that a step with another tree than before takes beyond one with the same."""
    pair = [ROWS.index(n) for n in SWITCH_ROWS]
    ms: dict[tuple[int, int], list[float]] = {}
    order = [pair[0], pair[0], pair[1], pair[1]] * (repetitions + 2)
    for number, (before, after) in enumerate(itertools.pairwise(order)):
        step = state.probe(Static(after))
        if number >= 4:
            ms.setdefault((before, after), []).append(step.step_ms)
    return [
        median(ms[other, tree]) - median(ms[tree, tree])
        for other, tree in itertools.permutations(pair)
    ]


def time_text(engine: Engine, shape: Shape) -> dict[str, Any]:
    """Plain decoding of a text, without heads."""
    decoder = Decoder(engine.target, None, [EMPTY])
    prompt = list(range(1, shape.contexts[0] + 1))
    prompt = [token % shape.vocab for token in prompt]
    decoder.warm_up(prompt, [Static(0)])
    decoder.generate(prompt, Static(0), shape.tokens)
    generated = decoder.generate(prompt, Static(0), shape.tokens)
    return {
        "engine": engine.name,
        "tokens_per_second": len(generated.tokens) / generated.decode_seconds,
        "prefill_seconds": generated.prefill_seconds,
    }


def plain_floor(network: Any, shape: Shape, device: torch.device) -> dict[str, float]:
    """Tokens per second, were reading weights, keys and values all that took time."""
    weights = sum(weight.nbytes for weight in network.parameters())
    weights -= network.get_input_embeddings().weight.nbytes  # one row of it is read
    width = 2 * shape.layers * shape.hidden * network.dtype.itemsize
    n_bytes = weights + width * (shape.contexts[0] + shape.tokens // 2)
    bandwidth = read_bandwidth(shape.read_bytes, device)
    return {
        "bytes_per_token": n_bytes,
        "bytes_per_second": bandwidth,
        "floor_tokens_per_second": bandwidth / n_bytes,
    }


def read_bandwidth(n_bytes: int, device: torch.device) -> float:
    """Bytes per second of a sum over memory, the best of ten."""
    values, clock = torch.ones(n_bytes // 4, device=device), Clock(str(device))
    seconds = []
    for _ in range(10):
        began = clock.now()
        values.sum()
        seconds.append(clock.now() - began)
    return n_bytes / min(seconds)


def medians(rows: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The median time of what was timed alike; of a step, without its drafting."""
    times: dict[tuple[Any, ...], list[float]] = {}
    names = ("context_length", "tree", "rows") if kind == STEP else ("depth", "rows")
    for row in rows:
        if row["kind"] == kind:
            ms = row["step_ms"] - row["draft_ms"] if kind == STEP else row["draft_ms"]
            times.setdefault(tuple(row[name] for name in names), []).append(ms)
    return [dict(zip(names, key, strict=True)) | {"ms": median(ms)} for key, ms in times.items()]


def write(folder: Path, rows: dict[str, list[dict[str, Any]]], document: dict[str, Any]) -> None:
    """A cost table per engine, and the figures as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, timed) in enumerate(rows.items()):
        file = folder / ("costs.parquet" if number == 0 else f"costs-{name}.parquet")
        pq.write_table(records.table(timed, records.TIMING_SCHEMA), file)
    (folder / "gpu.json").write_text(records.strict_json(document, indent=1) + "\n")


def show(document: dict[str, Any], shape: Shape) -> None:
    """The table."""
    for engine, steps in document["step_ms"].items():
        # Of the two steps of one row, that of a policy which might have drafted.
        ms = {(s["context_length"], s["rows"]): s["ms"] for s in steps if s["tree"] != EMPTY.id}
        print(f"\n{engine}: ms of a step without its drafting, and over that of one row")
        print("rows".rjust(6) + "".join(f"{f'context {n}':>20}" for n in shape.contexts))
        for n in ROWS:
            cells = (f"{ms[c, n]:.3f} ({ms[c, n] / ms[c, 1]:.2f})" for c in shape.contexts)
            print(f"{n:6}" + "".join(f"{cell:>20}" for cell in cells))
        levels = {(r["depth"], r["rows"]): r["ms"] for r in document["level_ms"][engine]}
        print("ms of drafting by parents " + "".join(f"{n:>9}" for n in PARENTS))
        for depth in range(1, HEADS + 1):
            shown = (f"{levels[depth, n]:9.3f}" for n in PARENTS if (depth, n) in levels)
            print(f"{f'depth {depth}':>26}" + "".join(shown))
        print(f"switching trees: {document['switch_ms'][engine]:+.3f} ms")
    for text in document["plain"]:
        floor = text["floor_tokens_per_second"]
        print(
            f"plain decoding, {text['engine']}: {text['tokens_per_second']:.1f} tokens/s, "
            f"{text['tokens_per_second'] / floor:.0%} of {floor:.1f}, the floor at "
            f"{text['bytes_per_second'] / 1e9:.0f} GB/s"
        )
    print(f"{document['seconds']:.0f} seconds in all")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--tiny", action="store_true", help="a toy's shape, to try the script")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
