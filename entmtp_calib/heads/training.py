"""Train heads by self-distillation: the target stays as it is, heads learn its own next tokens.

Loss per head: cross-entropy against a mix of the token the target wrote and the target's (top-k)
distribution there, over the draft vocabulary, heads equally weighted. AdamW, linear warm-up, cosine
decay (the recipe of the published Hydra heads, with the hard label mixed in). Checkpoints hold the
whole state, so a stopped run goes on with the very batches it had left.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from entmtp_calib import files
from entmtp_calib.config import TrainConfig
from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.features import FeatureSet
from entmtp_calib.heads.model import Heads, HeadsConfig, ResBlock
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.progress import Progress
from entmtp_calib.provenance import sha256_json
from entmtp_calib.targets.facts import rope_theta
from entmtp_calib.targets.model import Target


def draft_vocabulary(features: FeatureSet, indices: Sequence[int], size: int) -> Tensor | None:
    """The `size` most frequent continuation tokens (ties: smaller id), ascending; None for all."""
    if size == 0:
        return None
    counts: Counter[int] = Counter()
    for i in indices:
        sequence = features[i]
        counts.update(sequence.tokens[sequence.prompt_length :].tolist())
    best = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(best), dtype=torch.long)


def new_heads(config: TrainConfig, target: Target, draft_ids: Tensor | None) -> Heads:
    """Untrained heads for `target`, started so that they first predict what the target does."""
    embedding, lm_head = target.embedding_weight, target.lm_head_weight
    prefix = None
    if config.prefix_width:
        prefix = _prefix_like(target, config.prefix_width)
    architecture = HeadsConfig(
        kind=config.kind,
        n_heads=config.n_heads,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        n_layers=config.n_layers,
        own_projection=config.own_projection,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        embed_scale=1.0 / embedding.float().pow(2).mean().sqrt().item(),
        prefix=prefix,
    )
    torch.manual_seed(config.seed)
    heads = Heads(architecture, embedding, lm_head, draft_ids).to(target.device)
    for block in heads.modules():
        if isinstance(block, ResBlock):
            _start_as_identity(block)
    if heads.prefix is not None:
        torch.nn.init.zeros_(heads.prefix.o.weight)
        torch.nn.init.zeros_(heads.prefix.down.weight)
    if config.own_projection:
        start = lm_head if draft_ids is None else lm_head[draft_ids]
        for depth in range(1, heads.n_heads + 1):
            projection = heads.head(depth).projection
            assert projection is not None  # own_projection
            projection.weight.data.copy_(start)
    return heads


def _prefix_like(target: Target, width: int) -> PrefixConfig:
    """A prefix layer with the attention of the target's own layers."""
    text = target.config.get_text_config()
    n_heads = text.num_attention_heads
    return PrefixConfig(
        intermediate_size=width,
        n_attention_heads=n_heads,
        n_key_value_heads=getattr(text, "num_key_value_heads", None) or n_heads,
        head_dim=getattr(text, "head_dim", None) or target.hidden_size // n_heads,
        rope_theta=rope_theta(text),
    )


