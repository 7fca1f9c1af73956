"""How heads rank the text that really follows: the numbers a trace and a validation are made of.

Batched over positions, with the true tokens as input (teacher forcing): for lossless decoding this
equals what live drafting sees at each position. This module knows no files and no trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entmtp_calib.heads.model import Heads

CHUNK_ROWS = 256
"""Draft logits of a whole vocabulary are held for so many rows at a time."""


@torch.inference_mode()
def true_ranks(heads: Heads, vectors: Tensor, following: Tensor) -> Tensor:
    """Rank of each true next token under the head of its depth, given the true tokens before it.

    Args:
        vectors: [N, h] what drafting is conditioned on at each position.
        following: [N, D + 1] the true tokens from the root on; -1 past the end of the text.

    Returns:
        int16 [N, D]; -1 where the rank is `RANK_CAP` or more, or there is no such token.
    """
    chunks = zip(vectors.split(CHUNK_ROWS), following.split(CHUNK_ROWS), strict=True)
    return torch.cat(
        [
            torch.stack(
                [
                    _rank(_best(heads, depth, vector, true[:, :depth])[0], true[:, depth])
                    for depth in range(1, true.shape[1])
                ],
                dim=1,
            )
            for vector, true in chunks
        ]
    )


@torch.inference_mode()
def ranks_and_chain(heads: Heads, vectors: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """The true tokens' ranks, and how sure each head is of its own first choice.

    The greedy chain is each head's first choice after the root and the first choices before it. As
    long as it is the true text, both come from the same row; only where it has left the text it
    is computed apart.

    Args:
        vectors, following: see `true_ranks`.

    Returns:
        The ranks, see `true_ranks`, and the chain's conditional probabilities float32 [N, D].
    """
    chunks = zip(vectors.split(CHUNK_ROWS), following.split(CHUNK_ROWS), strict=True)
    ranks, probs = zip(*(_ranks_and_chain(heads, *chunk) for chunk in chunks), strict=True)
    return torch.cat(ranks), torch.cat(probs)


def _ranks_and_chain(heads: Heads, vectors: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    chain, ranks, chain_probs = following[:, :1], [], []
    for depth in range(1, following.shape[1]):
        ids, probs = _best(heads, depth, vectors, following[:, :depth])
        ranks.append(_rank(ids, following[:, depth]))
        first, prob = ids[:, 0].clone(), probs[:, 0].clone()
        off = (chain != following[:, :depth]).any(1).nonzero()[:, 0]
        if len(off) and heads.kind == "hydra":  # Medusa's choice is the same on every path
            ids, probs = _best(heads, depth, vectors[off], chain[off])
            first[off], prob[off] = ids[:, 0], probs[:, 0]
        chain = torch.cat([chain, first[:, None]], dim=1)
        chain_probs.append(prob)
    return torch.stack(ranks, dim=1), torch.stack(chain_probs, dim=1)


def _best(heads: Heads, depth: int, vectors: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
    """`heads.top` after each row's own path [R, depth]."""
    return heads.top(heads.level_logits(depth, vectors, paths.clamp(min=0)))


def _rank(ids: Tensor, tokens: Tensor) -> Tensor:
    """int16 [R] on the CPU: where the tokens [R] stand among the ids [R, k]; -1 if nowhere."""
    hit = ids == tokens[:, None]
    return torch.where(hit.any(1), hit.int().argmax(1), -1).short().cpu()


def following_tokens(text: Tensor, depths: int) -> Tensor:
    """[L] ids -> [L, depths + 1]: each position's token and those after it, -1 past the end."""
    padded = torch.cat([text, text.new_full((depths,), -1)])
    return padded.unfold(0, depths + 1, 1)
