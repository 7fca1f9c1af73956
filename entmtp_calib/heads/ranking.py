"""How heads rank the text that really follows: the numbers a trace and a validation are made of.

Batched over positions, with the true tokens as input (teacher forcing): for lossless decoding this
equals what live drafting sees at each position. This module knows no files and no trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entmtp_calib.heads.model import Heads

CHUNK_ROWS = 1024


@torch.inference_mode()
def true_ranks(heads: Heads, vectors: Tensor, following: Tensor) -> Tensor:
    """Rank of each true next token under the head of its depth, given the true tokens before it.

    Args:
        vectors: [N, h] what drafting is conditioned on at each position.
        following: [N, D + 1] the true tokens from the root on; -1 past the end of the text.

    Returns:
        int16 [N, D]; -1 where the rank is `RANK_CAP` or more, or there is no such token.
    """
    depths = following.shape[1] - 1
    ranks = torch.full((len(vectors), depths), -1, dtype=torch.int16)
    for start in range(0, len(vectors), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        path, vector = following[rows].clamp(min=0), vectors[rows]
        for depth in range(1, depths + 1):
            ids, _ = heads.top(heads.level_logits(depth, vector, path[:, :depth]))
            hit = ids == following[rows, depth, None]
            found = hit.any(1)
            ranks[rows, depth - 1] = torch.where(found, hit.int().argmax(1), -1).short().cpu()
    return ranks


@torch.inference_mode()
def greedy_chain(heads: Heads, vectors: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's own first choices, chained from the root.

    Args:
        vectors: [N, h]; roots: [N] token ids.

    Returns:
        tokens int64 [N, D] and their conditional probabilities float32 [N, D].
    """
    tokens, probs = [], []
    for start in range(0, len(vectors), CHUNK_ROWS):
        path = roots[start : start + CHUNK_ROWS, None]
        chunk_probs = []
        for depth in range(1, heads.n_heads + 1):
            vector = vectors[start : start + CHUNK_ROWS]
            ids, p = heads.top(heads.level_logits(depth, vector, path))
            path = torch.cat([path, ids[:, :1]], dim=1)
            chunk_probs.append(p[:, 0])
        tokens.append(path[:, 1:])
        probs.append(torch.stack(chunk_probs, dim=1))
    return torch.cat(tokens), torch.cat(probs)


def following_tokens(text: Tensor, depths: int) -> Tensor:
    """[L] ids -> [L, depths + 1]: each position's token and those after it, -1 past the end."""
    padded = torch.cat([text, text.new_full((depths,), -1)])
    return padded.unfold(0, depths + 1, 1)