def _start_as_identity(block: ResBlock) -> None:
    """The block passes its first vector on and adds nothing yet."""
    hidden = block.linear.out_features
    torch.nn.init.normal_(block.linear.weight, std=0.2 / math.sqrt(block.linear.in_features))
    torch.nn.init.zeros_(block.linear.bias)
    if block.skip is not None:
        torch.nn.init.zeros_(block.skip.weight)
        torch.nn.init.zeros_(block.skip.bias)
        block.skip.weight.data[:, :hidden] = torch.eye(hidden)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences on the training device."""

    tokens: Tensor
    """int64 [B, T]"""
    hidden: Tensor
    """float32 [B, T, h]"""
    soft_ids: Tensor
    """int64 [B, T, K]"""
    soft_probs: Tensor
    """float32 [B, T, K]"""
    start: Tensor
    """bool [B, T]: positions drafting can start from, two tokens or more before the end"""
    lengths: Tensor
    """int64 [B]"""


def collate(features: FeatureSet, indices: Sequence[int], device: torch.device) -> Batch:
    """Read and pad some sequences."""
    rows = [features[i] for i in indices]

    def pad(values: list[Tensor], dtype: torch.dtype) -> Tensor:
        return pad_sequence(values, batch_first=True).to(device, dtype)

    tokens = pad([row.tokens for row in rows], torch.long)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
    prompts = torch.tensor([row.prompt_length for row in rows], device=device)
    at = torch.arange(tokens.shape[1], device=device)
    return Batch(
        tokens=tokens,
        hidden=pad([row.hidden for row in rows], torch.float32),
        soft_ids=pad([row.soft_ids for row in rows], torch.long),
        soft_probs=pad([row.soft_probs for row in rows], torch.float32),
        start=(at >= prompts[:, None] - 1) & (at <= lengths[:, None] - 3),
        lengths=lengths,
    )


class Loss:
    """The training loss of a batch; knows the map from target ids to draft ids."""

    def __init__(self, heads: Heads, config: TrainConfig) -> None:
        self.heads, self.config = heads, config
        size = heads.config.vocab_size
        device = heads.device
        self.to_draft = torch.full((size,), -1, dtype=torch.long, device=device)
        ids = torch.arange(size, device=device) if heads.draft_ids is None else heads.draft_ids
        self.to_draft[ids] = torch.arange(len(ids), device=device)

    def __call__(self, batch: Batch) -> Tensor:
        """Mean over heads of the mean loss per position."""
        vectors = batch.hidden
        if self.heads.prefix is not None:
            at = torch.arange(vectors.shape[1], device=vectors.device)
            vectors, _ = self.heads.prefix(vectors, at)
        row, at = batch.start.nonzero(as_tuple=True)
        vectors = torch.nn.functional.dropout(
            vectors[row, at], self.config.dropout, self.heads.training
        )
        losses = [
            self._one(batch, vectors, row, at, depth) for depth in range(1, self.heads.n_heads + 1)
        ]
        return torch.stack(losses).mean()

    def _one(self, batch: Batch, vectors: Tensor, row: Tensor, at: Tensor, depth: int) -> Tensor:
        """Loss of one head: position t predicts token t + 1 + depth, from row t + depth's view."""
        inside = at + 1 + depth < batch.lengths[row]
        row, at, vectors = row[inside], at[inside], vectors[inside]
        labels = self.to_draft[batch.tokens[row, at + 1 + depth]]
        known = labels >= 0
        row, at, vectors, labels = row[known], at[known], vectors[known], labels[known]
        path = torch.stack([batch.tokens[row, at + 1 + i] for i in range(depth)], dim=1)
        logits = self.heads.level_logits(depth, vectors, path)
        soft_ids = self.to_draft[batch.soft_ids[row, at + depth]]
        soft = batch.soft_probs[row, at + depth] * (soft_ids >= 0)
        soft = soft / soft.sum(1, keepdim=True).clamp(min=1e-6)
        weight = self.config.soft_weight
        hard_score = logits.gather(1, labels[:, None])[:, 0]
        soft_score = (logits.gather(1, soft_ids.clamp(min=0)) * soft).sum(1)
        score = (1 - weight) * hard_score + weight * soft_score
        # A batch of short texts may have no position so deep; a mean of nothing would be NaN.
        return (logits.logsumexp(1) - score).sum() / max(len(score), 1)


