"""Cost: what the parts of a step take on this machine, for trees of every size.

Passes of 1 to many rows run at fixed contexts, in random order, and every timed step is taken back,
so all meet the same state. Drafting a level is timed behind a whole pass, as it is in a step: that
pass has pushed the heads' weights out of the caches. What is known well enough is not timed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import torch

from entmtp_calib import records
from entmtp_calib.costs import LEVEL, STEP, Costs
from entmtp_calib.decoding import Decoder, Decoding
from entmtp_calib.policy import Ladder, Policy, Static
from entmtp_calib.provenance import hardware, hardware_fingerprint
from entmtp_calib.signals import SignalSpec
from entmtp_calib.stages.grow import reference_trees
from entmtp_calib.stages.recorded import TRACE
from entmtp_calib.stages.rollout import read_trace
from entmtp_calib.stages.setup import Run
from entmtp_calib.timing import interleave, median, median_error
from entmtp_calib.topology import compile_tree
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree

STAGE, COSTS = "cost", "costs.parquet"
ROUNDS_BEFORE_DROPPING = 3
ENOUGH, KNOWN = 5, 0.01  # repetitions, and the standard error of their median, that will do
SMALL = 4  # rows of passes that run all rounds: they matter most, and cost least
ROW_COUNTS = (*range(1, 14), 15, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128)
NEVER = 1e9  # accepted draft tokens that no average reaches
PARENT_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

Samples = dict[tuple[int, int], list[float]]
"""Milliseconds of the calls for each depth and number of parents."""


def measure_costs(run: Run) -> None:
    """Write `costs.parquet`: a row per timed step and per timed level of drafting."""
    config = run.config
    inputs = {
        "text": run.text_inputs,
        "trace": run.folder.sha256(TRACE),
        "hardware": hardware_fingerprint(hardware(str(run.target.device))),
        "settings": [config.step_repetitions, config.context_lengths, config.max_nodes],
        "trees": [tree.to_list() for tree in run.ungrown],
        "seed": config.seed,
    }
    if run.folder.is_done(STAGE, inputs):
        return
    trees = timed_trees(run)
    decoder = Decoder(run.target, run.heads, trees, config.sampling)
    parts = run.folder.partial(STAGE, inputs)
    lengths = _lengths(run, decoder)
    known = set(parts.tables())
    rounds = config.step_repetitions + 1
    run.progress.start("timing steps", len(lengths) * rounds * (len(trees) + 2))
    dropped: set[int] = set()
    level_ms: Samples = defaultdict(list)  # does not depend on the context: taken at all of them
    for number, length in enumerate(lengths):
        if number not in known:
            largest = Static(len(trees) - 1)  # its heads follow the text, for all that drafts
            state = decoder.start(_context(run, length), largest, config.max_new_tokens)
            rows = _time_steps(run, state, length, dropped)
            rows += _time_levels(run, state, length, level_ms)
            parts.write_table(number, records.table(rows, records.TIMING_SCHEMA))
        rows = parts.read_table(number, records.TIMING_SCHEMA).to_pylist()
        dropped |= _not_worth_it(run, rows)
        for row in rows:
            if row["kind"] == LEVEL:
                level_ms[row["depth"], row["rows"]].append(row["draft_ms"])
    run.progress.done()
    tables = [parts.read_table(n, records.TIMING_SCHEMA) for n in range(len(lengths))]
    run.folder.write_table(COSTS, pa.concat_tables(tables))
    run.folder.mark_done(STAGE, inputs, [COSTS])


def run_costs(run: Run) -> Costs:
    """The run's costs at the context its texts have on average."""
    rows = run.folder.read_table(COSTS, records.TIMING_SCHEMA).to_pylist()
    return Costs.of(rows, float(read_trace(run, "search").context.mean()))


def timed_trees(run: Run) -> list[Tree]:
    """A tree of each number of rows, the empty one first, up to the largest that may be wanted.

    The sizes of the user's trees are among them. Heads that are few and narrow cannot draft all.
    """
    largest = max(tree.n_nodes for tree in (*run.ungrown, HYDRA_DEFAULT))
    most = max(run.config.max_nodes, largest) + 1
    counts = {n for n in ROW_COUNTS if n <= most} | {most, HYDRA_DEFAULT.n_nodes + 1}
    counts |= _user_sizes(run)
    trees = [_bushy(rows - 1, run.heads.n_ranks, run.heads.n_heads) for rows in sorted(counts)]
    return list(dict.fromkeys(trees))


def hopeless(rows: Iterable[dict[str, Any]], depth: int) -> set[int]:
    """Row counts of passes that take longer than plain decoding of all they could emit.

    A step emits at most depth + 1 tokens. Hydra's default tree stays, being what to compare with.
    """
    ms: dict[int, list[float]] = {}
    for row in rows:
        if row["kind"] == STEP:
            ms.setdefault(row["rows"], []).append(row["step_ms"])
    most = (depth + 1) * median(ms[1])
    return {n for n, each in ms.items() if median(each) > most} - {HYDRA_DEFAULT.n_nodes + 1}


def _not_worth_it(run: Run, rows: Iterable[dict[str, Any]]) -> set[int]:
    """The hopeless row counts, but those of the user's trees, which are what to compare with."""
    return hopeless(rows, run.heads.n_heads) - _user_sizes(run)


