"""The target's choice: argmax, or a draw whose noise depends only on (seed, absolute position).

A draw is `argmax(log p + g)` with Gumbel noise g (Gumbel 1954; Maddison et al. 2014), which is
exactly a sample from p. Since g is a function of the seed and the position alone, and never of the
tree, the rows or the device, every tree and every policy commits the text that plain decoding with
the same seed commits. This module knows no models, and of trees only which row is whose parent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from entmtp_calib.config import SamplingConfig
from entmtp_calib.errors import ModelError


def choose(logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """The token the target chooses at each row.

    Args:
        logits: [n, V] float; raises `ModelError` where a row holds NaN or +inf, or nothing finite.
        positions: n absolute positions of the chosen tokens; equal positions share their noise.
        sampling: temperature, top-k, top-p and seed.

    Returns:
        int64 [n] on the logits' device; ties go to the smaller id.
    """
    best, index = logits.max(dim=-1)
    if not torch.isfinite(best).all():
        row = int((~torch.isfinite(best)).nonzero()[0, 0])
        raise ModelError(
            f"the target's logits at position {positions[row]} are not finite",
            "finite numbers",
            "load the model with --dtype float32, and check its weights",
        )
    if sampling.temperature == 0:
        return index
    return noisy_scores(logits, positions, sampling).argmax(dim=-1)


class Choices:
    """What the target chooses after each row of a pass; draws are made only where looked at.

    Greedy choices of all rows are one operation. A draw sorts a whole vocabulary, and of a tree's
    rows only those on the accepted path are ever asked for.
    """

    def __init__(self, logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> None:
        self._logits, self._positions, self._sampling = logits, positions, sampling
        self._known: dict[int, int] = {}
        if sampling.temperature == 0:
            self._known = dict(enumerate(choose(logits, positions, sampling).tolist()))

    def __getitem__(self, row: int) -> int:
        if row not in self._known:
            at = slice(row, row + 1)
            chosen = choose(self._logits[at], [self._positions[row]], self._sampling)
            self._known[row] = int(chosen)
        return self._known[row]


def typicality(
    logits: Tensor, parents: Sequence[int], ids: Sequence[int], sampling: SamplingConfig
) -> tuple[list[float], list[float]]:
    """How probable each row's token is after its parent, and the entropy there in nats.

    Args:
        logits: [n + 1, V].
        parents: n + 1 parent rows; the root's (-1) stands for nothing.
        ids: n + 1 tokens.

    Returns:
        n + 1 probabilities and n + 1 entropies of the distribution after temperature, top-k and
        top-p; the root's are those of a certain token.
    """
    rows = sorted(set(parents[1:]))  # leaves are nobody's parent
    if not rows:
        return [1.0], [0.0]
    log_probs = log_probabilities(logits[rows], sampling)
    index = torch.tensor([rows.index(parent) for parent in parents[1:]], device=logits.device)
    probs = log_probs[index, torch.tensor(ids[1:], device=logits.device)].exp()
    nats = _entropies(log_probs)[index]
    return [1.0, *probs.tolist()], [0.0, *nats.tolist()]


def top1_probability(logits: Tensor) -> float:
    """Probability of the best token at temperature 1; logits [V].

    One row at a time, wherever it is asked for, so that a trace holds what decoding sees.
    """
    return float((logits.max() - logits.logsumexp(0)).exp())


def entropy(logits: Tensor) -> float:
    """Entropy of the distribution at temperature 1 in nats; logits [V], -inf for impossible."""
    return float(_entropies(logits.log_softmax(0)))


def _entropies(log_probs: Tensor) -> Tensor:
    """Entropies [...] in nats of log-probabilities [..., V]."""
    # 0 log 0 is 0; impossible tokens have log 0 = -inf.
    return -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)


def noisy_scores(logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """Log-probabilities plus noise [n, V] in float64: their argmax is the draw."""
    scores = log_probabilities(logits, sampling)
    noise = {position: gumbel(sampling.seed, position, logits.shape[-1]) for position in positions}
    return scores + torch.stack([noise[position] for position in positions]).to(scores.device)


def log_probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Log-probabilities [n, V] in float64 after temperature, top-k and top-p; -inf where cut.

    At temperature 0 all the mass is on the argmax.
    """
    if sampling.temperature == 0:
        best = torch.zeros_like(logits, dtype=torch.bool)
        best.scatter_(-1, logits.argmax(-1, keepdim=True), True)
        return torch.zeros_like(logits, dtype=torch.float64).masked_fill(~best, -torch.inf)
    # The largest score becomes 0 before the division, so no temperature overflows.
    wide = logits.double()
    scores = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kept = scores.topk(sampling.top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, kept.indices, kept.values)
    log_probs = scores.log_softmax(-1)
    if sampling.top_p < 1:
        ordered = log_probs.sort(dim=-1, descending=True, stable=True)
        probs = ordered.values.exp()
        # A token stays while the mass before it is below top_p; the first always stays.
        cut_ordered = probs.cumsum(-1) - probs >= sampling.top_p
        cut_ordered[..., 0] = False
        cut = torch.zeros_like(cut_ordered).scatter(-1, ordered.indices, cut_ordered)
        log_probs = log_probs.masked_fill(cut, -torch.inf).log_softmax(-1)
    return log_probs


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Standard Gumbel noise [size], float64, from a counter-based generator (Philox)."""
    uniform = np.random.Generator(np.random.Philox(key=[seed, position])).random(size)
    # random() may return 0, whose logarithm is -inf.
    return torch.from_numpy(-np.log(-np.log(np.maximum(uniform, 1e-300))))
