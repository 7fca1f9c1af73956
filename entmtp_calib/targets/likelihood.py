"""How probable a text is to the target: what tells whether texts that differ are as good.

This module knows no heads, no trees, and not how the text was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from entmtp_calib.errors import DataError
from entmtp_calib.targets.model import Target

CHUNK_ROWS = 256  # logits of a large vocabulary are held for so many rows at a time


@torch.inference_mode()
def mean_nll(target: Target, prompt_ids: Sequence[int], tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of a text after its prompt, at temperature 1.

    Args:
        target: whose likelihood it is.
        prompt_ids: at least one token; they only condition.
        tokens: the text, at least one token.

    Returns:
        nats per token; the logarithm of the text's perplexity.

    Raises:
        DataError: an empty prompt or text.
    """
    if not prompt_ids or not tokens:
        raise DataError(
            f"a text of {len(tokens)} tokens after a prompt of {len(prompt_ids)}",
            "at least one token in both",
        )
    ids = [*prompt_ids, *tokens]
    n_rows = len(ids) - 1  # the last token predicts nothing that is asked for
    cache = target.new_cache(n_rows)
    total = 0.0
    for start in range(0, n_rows, CHUNK_ROWS):
        end = min(start + CHUNK_ROWS, n_rows)
        hidden = target.forward(ids[start:end], range(start, end), cache)
        cache.commit(range(end - start))
        # Row r predicts token r + 1; the prompt's own tokens are not scored.
        first = max(start, len(prompt_ids) - 1)
        if first < end:
            log_probs = target.logits(hidden[first - start :]).log_softmax(-1)
            following = torch.tensor(ids[first + 1 : end + 1], device=log_probs.device)
            total -= float(log_probs.gather(1, following[:, None]).double().sum())
    return total / len(tokens)