def batches(
    features: FeatureSet, indices: Sequence[int], tokens: int, seed: int
) -> list[list[int]]:
    """Sequences of similar length together, about `tokens` padded tokens a batch, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(indices), generator=generator).tolist()
    order = sorted(
        range(len(indices)), key=lambda j: features.length(indices[j]) * (0.8 + 0.4 * noise[j])
    )
    groups: list[list[int]] = []
    current: list[int] = []
    for j in order:
        width = max([features.length(i) for i in current] + [features.length(indices[j])])
        if current and width * (len(current) + 1) > tokens:
            groups.append(current)
            current = []
        current.append(indices[j])
    groups.append(current)
    shuffle = torch.randperm(len(groups), generator=generator).tolist()
    return [groups[j] for j in shuffle]


@dataclass
class Checkpoint:
    """Where a run stands; `history` has one validation record per finished epoch."""

    epoch: int
    batch: int
    step: int
    history: list[dict[str, Any]]


class Trainer:
    """Trains heads on features; `run` can be interrupted at any time and called again."""

    def __init__(
        self,
        heads: Heads,
        config: TrainConfig,
        features: FeatureSet,
        training: Sequence[int],
        checkpoint: Path,
    ) -> None:
        self.heads, self.config, self.features = heads, config, features
        self.training, self.path = list(training), checkpoint
        self.at = Checkpoint(0, 0, 0, [])
        self.loss = Loss(heads, config)
        self.optimizer = torch.optim.AdamW(
            heads.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )
        self.total_steps = sum(len(self._batches(epoch)) for epoch in range(config.epochs))

    def run(
        self, validate: Callable[[Heads], dict[str, Any]], progress: Progress
    ) -> list[dict[str, Any]]:
        """Train to the end; returns the history, one record per epoch."""
        self._resume()
        progress.start("training", self.total_steps)
        progress.advance(self.at.step)
        saved = time.monotonic()
        for loss in self._steps(validate):
            progress.advance(1, f"epoch {self.at.epoch + 1} loss {loss:.3f}")
            if time.monotonic() - saved > self.config.checkpoint_seconds:
                self._save()
                saved = time.monotonic()
        progress.done()
        return self.at.history

    def _steps(self, validate: Callable[[Heads], dict[str, Any]]) -> Iterator[float]:
        while self.at.epoch < self.config.epochs:
            groups = self._batches(self.at.epoch)
            losses: list[float] = []
            while self.at.batch < len(groups):
                losses.append(self._step(groups[self.at.batch]))
                self.at.batch += 1
                self.at.step += 1
                yield losses[-1]
            self.heads.eval()
            mean = sum(losses) / max(len(losses), 1)
            record = {"epoch": self.at.epoch + 1, "loss": mean, **validate(self.heads)}
            self.at = Checkpoint(self.at.epoch + 1, 0, self.at.step, [*self.at.history, record])
            self._save()

    def _step(self, indices: Sequence[int]) -> float:
        self.heads.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self._schedule(self.at.step)
        loss = self.loss(collate(self.features, indices, self.heads.device))
        if not torch.isfinite(loss):
            raise HeadsError(
                f"the training loss is {loss.item()} at step {self.at.step}",
                "a finite loss",
                "lower --lr; the last checkpoint is kept",
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then cosine from 1 to `final_lr`, as a factor of the learning rate."""
        warmup = max(1, int(self.config.warmup * self.total_steps))
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, self.total_steps - warmup)
        low = self.config.final_lr
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))

    def _batches(self, epoch: int) -> list[list[int]]:
        seed = self.config.seed * 1000 + epoch
        return batches(self.features, self.training, self.config.batch_tokens, seed)

    @property
    def _texts(self) -> str:
        """Hash of what is learned from."""
        return sha256_json([self.features.fingerprint, self.training])

    def _save(self) -> None:
        partial = self.path.with_suffix(".partial")
        state = {
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "at": vars(self.at),
            "config": self.config.to_dict(),
            "texts": self._texts,
        }
        with files.writing(self.path):
            torch.save(state, partial)
            os.replace(partial, self.path)

    def _resume(self) -> None:
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        if state["config"] != self.config.to_dict() or state.get("texts") != self._texts:
            raise HeadsError(
                f"{self.path} belongs to a run with other settings or texts",
                "the same settings",
                "pass another --out, or delete the checkpoint",
            )
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.at = Checkpoint(**state["at"])
