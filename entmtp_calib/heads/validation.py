"""How good heads are on texts they did not learn from.

Top-1 and top-5 accuracy per head over all positions, and emitted tokens per step on the steps that
greedy decoding would visit: with a chain, and with grown trees of 16 and 63 nodes. Trees grow on
one half of the held-out texts and are judged on the other. This module knows no optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from entmtp_calib.growth import grow
from entmtp_calib.heads.features import FeatureSet
from entmtp_calib.heads.model import Heads, HeadState
from entmtp_calib.heads.ranking import following_tokens, true_ranks
from entmtp_calib.replay import accepted, step_counts, walk
from entmtp_calib.trace import Trace
from entmtp_calib.tree import Tree, chain

TREE_SIZES = (16, 63)


def validate(heads: Heads, features: FeatureSet, held_out: Sequence[int]) -> dict[str, Any]:
    """The figures per source of text, each `{"top1": [D], "top5": [D], "emitted": {tree: float}}`.

    Args:
        held_out: sequences no head has learned from; at least two of each source.
    """
    groups: dict[str, list[int]] = {}
    for i in held_out:
        groups.setdefault(features.sources[i], []).append(i)
    return {
        source: _figures(replayed_trace(heads, features, indices))
        for source, indices in sorted(groups.items())
    }


@torch.inference_mode()
def replayed_trace(heads: Heads, features: FeatureSet, indices: Sequence[int]) -> Trace:
    """The ranks of some texts' continuations as a trace (signals are left at zero)."""
    prompts, positions, contexts, tokens, ranks = [], [], [], [], []
    for number, i in enumerate(indices):
        sequence = features[i]
        device = heads.device
        state = HeadState()
        hidden = sequence.hidden.to(device, torch.float32)
        heads.observe(state, hidden, torch.arange(len(hidden), device=device))
        text = sequence.tokens[sequence.prompt_length :].long().to(device)
        vectors = state.vectors[sequence.prompt_length - 1 : -1]
        ranks.append(true_ranks(heads, vectors, following_tokens(text, heads.n_heads)).numpy())
        prompts.append(np.full(len(text), number))
        positions.append(np.arange(len(text)))
        contexts.append(np.arange(len(text)) + sequence.prompt_length)
        tokens.append(text.cpu().numpy())
    n = sum(map(len, tokens))
    return Trace(
        prompt=np.concatenate(prompts).astype(np.int32),
        position=np.concatenate(positions).astype(np.int32),
        context=np.concatenate(contexts).astype(np.int32),
        token=np.concatenate(tokens).astype(np.int32),
        ranks=np.concatenate(ranks),
        chain_probs=np.zeros((n, heads.n_heads), dtype=np.float32),
        base_top1=np.zeros(n, dtype=np.float32),
        entropy=np.zeros(n, dtype=np.float32),
    )


def emitted_per_step(trace: Trace, tree: Tree) -> float:
    """Mean acceptance length of a tree on the steps it visits."""
    lengths = accepted(tree, trace.ranks)
    return step_counts(trace, lengths, walk(trace, lengths)).mean_emitted


def _figures(trace: Trace) -> dict[str, Any]:
    depths = trace.max_depth
    exists = [trace.remaining > depth for depth in range(1, depths + 1)]
    ranks = [trace.ranks[exists[d], d] for d in range(depths)]
    grow_on = trace.select(range(0, trace.n_prompts, 2))
    judge_on = trace.select(range(1, trace.n_prompts, 2))
    grown = grow(grow_on, depths, max(TREE_SIZES), 32)
    trees = {f"best-{n}": grown[min(n, len(grown)) - 1].tree for n in TREE_SIZES}
    trees[f"chain-{depths}"] = chain(depths)
    return {
        "positions": len(trace),
        "top1": [round(float(np.mean(r == 0)), 4) for r in ranks],
        "top5": [round(float(np.mean((r >= 0) & (r < 5))), 4) for r in ranks],
        "emitted": {name: round(emitted_per_step(judge_on, t), 3) for name, t in trees.items()},
    }