def _user_sizes(run: Run) -> set[int]:
    return {tree.n_nodes + 1 for tree in run.user_trees}


def _parent_counts(run: Run) -> list[int]:
    """Numbers of parents that levels are timed for; no tree that was not grown has more."""
    levels = [level for tree in run.ungrown for level in compile_tree(tree).levels]
    most = max([*PARENT_COUNTS, *(len(level.parent_rows) for level in levels)])
    return sorted({*PARENT_COUNTS, most})


def is_known(ms: Sequence[float]) -> bool:
    """Whether the median of repetitions is known well enough."""
    return len(ms) >= ENOUGH and median_error(ms) < KNOWN


def _time_steps(run: Run, state: Decoding, length: int, dropped: set[int]) -> list[dict[str, Any]]:
    """Timed steps of each number of rows; those hopeless or known are not timed to the end."""
    methods = _methods(state.decoder.trees)
    rounds = run.config.step_repetitions + 1
    rows: list[dict[str, Any]] = []
    verify_ms: dict[int, list[float]] = defaultdict(list)
    dropped, is_decided = set(dropped), False
    for number, index in interleave(range(len(methods)), rounds, run.config.seed + length):
        run.progress.advance(1, f"{length} tokens of context")
        if number > ROUNDS_BEFORE_DROPPING and not is_decided:
            dropped |= _not_worth_it(run, rows)
            is_decided = True
        name, policy, n_rows = methods[index]
        if n_rows in dropped or (n_rows > SMALL and is_known(verify_ms[index])):
            continue
        step = state.probe(policy)
        if number > 0:  # the first round warms up
            verify_ms[index].append(step.step_ms - step.draft_ms)
            rows.append(
                {
                    "kind": STEP,
                    "tree": name,
                    "context_length": length,
                    "rows": n_rows,
                    "round": number,
                    "step_ms": step.step_ms,
                    "draft_ms": step.draft_ms,
                }
            )
    return rows


def _methods(trees: Sequence[Tree]) -> list[tuple[str, Policy, int]]:
    """Name, policy and rows of what is timed: every tree, and a drafting policy that drafts none.

    Plain decoding does without heads; a policy that may draft pays for heads that follow the text
    also where it chooses the empty tree.
    """
    never = Ladder(SignalSpec("acceptance_average"), (NEVER,), (0, 1))
    return [
        *((tree.id, Static(k), tree.n_nodes + 1) for k, tree in enumerate(trees)),
        ("plain with heads", never, 1),
    ]


def _time_levels(run: Run, state: Decoding, length: int, earlier: Samples) -> list[dict[str, Any]]:
    """Timed head calls for 1 to many parents at each depth, but those that are known.

    Args:
        earlier: what the calls took at other contexts.
    """
    heads, clock = run.heads, state.clock
    generator = torch.Generator().manual_seed(run.config.seed)
    rows: list[dict[str, Any]] = []
    level_ms = defaultdict(list, {key: list(ms) for key, ms in earlier.items()})
    for number, parents in interleave(
        _parent_counts(run), run.config.step_repetitions + 1, run.config.seed + length
    ):
        wanted = [(depth, parents if depth > 1 else 1) for depth in range(1, heads.n_heads + 1)]
        wanted = [level for level in wanted if not is_known(level_ms[level])]
        if wanted:
            state.probe(Static(0))
        for depth, n_parents in wanted:
            shape = (n_parents, depth)
            paths = torch.randint(0, run.target.vocab_size, shape, generator=generator)
            paths = paths.to(run.target.device)
            started = clock.now()
            _, probs = heads.draft_level(depth, state.head_state.vector, paths, 1)
            float(probs[0, 0])  # as a policy reads it
            ended = clock.now()
            if number > 0:
                level_ms[depth, n_parents].append(1000 * (ended - started))
                rows.append(
                    {
                        "kind": LEVEL,
                        "depth": depth,
                        "context_length": length,
                        "rows": n_parents,
                        "round": number,
                        "draft_ms": 1000 * (ended - started),
                    }
                )
    run.progress.advance(run.config.step_repetitions + 1)
    return rows


def _bushy(n_nodes: int, n_ranks: int, depth: int) -> Tree:
    """A tree of this size in as few levels as its width allows; the empty one for 0 nodes."""
    if n_nodes == HYDRA_DEFAULT.n_nodes and HYDRA_DEFAULT in reference_trees(depth, n_ranks):
        return HYDRA_DEFAULT
    tree = EMPTY
    for level in range(1, depth + 1):
        while tree.n_nodes < n_nodes:
            free = [p for p in tree.growth_candidates(level, n_ranks) if len(p) == level]
            if not free:
                break
            tree = tree.with_node(free[0])
    return tree


def _lengths(run: Run, decoder: Decoder) -> list[int]:
    """The context lengths asked for that leave every tree its positions."""
    longest = run.target.max_positions - max(tree.depth for tree in decoder.trees) - 1
    lengths = [n for n in run.config.context_lengths if n < longest]
    return lengths or [max(1, longest - 1)]


def _context(run: Run, length: int) -> Sequence[int]:
    """`length` tokens of real text: select prompts and what the target wrote to them."""
    trace = read_trace(run, "select")
    ids: list[int] = []
    while len(ids) < length:
        for number, prompt in enumerate(run.splits["select"]):
            rows = trace.rows_of([number])
            ids += [*prompt.ids, *trace.token[rows].tolist()]
    return ids[:length]
