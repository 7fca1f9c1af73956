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
from entmtp_calib.largest import largest
from entmtp_calib.transfer import send, send_index

NOT_FINITE = -1  # in place of a token, where a row of logits holds NaN or +inf, or nothing finite
_IMPOSSIBLE = -1e4  # in place of the logarithm of 0


def greedy(logits: Tensor) -> Tensor:
    """The best token of each row, int64 [n] for logits [n, V]; ties go to the smaller id.

    `NOT_FINITE` in its place, so that nobody waits for the device only to look for bad rows.
    """
    best, index = largest(logits)
    return torch.where(best.isfinite(), index, NOT_FINITE)


def choose(logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """The token the target chooses at each row.

    Args:
        logits: [n, V] float; raises `ModelError` where a row holds NaN or +inf, or nothing finite.
        positions: n absolute positions of the chosen tokens; equal positions share their noise.
        sampling: temperature, top-k, top-p and seed.

    Returns:
        int64 [n] on the logits' device; ties go to the smaller id.
    """
    best = greedy(logits)
    _check_finite(best.tolist(), positions)
    if sampling.temperature == 0:
        return best
    return draw(logits, positions, sampling)


def draw(logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """A sample at each row, int64 [n], for finite logits and a temperature above 0."""
    return noisy_scores(logits, positions, sampling).argmax(dim=-1)


class Choices:
    """What the target chooses after each row of a pass.

    A draw sorts a whole vocabulary, and of a tree's rows only those on the accepted path are ever
    asked for: on a CPU they are drawn when looked at.

    Args:
        logits: [n, V].
        positions: n absolute positions of the chosen tokens.
        sampling: temperature, top-k, top-p and seed.
        best: n tokens as `greedy` finds them, where they are known already.
        drawn: n draws, where they are known already.

    Raises:
        ModelError: a row of the logits is not finite.
    """

    def __init__(
        self,
        logits: Tensor,
        positions: Sequence[int],
        sampling: SamplingConfig,
        best: list[int] | None = None,
        drawn: list[int] | None = None,
    ) -> None:
        self._logits, self._positions, self._sampling = logits, positions, sampling
        best = greedy(logits).tolist() if best is None else best
        _check_finite(best, positions)
        known = best if sampling.temperature == 0 else drawn
        self._known: dict[int, int] = dict(enumerate(known or ()))

    @classmethod
    def read(
        cls, report: Tensor, logits: Tensor, positions: Sequence[int], sampling: SamplingConfig
    ) -> tuple[list[int], Choices]:
        """A pass's tokens and the choices after them, having waited for the device once.

        Args:
            report: int64 [2, n], the tokens of the rows and what `greedy` makes of their logits.
        """
        if sampling.temperature == 0 or logits.device.type == "cpu":
            ids, best = report.tolist()
            return ids, cls(logits, positions, sampling, best)
        drawn = draw(logits, positions, sampling)
        ids, best, known = torch.cat([report, drawn[None]]).tolist()
        return ids, cls(logits, positions, sampling, best, known)

    def __getitem__(self, row: int) -> int:
        if row not in self._known:
            at = slice(row, row + 1)
            self._known[row] = int(draw(self._logits[at], [self._positions[row]], self._sampling))
        return self._known[row]


def _check_finite(best: list[int], positions: Sequence[int]) -> None:
    if NOT_FINITE in best:
        raise ModelError(
            f"the target's logits at position {positions[best.index(NOT_FINITE)]} are not finite",
            "finite numbers",
            "load the model with --dtype float32, and check its weights",
        )


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
    at, tokens, index = (
        send_index(numbers, logits.device)
        for numbers in (rows, ids[1:], [rows.index(parent) for parent in parents[1:]])
    )
    log_probs = log_probabilities(logits.index_select(0, at), sampling)
    probs = log_probs[index, tokens].exp()
    # 0 log 0 is 0; impossible tokens have log 0 = -inf.
    nats = -(log_probs.exp() * log_probs.clamp(min=_IMPOSSIBLE)).sum(-1)[index]
    found_probs, found_nats = torch.stack([probs, nats]).tolist()
    return [1.0, *found_probs], [0.0, *found_nats]


def top1(logits: Tensor) -> Tensor:
    """Probability of the best token at temperature 1, without dimensions; logits [V]."""
    return logits.softmax(0).max()


def certainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`top1`, and the entropy at temperature 1 in nats, without dimensions.

    One row at a time, wherever they are asked for, so that a trace holds what decoding sees.

    Args:
        logits: [V], -inf for impossible tokens.
    """
    probs = logits.softmax(0)
    best = probs.max()
    below = (logits - logits.max()).clamp_(min=_IMPOSSIBLE)  # 0 log 0 is 0
    # With p = best * exp(below), -sum p log p is -log best - sum p * below.
    return best, -(best.log() + probs.dot(below))


def top1_probability(logits: Tensor) -> float:
    """`top1` as a number."""
    return float(top1(logits))


def entropy(logits: Tensor) -> float:
    """The entropy of `certainty` as a number."""
    return float(certainty(logits)[1])


def noisy_scores(logits: Tensor, positions: Sequence[int], sampling: SamplingConfig) -> Tensor:
    """Log-probabilities plus noise [n, V] in float64: their argmax is the draw."""
    scores = log_probabilities(logits, sampling)
    noise = {position: gumbel(sampling.seed, position, logits.shape[-1]) for position in positions}
    return scores + send(torch.stack([noise[position] for position in positions]), scores.device)


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
