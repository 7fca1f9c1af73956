"""Small traces, trees and costs for tests: written by hand, or random from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from entmtp_calib.costs import Costs
from entmtp_calib.trace import Trace
from entmtp_calib.tree import Tree


def trace_of(
    texts: Sequence[Sequence[Sequence[int]]],
    base_top1: Sequence[float] | None = None,
    chain_probs: Sequence[Sequence[float]] | np.ndarray | None = None,
) -> Trace:
    """A trace from one list of rank rows per text."""
    rows = [row for text in texts for row in text]
    ranks = np.array(rows, dtype=np.int16)
    lengths = [len(text) for text in texts]
    base = np.full(len(rows), 0.5) if base_top1 is None else np.asarray(base_top1)
    return Trace(
        prompt=np.repeat(np.arange(len(texts)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
        context=10 + np.concatenate([np.arange(length) for length in lengths]),
        token=np.arange(len(rows)),
        ranks=ranks,
        chain_probs=np.full(ranks.shape, 0.5) if chain_probs is None else np.array(chain_probs),
        base_top1=base,
        entropy=1.0 - base,
    )


def random_ranks(
    random: np.random.Generator, length: int, n_heads: int, n_ranks: int
) -> list[list[int]]:
    """One text's ranks: small ranks more often, -1 now and then and wherever the text is over."""
    ranks = np.minimum(random.geometric(0.5, (length, n_heads)) - 1, n_ranks)
    ranks[ranks == n_ranks] = -1
    past_end = np.arange(1, n_heads + 1) >= length - np.arange(length)[:, None]
    ranks[past_end] = -1
    return ranks.tolist()


def random_trace(
    seed: int, n_texts: int = 4, max_length: int = 12, n_heads: int = 3, n_ranks: int = 3
) -> Trace:
    """Texts of 1 to `max_length` tokens with random ranks and random signals."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, max_length + 1, n_texts)
    texts = [random_ranks(random, length, n_heads, n_ranks) for length in lengths]
    n_rows = int(lengths.sum())
    return trace_of(texts, random.random(n_rows), random.random((n_rows, n_heads)))


def long_trace(n_texts: int, length: int, depth: int = 2) -> Trace:
    """Texts of equal length whose rows repeat; made of arrays, since a million rows are many."""
    ranks = np.stack([np.arange(length) % (d + 2) for d in range(depth)], axis=1)
    ranks[np.arange(1, depth + 1) >= (length - np.arange(length))[:, None]] = -1
    n = n_texts * length
    return Trace(
        prompt=np.repeat(np.arange(n_texts), length),
        position=np.tile(np.arange(length), n_texts),
        context=np.tile(np.arange(length), n_texts),
        token=np.zeros(n, dtype=np.int32),
        ranks=np.tile(ranks, (n_texts, 1)),
        chain_probs=np.full((n, depth), 0.5),
        base_top1=np.tile(np.arange(length) % 2, n_texts),
        entropy=np.zeros(n),
    )


def random_tree(seed: int, n_paths: int = 6, max_depth: int = 4, n_ranks: int = 4) -> Tree:
    """A few random paths and all their prefixes; sibling ranks may have gaps."""
    random = np.random.default_rng(seed)
    ends = [
        tuple(random.integers(0, n_ranks, random.integers(1, max_depth + 1)).tolist())
        for _ in range(random.integers(0, n_paths + 1))
    ]
    return Tree.of({path[: i + 1] for path in ends for i in range(len(path))})


def linear_costs(
    first: float, row: float, level: float = 0.0, parent: float = 0.0, depth: int = 4
) -> Costs:
    """A pass of one row takes `first` ms and each further row `row`; up to 128 rows are known.

    Drafting a level takes `level` ms under one parent, and `parent` for each further one.
    """
    levels = ((1, level), (128, level + 127 * parent))
    return Costs(((1, first), (128, first + 127 * row)), (levels,) * depth)


def telling_trace(
    seed: int, n_texts: int = 24, length: int = 60, depth: int = 3, exactly: bool = False
) -> Trace:
    """Texts whose positions differ, each on its own, in how far the greedy chain is right.

    A position's confidence is drawn evenly; each of its chain's tokens is right with that
    probability, which the chain's probabilities tell. Where they tell `exactly`, the number of
    right tokens is drawn evenly, and the probability is 0.9 for a right token and 0.1 from the
    first wrong one on. The first wrong one is the second choice. The target's own signals tell
    nothing.
    """
    random = np.random.default_rng(seed)
    n_rows = n_texts * length
    confidence = random.uniform(0.02, 0.98, n_rows)[:, None] * np.ones((1, depth))
    right = np.logical_and.accumulate(random.random((n_rows, depth)) < confidence, axis=1)
    if exactly:
        right = np.arange(depth) < random.integers(0, depth + 1, n_rows)[:, None]
    left = np.tile(np.arange(length, 0, -1), n_texts)
    right &= np.arange(1, depth + 1) < left[:, None]
    ranks = np.where(right, 0, -1)
    first_wrong = right.sum(axis=1)
    has_second = (first_wrong < depth) & (first_wrong + 1 < left)
    ranks[np.flatnonzero(has_second), first_wrong[has_second]] = 1
    return trace_of(
        ranks.reshape(n_texts, length, depth).tolist(),
        chain_probs=np.where(right, 0.9, 0.1) if exactly else confidence,
    )


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same texts with the chain probabilities of other positions, which tell nothing."""
    order = np.random.default_rng(seed).permutation(len(trace))
    return replace(trace, chain_probs=trace.chain_probs[order])
