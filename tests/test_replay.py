"""Exact replay against plain loops, brute force and the acceptance rule itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import long_trace, random_trace, random_tree, trace_of

from entmtp_calib.acceptance import accept
from entmtp_calib.replay import (
    StepCounts,
    accepted,
    counts_by_prompt,
    oracle_ms,
    reached,
    step_counts,
    walk,
)
from entmtp_calib.trace import Trace
from entmtp_calib.tree import EMPTY, HYDRA_DEFAULT, Tree, chain

SEEDS = st.integers(0, 10**6)
TREES = [EMPTY, chain(1), chain(3), Tree.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])]


def accepted_by_each(trace: Trace, trees: list[Tree] = TREES) -> np.ndarray:
    return np.stack([accepted(tree, trace.ranks) for tree in trees])


def longest_prefix(tree: Tree, ranks: list[int]) -> int:
    lengths = range(1, len(ranks) + 1)
    return max((length for length in lengths if tuple(ranks[:length]) in tree.paths), default=0)


def walk_by_loop(trace: Trace, counts: np.ndarray) -> list[int]:
    rows = []
    for start, length in zip(trace.starts, trace.lengths, strict=True):
        offset = 0
        while offset < length:
            rows.append(int(start + offset))
            offset += counts[start + offset] + 1
    return rows


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_tree_accepts_the_longest_prefix_of_the_ranks_that_it_contains(seed: int) -> None:
    trace, tree = random_trace(seed, n_ranks=4), random_tree(seed + 1)
    expected = [longest_prefix(tree, row) for row in trace.ranks.tolist()]
    assert accepted(tree, trace.ranks).tolist() == expected


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_ranks_replay_what_acceptance_would_do_on_tokens(seed: int) -> None:
    trace, tree = random_trace(seed, n_ranks=4), random_tree(seed + 1)
    paths = [(), *tree.paths]
    for ranks, count in zip(trace.ranks.tolist(), accepted(tree, trace.ranks), strict=True):
        # The target's choice after a true prefix is the token of the true rank there; a node's
        # token is its rank; -1 is a token that no head drafted.
        choices = [
            ranks[len(path)] if len(path) < len(ranks) and list(path) == ranks[: len(path)] else -1
            for path in paths
        ]
        tokens = [-9, *(path[-1] for path in tree.paths)]
        assert len(accept(list(tree.parents), tokens, choices)) == count


def test_ranks_beyond_the_tree_or_missing_end_the_path() -> None:
    ranks = np.array([[0, 0], [9, 0], [0, 9], [-1, 0], [0, -1], [32767, 0]], dtype=np.int16)
    assert accepted(chain(2), ranks).tolist() == [2, 0, 1, 0, 1, 0]
    assert accepted(EMPTY, ranks).tolist() == [0] * 6
    assert accepted(chain(5), ranks).tolist() == [2, 0, 1, 0, 1, 0]
    assert accepted(chain(2), ranks[:0]).tolist() == []


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_a_walk_visits_what_a_plain_loop_visits(seed: int) -> None:
    trace = random_trace(seed)
    for counts in accepted_by_each(trace):
        assert np.flatnonzero(walk(trace, counts)).tolist() == walk_by_loop(trace, counts)


def test_a_walk_never_runs_from_one_text_into_the_next() -> None:
    trace = trace_of([[[-1]] * 3, [[-1]] * 2])
    assert np.flatnonzero(walk(trace, np.full(5, 9))).tolist() == [0, 3]


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_every_tree_emits_exactly_the_text_and_plain_decoding_one_token_a_step(seed: int) -> None:
    trace = random_trace(seed)
    for tree, counts in zip(TREES, accepted_by_each(trace), strict=True):
        total = step_counts(trace, counts, walk(trace, counts))
        assert total.emitted_tokens == len(trace)
        assert total.emitted_tokens == total.steps + total.accepted_draft_tokens
        if tree == EMPTY:
            assert total.mean_emitted == 1.0
            assert total.mean_accepted == 0.0
            assert total.passes == len(trace) - trace.n_prompts


def test_only_a_step_on_the_last_token_needs_no_pass() -> None:
    # Four tokens. The chain of 1 takes steps of 2 and 2 in the first text, 1, 2 and 1 in the other.
    trace = trace_of([[[0], [0], [0], [-1]], [[1], [0], [0], [-1]]])
    counts = accepted(chain(1), trace.ranks)
    assert counts_by_prompt(trace, counts, walk(trace, counts)) == [
        StepCounts(steps=2, emitted_tokens=4, accepted_draft_tokens=2, passes=2),
        StepCounts(steps=3, emitted_tokens=4, accepted_draft_tokens=1, passes=2),
    ]


def test_counts_add_up() -> None:
    total = StepCounts(2, 4, 2, 2) + StepCounts(3, 4, 1, 2)
    assert total == StepCounts(5, 8, 3, 4)
    assert (total.mean_emitted, total.mean_accepted) == (1.6, 0.6)


def test_the_profile_counts_steps_that_reached_each_depth() -> None:
    counts = np.array([0, 2, 1, 2, 3])
    visited = np.array([True, True, True, False, True])
    assert reached(counts, visited, 4).tolist() == [4, 3, 2, 1, 0]


def scripted_ms(table: np.ndarray, step_ms: np.ndarray, script: tuple[int, ...]) -> float:
    """Time of one text whose steps use these trees in turn; its last token takes no step."""
    row = total = 0
    for tree in script:
        if row < table.shape[1] - 1:
            total += step_ms[tree]
            row += table[tree, row] + 1
    return float(total)


@given(SEEDS)
@settings(max_examples=15, deadline=None)
def test_the_oracle_is_the_best_of_all_choices(seed: int) -> None:
    trace = random_trace(seed, n_texts=1, max_length=6)
    table = accepted_by_each(trace)
    step_ms = np.random.default_rng(seed).integers(1, 6, len(TREES)).astype(float)
    scripts = itertools.product(range(len(TREES)), repeat=len(trace) - 1)
    best = min(scripted_ms(table, step_ms, script) for script in scripts)
    assert oracle_ms(trace, table, step_ms).tolist() == [best]


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_the_oracle_of_a_text_does_not_depend_on_the_others(seed: int) -> None:
    trace = random_trace(seed)
    table = accepted_by_each(trace)
    step_ms = np.array([1.0, 1.5, 2.5, 3.0])
    alone = []
    for prompt in range(trace.n_prompts):
        rows = trace.rows_of([prompt])
        alone += oracle_ms(trace.select([prompt]), table[:, rows], step_ms).tolist()
    assert oracle_ms(trace, table, step_ms).tolist() == pytest.approx(alone)


def test_a_million_positions_are_replayed() -> None:
    trace = long_trace(10_000, 100)
    counts = accepted(HYDRA_DEFAULT, trace.ranks)
    visited = walk(trace, counts)
    total = step_counts(trace, counts, visited)
    assert total.emitted_tokens == len(trace) == 1_000_000
    one_text = walk_by_loop(long_trace(1, 100), counts[:100])
    assert np.flatnonzero(visited[:100]).tolist() == one_text
    assert total.steps == 10_000 * len(one_text)
