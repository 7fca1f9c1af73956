"""What a step takes: beside what this machine could do, per row of a pass, and on what it is spent.

The floor of a pass is the longer of two times: reading all of its weights, keys and values once at
the bandwidth measured here, and its multiplications at the rate measured here. Rates and passes are
measured in one interleaved run, in the same process and with the same threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM

from entmtp_calib.decoding import Decoder
from entmtp_calib.policy import Policy, Static
from entmtp_calib.progress import Progress
from entmtp_calib.targets.model import Target
from entmtp_calib.targets.network import quiet
from entmtp_calib.timing import Interval, interleave
from entmtp_calib.tree import EMPTY

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
READ_BYTES = 2**28
"""Of one reading; several times what caches hold."""
SIDE = 1024  # of the matrices that the rate of multiplication is measured with
STEP = "a step"
MATRIX, ATTENTION, OTHER = "matrix", "attention", "other"
MATRIX_OPS = ("linear", "mm", "addmm", "mv", "addmv", "int8pack_mm", "int4pack_mm")
ATTENTION_OPS = ("bmm", "baddbmm", "amax", "sub", "exp", "sum", "div", "softmax", "_softmax")


@dataclass(frozen=True)
class Work:
    """What passes over a context must move and multiply, at the least.

    Attributes:
        weights: of all matrices that a row is multiplied with, the output layer's among them.
        weight_bytes: of one of them.
        cache_bytes: of the keys and values of one position, in all layers.
        query_width: heads times their width, in all layers together.
    """

    weights: int
    weight_bytes: int
    cache_bytes: int
    query_width: int

    def n_bytes(self, context: int, rows: int = 1) -> int:
        """Weights once, the context's keys and values read, those of the rows written."""
        return self.weights * self.weight_bytes + self.cache_bytes * (context + rows)

    def flops(self, context: int, rows: int = 1) -> int:
        """Two per weight and row; in attention two per query and key, and two per value."""
        return 2 * rows * (self.weights + 2 * self.query_width * (context + 1))

    def floor_ms(self, rates: Rates, context: int, rows: int = 1) -> float:
        """The time that a pass cannot be shorter than."""
        reading = self.n_bytes(context, rows) / rates.bytes_per_second
        return 1000 * max(reading, self.flops(context, rows) / rates.flops_per_second)


@dataclass(frozen=True)
class Rates:
    """What the machine has been seen to do."""

    bytes_per_second: float
    flops_per_second: float


def work_of(target: Target) -> Work:
    """From the shapes of the target's family; the lean engine packs weights to 2 bytes."""
    config = target.config.get_text_config()
    with quiet(), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(target.config)
    ends = [network.get_input_embeddings().weight, network.get_output_embeddings().weight]
    inner = [
        weight.numel()
        for weight in network.parameters()
        if weight.dim() > 1 and all(weight is not end for end in ends)
    ]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Work(
        weights=sum(inner) + ends[1].numel(),
        weight_bytes=2 if target.engine == "lean" else target.dtype.itemsize,
        cache_bytes=2 * target.n_layers * kv_heads * width * target.dtype.itemsize,
        query_width=target.n_layers * heads * width,
    )


@dataclass(frozen=True)
class Passes:
    """Seconds of each round, in the order of the rounds.

    Attributes:
        reads: by name of what reads.
        multiplications: of two square matrices.
        steps: of plain decoding, with all that belongs to a step.
        rows: by their number: the pass and its logits.
    """

    reads: dict[str, list[float]]
    multiplications: list[float]
    steps: list[float]
    rows: dict[int, list[float]]

    @property
    def rates(self) -> Rates:
        """Medians; of the kinds of reading the fastest."""
        reading = min(float(np.median(each)) for each in self.reads.values())
        return Rates(READ_BYTES / reading, 2 * SIDE**3 / float(np.median(self.multiplications)))

    def ratio(self, rows: int) -> Interval:
        """c(rows) / c(1) within each round."""
        return quartiles(np.divide(self.rows[rows], self.rows[min(self.rows)]))


