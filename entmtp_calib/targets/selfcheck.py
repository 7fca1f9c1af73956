"""Does this engine verify trees? Asked of every model at load, on a tree of five nodes.

The same tokens go through the cache with a tree mask, and through the model's own plain forward,
path by path; then two nodes are committed and one more token follows. Last, two texts of different
lengths share a pass. Equal logits prove mask, positions, cache, gather and output layer together,
in milliseconds on small models; sliding windows are proven by a second check with a narrow one. It
says nothing about speed, and nothing about numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.families import cannot_verify
from entmtp_calib.targets.model import Engine
from entmtp_calib.targets.network import LIBRARY_ERRORS, first_line

_PARENTS = (-1, 0, 0, 1, 1, 2)
_DEPTHS = (0, 1, 1, 2, 2, 2)
_PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5))
_CONTEXT = 6
_NARROW_WINDOW = 4
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_LEAN_TOLERANCE = 3e-2


@torch.no_grad()
def self_check(engine: Engine, model: Any) -> None:
    """Refuse a model whose logits of trees or batches differ from its own plain forward's.

    A model whose code fails under our cache or masks is refused with what it said.

    Args:
        engine: what will verify trees.
        model: the transformers causal language model it was made from.
    """
    try:
        error, size = _error(engine, model)
    except LIBRARY_ERRORS as cause:
        raise cannot_verify(model.config, first_line(cause)) from cause
    limit = _LEAN_TOLERANCE if engine.name == "lean" else _TOLERANCE.get(model.dtype, 1e-1)
    if error > limit * max(1.0, size):
        raise ModelError(
            f"model family '{model.config.model_type}' with attention"
            f" '{model.config._attn_implementation}' ({engine.name} engine) computes other logits"
            f" for trees or batches than for single texts (difference {error:.3g})",
            "equal logits",
            "try --dtype float32, or use another target model",
        )


def honours_window(build: Callable[[Any], Engine], model: Any) -> bool:
    """Whether an engine sees what the model's own sliding layers see, beyond their window too.

    Tried with a window of four positions, which the model gets for the time of the check.

    Args:
        build: makes an engine of the model as it is at that time.
        model: a transformers causal language model with a sliding window.
    """
    text = model.config.get_text_config()
    window = text.sliding_window
    text.sliding_window = _NARROW_WINDOW
    try:
        self_check(build(model), model)
    except ModelError:
        return False
    finally:
        text.sliding_window = window
    return True


def _error(engine: Engine, model: Any) -> tuple[float, float]:
    """Largest difference of logits, and the largest logit."""
    ids = _token_ids(model)
    paths = torch.stack([ids[[*range(_CONTEXT), *(_CONTEXT + row for row in p)]] for p in _PATHS])
    last = ids[-1:].expand(len(_PATHS), 1)
    expected = model(input_ids=torch.cat([paths, last], dim=1)).logits.float()
    cache = TreeCache(engine.n_layers, _CONTEXT + len(_PARENTS) + 1)
    error = max(_tree_error(engine, cache, ids, expected), _batch_error(engine, ids, expected))
    return error, float(expected.abs().max())


def _tree_error(engine: Engine, cache: TreeCache, ids: Tensor, expected: Tensor) -> float:
    """Largest difference over all nodes, and over a token that follows a committed path."""
    device = ids.device
    context = torch.arange(_CONTEXT, device=device)
    engine.hidden(ids[:_CONTEXT], context, cache, None)
    cache.commit(range(_CONTEXT))
    tree_ids = ids[_CONTEXT : _CONTEXT + len(_PARENTS)]
    depths = torch.tensor(_DEPTHS, device=device)
    # Cloned: a pass may overwrite what the one before it gave.
    tree = engine.verify(tree_ids, depths, cache, _ancestors().to(device)).logits.clone()
    errors = [
        _difference(tree[list(path)], logits[_CONTEXT:-1])
        for path, logits in zip(_PATHS, expected, strict=True)
    ]
    cache.commit(_PATHS[-1])
    following = engine.verify(ids[-1:], depths[:1], cache, None).logits
    errors.append(_difference(following[0], expected[-1, -1]))
    return max(errors)


def _batch_error(engine: Engine, ids: Tensor, expected: Tensor) -> float:
    """Largest difference over a token that follows the context and one that begins a text."""
    cache = BatchCache(engine.n_layers, _CONTEXT + 1, 2)
    one = cache.of(0)
    engine.hidden(ids[:_CONTEXT], torch.arange(_CONTEXT, device=ids.device), one, None)
    one.commit(range(_CONTEXT))
    positions = torch.tensor([_CONTEXT, 0], device=ids.device)
    logits = engine.logits(engine.hidden_batch(ids[positions], positions, cache))
    return _difference(logits, expected[0, positions])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference; a model that is itself not finite is reported when tokens are chosen."""
    difference = (found - expected).abs().nan_to_num(torch.inf)
    return float(difference.where(expected.isfinite(), 0.0).max())


def _token_ids(model: Any) -> Tensor:
    """Distinct ids where the vocabulary allows, for context, nodes and one token after."""
    vocab = model.get_input_embeddings().weight.shape[0]
    count = _CONTEXT + len(_PARENTS) + 1
    return (torch.arange(count, device=model.device) * max(1, vocab // count) + 1) % vocab


def _ancestors() -> Tensor:
    """bool [6, 6]: row attends itself and its ancestors."""
    mask = torch.eye(len(_PARENTS), dtype=torch.bool)
    for row, parent in enumerate(_PARENTS):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask
