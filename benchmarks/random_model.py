"""A model of Vicuna-7B's shape with heads of the published Hydra++ heads' shape, of random weights.

Everything is made on the device, so nothing is downloaded. The heads: four, grounded, of four
layers each, with their own projections and a prefix layer (Ankner et al. 2024).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from entmtp_calib.decoding import Decoder
from entmtp_calib.heads.model import Heads, HeadsConfig
from entmtp_calib.heads.prefix import PrefixConfig
from entmtp_calib.targets.graphed import GraphedEngine
from entmtp_calib.targets.graphs import CudaGraphs
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.model import Target, TargetFacts
from entmtp_calib.tree import Tree

HEADS, HEAD_LAYERS, RANKS = 4, 4, 32


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model, and the contexts that steps are timed at."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocab: int
    contexts: tuple[int, ...]
    tokens: int
    read_bytes: int

    @property
    def positions(self) -> int:
        return 2 * max(self.contexts)


VICUNA_7B = Shape(4096, 11008, 32, 32, 32000, (128, 512, 1024, 2048), 128, 2**31)
TINY = Shape(32, 64, 2, 4, 64, (16, 48), 12, 2**20)


@dataclass(frozen=True)
class Engine:
    """A target on one engine with its heads, and a decoder of a tree per number of rows."""

    name: str
    target: Target
    heads: Heads
    decoder: Decoder

    @classmethod
    def of(
        cls, engine: TransformersEngine, heads: Heads, shape: Shape, row_counts: Sequence[int]
    ) -> Engine:
        facts = TargetFacts(
            name="random",
            family="llama",
            fingerprint="random",
            eos_ids=frozenset(),
            max_positions=shape.positions,
            attention="sdpa",
            n_weights=sum(weight.numel() for weight in engine.model.parameters()),
        )
        target, heads = Target(engine, None, facts), copy.copy(heads)
        if target.recorder:
            heads.record(target.recorder)
        return cls(
            engine.name, target, heads, Decoder(target, heads, [bushy(n) for n in row_counts])
        )


def make_network(shape: Shape, device: torch.device, dtype: torch.dtype) -> Any:
    """The model, its weights made on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.positions,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    with device:
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return network.eval().requires_grad_(False)


def make_engines(network: Any, shape: Shape, row_counts: Sequence[int]) -> list[Engine]:
    """The engines that run here, over the same weights; the one for the cost table first."""
    plain = TransformersEngine(network)
    prefix = PrefixConfig(
        shape.inner, shape.heads, shape.heads, shape.hidden // shape.heads, rms_eps=1e-6
    )
    config = HeadsConfig(
        "hydra",
        HEADS,
        shape.hidden,
        shape.vocab,
        n_layers=HEAD_LAYERS,
        own_projection=True,
        projection_bias=True,
        prefix=prefix,
    )
    with network.device:
        heads = Heads(config, plain.embedding_weight, plain.lm_head_weight)
    heads = heads.to(network.dtype).eval().requires_grad_(False)
    engines: list[TransformersEngine] = [plain]
    if network.device.type == "cuda":
        engines.insert(0, GraphedEngine(network, CudaGraphs(network.device)))
    return [Engine.of(engine, heads, shape, row_counts) for engine in engines]


def bushy(n_rows: int) -> Tree:
    """A tree of so many rows in two levels, the first of them filled first."""
    below = ((parent, rank) for rank in range(RANKS) for parent in range(RANKS))
    return Tree.of(
        itertools.islice(itertools.chain(((n,) for n in range(RANKS)), below), n_rows - 1)
    )
