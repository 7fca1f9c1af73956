"""What heads learn from: the target's hidden states and next-token distributions over a text.

The target runs once over prompt and continuation; shards hold everything training needs, so that
epochs cost no target pass. A shard is a safetensors file of packed sequences:

    tokens int32 [N], hidden float16 [N, h] (after the final norm), lengths and prompt_lengths
    int32 [S], soft_ids int32 [N, K], soft_probs float16 [N, K] (zero inside the prompt).

Row t of the soft targets is the target's distribution of token t + 1. Shards that exist are kept,
so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from entmtp_calib import files
from entmtp_calib.progress import Progress
from entmtp_calib.provenance import sha256_json
from entmtp_calib.targets.model import Target

SOFT_K = 16
SHARD_SEQUENCES = 64
BATCH_SEQUENCES = 8


@dataclass(frozen=True)
class Text:
    """A prompt and the target's continuation, as token ids; `source` names where it comes from."""

    source: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of prompt and continuation together."""
        return len(self.prompt_ids) + len(self.completion_ids)


def write_features(
    target: Target, texts: Sequence[Text], folder: Path, progress: Progress
) -> list[Path]:
    """Write the shards of `texts` into `folder`; returns their paths in order."""
    by_source: dict[str, list[Text]] = {}
    for text in texts:
        by_source.setdefault(text.source, []).append(text)
    chunks = [
        group[start : start + SHARD_SEQUENCES]
        for group in by_source.values()
        for start in range(0, len(group), SHARD_SEQUENCES)
    ]
    jobs = [(folder / shard_name(chunk), chunk) for chunk in chunks]
    progress.start("hidden states", sum(text.length for text in texts))
    for path, chunk in jobs:
        if not path.exists():
            _write_shard(target, chunk, path)
        progress.advance(sum(text.length for text in chunk))
    progress.done()
    return [path for path, _ in jobs]


def shard_name(chunk: Sequence[Text]) -> str:
    """SOURCE-HASH.safetensors; the hash is of the texts, so other texts never pass for these."""
    ids = [[text.prompt_ids, text.completion_ids] for text in chunk]
    return f"{chunk[0].source}-{sha256_json(ids)[:16]}.safetensors"


def _write_shard(target: Target, chunk: Sequence[Text], path: Path) -> None:
    ordered = sorted(chunk, key=lambda text: text.length)
    parts: dict[str, list[Tensor]] = {"tokens": [], "hidden": [], "soft_ids": [], "soft_probs": []}
    for start in range(0, len(ordered), BATCH_SEQUENCES):
        for rows in _run_batch(target, ordered[start : start + BATCH_SEQUENCES]):
            for name, value in rows.items():
                parts[name].append(value)
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    tensors["lengths"] = torch.tensor([t.length for t in ordered], dtype=torch.int32)
    prompts = [len(t.prompt_ids) for t in ordered]
    tensors["prompt_lengths"] = torch.tensor(prompts, dtype=torch.int32)
    files.write_bytes(path, save(tensors))


@torch.inference_mode()
def _run_batch(target: Target, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
    width = max(text.length for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    for i, text in enumerate(texts):
        ids[i, : text.length] = torch.tensor(text.prompt_ids + text.completion_ids)
    # Right padding under a causal mask: no real row ever sees a padded one.
    hidden = target.hidden_states(ids)
    return [_soft_rows(target, text, ids[i], hidden[i]) for i, text in enumerate(texts)]


def _soft_rows(target: Target, text: Text, ids: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    n, before = text.length, len(text.prompt_ids) - 1
    k = min(SOFT_K, target.vocab_size)
    probs, index = target.logits(hidden[before:n]).softmax(-1).topk(k, dim=-1)
    soft_ids = torch.zeros(n, k, dtype=torch.int32)
    soft_probs = torch.zeros(n, k, dtype=torch.float16)
    soft_ids[before:], soft_probs[before:] = index.int().cpu(), probs.half().cpu()
    return {
        "tokens": ids[:n].int(),
        "hidden": hidden[:n].half().cpu(),
        "soft_ids": soft_ids,
        "soft_probs": soft_probs,
    }


@dataclass(frozen=True)
class Example:
    """One training text read back: see the shard format for the fields."""

    tokens: Tensor
    hidden: Tensor
    soft_ids: Tensor
    soft_probs: Tensor
    prompt_length: int


class FeatureSet:
    """Random access to the sequences of many shards; tensors are read when asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.index: list[tuple[int, int, int, int]] = []
        self.sources: list[str] = []
        self._names = [path.name for path in paths]
        self._files = [safe_open(str(path), framework="pt") for path in paths]
        for shard, (path, file) in enumerate(zip(paths, self._files, strict=True)):
            lengths = file.get_tensor("lengths").tolist()
            prompts = file.get_tensor("prompt_lengths").tolist()
            start = 0
            for length, prompt in zip(lengths, prompts, strict=True):
                self.index.append((shard, start, start + length, prompt))
                self.sources.append(path.name.rsplit("-", 1)[0])
                start += length

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the shards' names, which are hashes of their texts."""
        return sha256_json(self._names)

    def __len__(self) -> int:
        return len(self.index)

    def length(self, i: int) -> int:
        """Tokens of sequence i, prompt included."""
        _, start, end, _ = self.index[i]
        return end - start

    def positions(self, i: int) -> int:
        """Positions of sequence i that drafting can start from."""
        return self.length(i) - self.index[i][3]

    def __getitem__(self, i: int) -> Example:
        shard, start, end, prompt = self.index[i]
        file = self._files[shard]
        read = {
            name: file.get_slice(name)[start:end]
            for name in ("tokens", "hidden", "soft_ids", "soft_probs")
        }
        return Example(**read, prompt_length=prompt)
