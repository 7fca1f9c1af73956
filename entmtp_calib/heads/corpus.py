"""The text heads learn from: the target's own continuations of prompts, written in batches.

One sequence at a time would leave most of the arithmetic idle, so many are generated together:
left-padded, over a preallocated cache, rows leaving the batch as they end. Texts are appended to a
JSONL file batch by batch; what is there already is not generated again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from entmtp_calib import files
from entmtp_calib.errors import DataError, ModelError
from entmtp_calib.heads.features import Text
from entmtp_calib.progress import Progress
from entmtp_calib.targets.hf import cache_argument
from entmtp_calib.targets.model import Target

BATCH_SEQUENCES = 48
GROUPED = "entmtp_grouped"


def write_corpus(
    target: Target,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    max_new_tokens: int,
    path: Path,
    progress: Progress,
) -> list[Text]:
    """Continue each (source, prompt ids) greedily; returns all texts, in the prompts' order.

    `path` is a JSONL file of texts; it may hold part of them from an earlier, stopped run.
    """
    _drop_partial_line(path)
    known = {(text.source, text.prompt_ids): text for text in read_corpus(path)}
    left = sorted(
        {item for item in prompts if item not in known}, key=lambda item: (len(item[1]), item)
    )
    progress.start("continuations", len(left))
    for start in range(0, len(left), BATCH_SEQUENCES):
        batch = left[start : start + BATCH_SEQUENCES]
        written = continue_batch(target, [ids for _, ids in batch], max_new_tokens)
        with files.writing(path), path.open("a", encoding="utf-8") as file:
            for (source, ids), completion in zip(batch, written, strict=True):
                text = Text(source, ids, tuple(completion))
                known[source, ids] = text
                file.write(json.dumps(vars(text)) + "\n")
        progress.advance(len(batch))
    progress.done()
    return [known[item] for item in prompts]


def read_corpus(path: Path) -> list[Text]:
    """The texts of a corpus file; none where there is no file."""
    if not path.exists():
        return []
    texts = []
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            row = json.loads(line)
            source, prompt, completion = row["source"], row["prompt_ids"], row["completion_ids"]
            if not (_is_name(source) and _is_ids(prompt) and _is_ids(completion)):
                raise ValueError("a source is a word, ids are lists of whole numbers")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} line {number} is no text of a corpus ({error})",
                "source, prompt_ids and completion_ids",
                "delete the file to generate it again",
            ) from error
        texts.append(Text(source, tuple(prompt), tuple(completion)))
    return texts


def _is_name(value: Any) -> bool:
    """Sources name files."""
    return isinstance(value, str) and value.isalnum()


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _drop_partial_line(path: Path) -> None:
    """Remove what a killed run left of a line, so that the next text is not glued to it."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            path.write_bytes(whole)


@torch.inference_mode()
def continue_batch(
    target: Target, prompts: Sequence[tuple[int, ...]], max_new_tokens: int
) -> list[list[int]]:
    """Greedy continuations of all prompts, each up to and with its first EOS token."""
    model = target.model
    if model is None:
        raise ModelError("batched generation on the lean engine", "the engine transformers")
    before = model.config._attn_implementation
    model.set_attn_implementation(GROUPED)
    try:
        return _Batch(target, prompts, max_new_tokens).run()
    finally:
        model.set_attn_implementation(before)


class _Batch:
    """Some sequences being continued together; finished ones leave."""

    def __init__(
        self, target: Target, prompts: Sequence[tuple[int, ...]], max_new_tokens: int
    ) -> None:
        self.target, self.width = target, max(map(len, prompts))
        self.room = min(max_new_tokens, target.max_positions - self.width)
        self.written: list[list[int]] = [[] for _ in prompts]
        self.alive = list(range(len(prompts)))
        self.pads = torch.tensor([self.width - len(ids) for ids in prompts])
        self.ids = torch.tensor([[0] * (self.width - len(ids)) + list(ids) for ids in prompts])
        capacity = self.width + self.room
        self.layers = [_BatchLayer(capacity) for _ in range(target.n_layers)]

    def run(self) -> list[list[int]]:
        """All continuations, in the order of the prompts."""
        ids, length = self.ids, 0
        for _ in range(self.room):
            chosen = self._next(ids, length)
            length += ids.shape[1]
            for row, token in zip(self.alive, chosen.tolist(), strict=True):
                self.written[row].append(token)
            stays = [i for i, t in enumerate(chosen.tolist()) if t not in self.target.eos_ids]
            if not stays:
                break
            if len(stays) < len(self.alive):
                self._keep(torch.tensor(stays))
            ids = chosen[stays].cpu()[:, None]
        return self.written

    def _keep(self, rows: Tensor) -> None:
        self.alive = [self.alive[i] for i in rows.tolist()]
        self.pads = self.pads[rows]
        for layer in self.layers:
            layer.keep(rows)

    def _next(self, ids: Tensor, length: int) -> Tensor:
        """The next token of every sequence [B], after feeding ids [B, n]."""
        device, n = self.target.device, ids.shape[1]
        columns = torch.arange(length + n)
        rows = columns[length:]
        allowed = (columns >= self.pads[:, None])[:, None] & (columns <= rows[:, None])
        # A padded row attends itself: an empty row would be NaN.
        allowed |= columns == rows[:, None]
        base = self.target.model.base_model
        hidden = base(
            input_ids=ids.to(device),
            position_ids=(rows - self.pads[:, None]).clamp(min=0).to(device),
            attention_mask=allowed[:, None].to(device),
            use_cache=True,
            **{cache_argument(base): Cache(layers=self.layers)},
        ).last_hidden_state[:, -1]
        return self.target.logits(hidden).argmax(-1)


class _BatchLayer(CacheLayerMixin):
    """Preallocated keys and values of one layer for a batch [B, kv_heads, capacity, head_dim]."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity, self.length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, *_args: Any) -> None:
        """Allocate on the first write."""
        shape = (*key_states.shape[:2], self.capacity, key_states.shape[-1])
        self.keys, self.values = key_states.new_empty(shape), key_states.new_empty(shape)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write n columns and return all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        """Drop the sequences that ended."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self, *_args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        n = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + n, 0

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length


def _grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention that does not repeat grouped keys: [B, H, n, d] over [B, KV, m, d]."""
    batch, heads, n, dim = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None:
        raise ModelError("a batch without a mask", "the mask of a left-padded batch")
    grouped = query.reshape(batch, key.shape[1], groups * n, dim)
    scores = grouped @ key.transpose(2, 3) * (scaling or dim**-0.5)
    keep = attention_mask.repeat(1, 1, groups, 1) if groups > 1 else attention_mask
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1, dtype=torch.float32)
    out = (weights.to(value.dtype) @ value).view(batch, heads, n, dim)
    return out.transpose(1, 2), None


AttentionInterface.register(GROUPED, _grouped_attention)