def measure_passes(
    target: Target, context: int, rows: Sequence[int], rounds: int, seed: int, progress: Progress
) -> Passes:
    """All in random order, round by round; the first round warms up.

    The first row is the root and the others are its children, so each sees the context, the root
    and itself. Nothing is committed: every pass meets the same cache.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.vocab_size, (context + max(rows),), generator=generator)
    state = Decoder(target, None, [EMPTY]).start(ids[:context].tolist(), Static(0), max(rows) + 1)

    def one_pass(n: int) -> None:
        positions = torch.full((n,), context + 1)
        positions[0] = context
        mask = torch.eye(n, dtype=torch.bool)
        mask[:, 0] = True
        hidden = target.forward(ids[-n:], positions, state.cache, mask if n > 1 else None)
        target.logits(hidden)

    works: dict[Any, Callable[[], Any]] = {n: partial(one_pass, n) for n in rows}
    buffer, square = torch.ones(READ_BYTES // 4), torch.randn(SIDE, SIDE, generator=generator)
    reads: dict[str, Callable[[], Any]] = {
        "int64 sum": buffer.view(torch.int64).sum,
        "float32 row sums": partial(buffer.view(-1, 8192).sum, 1),
        "float32 matrix by vector": partial(torch.mv, buffer.view(-1, 8192), torch.ones(8192)),
    }
    works |= {**reads, "multiply": partial(torch.mm, square, square)}
    works["step"] = partial(state.probe, Static(0))
    seconds: dict[Any, list[float]] = {what: [] for what in works}
    progress.start("timing passes", (rounds + 1) * len(works))
    for number, what in interleave(list(works), rounds + 1, seed):
        started = time.perf_counter()
        works[what]()
        elapsed = time.perf_counter() - started
        if number > 0:
            seconds[what].append(elapsed)
        progress.advance()
    progress.done()
    return Passes(
        reads={name: seconds[name] for name in reads},
        multiplications=seconds["multiply"],
        steps=seconds["step"],
        rows={n: seconds[n] for n in rows},
    )


def quartiles(values: Any) -> Interval:
    """The median between the quartiles."""
    low, value, high = np.percentile(np.asarray(values, dtype=np.float64), [25, 50, 75])
    return Interval(float(low), float(value), float(high))


@dataclass(frozen=True)
class Shares:
    """What the steps of some texts were spent on.

    Attributes:
        seconds: by `MATRIX`, `ATTENTION` and `OTHER`, under the profiler; they add up to the steps.
        passes: steps that had one.
        unprofiled_seconds: the same steps without the profiler.
        others: the largest parts of `OTHER`, in seconds; "between operations" is Python.
    """

    seconds: dict[str, float]
    passes: int
    unprofiled_seconds: float
    others: dict[str, float]

    def share(self, kind: str) -> float:
        """Under the profiler, whose own work counts as `OTHER`: rather too much than too little."""
        return self.seconds[kind] / sum(self.seconds.values())

    @property
    def unprofiled_other(self) -> float:
        """`OTHER` where matrices and attention take what they do under the profiler."""
        return 1 - (self.seconds[MATRIX] + self.seconds[ATTENTION]) / self.unprofiled_seconds


def measure_shares(
    methods: Mapping[str, tuple[Decoder, Policy]],
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    seed: int,
    progress: Progress,
) -> dict[str, Shares]:
    """Profile the steps behind each prompt's pass, each text once with and once without profiler.

    An operation counts for what it is called from (`kind`); its time is its own, without that of
    the operations it calls, so the kinds add up to the whole. What a step takes between operations,
    which is Python, is `OTHER`.
    """
    cases = list(itertools.product(methods, (False, True)))
    progress.start("profiling steps", len(cases) * (len(prompts) + 1))
    sums: dict[str, dict[str, float]] = {name: {} for name in methods}
    plain_time, passes = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
    for number, ids in enumerate([prompts[0], *prompts]):  # the first time warms up
        for _, (name, is_profiled) in interleave(cases, 1, seed + number):
            state = methods[name][0].start(ids, methods[name][1], n_tokens)
            spent, elapsed = _steps(state, is_profiled)
            progress.advance(1, name)
            if number and is_profiled:
                passes[name] += sum(step.rows > 0 for step in state.steps)
                for what, seconds in spent.items():
                    sums[name][what] = sums[name].get(what, 0.0) + seconds
            elif number:
                plain_time[name] += elapsed
    progress.done()
    return {name: _shares(sums[name], passes[name], plain_time[name]) for name in methods}


def _steps(state: Any, is_profiled: bool) -> tuple[dict[str, float], float]:
    """Run a text to its end; seconds per kind or other operation, and seconds in all."""
    started = time.perf_counter()
    if not is_profiled:
        while state.reason is None:
            state.step()
        return {}, time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        while state.reason is None:
            with record_function(STEP):
                state.step()
    return _spent(profiler.events()), time.perf_counter() - started


def _spent(events: Iterable[Any]) -> dict[str, float]:
    """Seconds per `MATRIX`, `ATTENTION`, or name of another operation."""
    spent: dict[str, float] = {}
    for event in events:
        line = _line(event)
        if line[0].name != STEP:
            continue  # the profiler's own
        kinds = [kind(each.name, each.input_shapes) for each in line]
        name = "between operations" if event.name == STEP else event.name
        what = next((each for each in kinds if each != OTHER), name)
        spent[what] = spent.get(what, 0.0) + event.self_cpu_time_total / 1e6
    return spent


def _line(event: Any) -> list[Any]:
    """What the event is called from, outermost first, and the event."""
    line = [event]
    while line[0].cpu_parent:
        line.insert(0, line[0].cpu_parent)
    return line


def kind(name: str, shapes: Sequence[Sequence[int]]) -> str:
    """What an operation is for, by its name and the shape of its first tensor.

    Matrix products of models and heads: linear layers (FBGEMM's and quantized ones too) and
    products of a matrix with a matrix or a vector. Attention: torch's own, and what the lean engine
    makes it of, batched products, maxima, differences, exponentials, sums and quotients, where the
    tensor has three dimensions or more (heads apart; norms and sampling have one or two). Scaling,
    masks, rotary embeddings, and copies to and from the cache are neither.
    """
    base = name.split("::")[-1].rstrip("_")
    if base in MATRIX_OPS or "linear" in base:
        return MATRIX
    if "scaled_dot_product" in base:
        return ATTENTION
    heads_apart = bool(shapes) and len(shapes[0]) > 2
    return ATTENTION if base in ATTENTION_OPS and heads_apart else OTHER


def _shares(spent: Mapping[str, float], passes: int, unprofiled_seconds: float) -> Shares:
    others = {what: t for what, t in spent.items() if what not in (MATRIX, ATTENTION)}
    largest = sorted(others.items(), key=lambda item: -item[1])[:10]
    seconds = {each: spent.get(each, 0.0) for each in (MATRIX, ATTENTION)}
    seconds[OTHER] = sum(others.values())
    return Shares(seconds, passes, unprofiled_seconds, dict(largest))
