"""Drafting heads: Hydra (sequential), Hydra++ (with a prefix layer), Medusa (independent).

Hydra head d (1-based) reads `[prefix, e(root), e(draft 1), ..., e(draft d-1)]` and scores the token
at depth d; a Medusa head reads the hidden state alone. Both end in a vocabulary projection, owned
or shared with the target, over all tokens or over a reduced draft vocabulary.

Architecture: Ankner et al. 2024 (Hydra), Cai et al. 2024 (Medusa). This module does not know files,
trees or how heads are trained.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from entmtp_calib.errors import HeadsError
from entmtp_calib.heads.graphed import HeadGraphs
from entmtp_calib.heads.packing import PackedHead, PackedPrefix, Past, can_pack_all
from entmtp_calib.heads.prefix import KeysValues, PrefixConfig, PrefixLayer, appended
from entmtp_calib.largest import top
from entmtp_calib.targets.graphs import Recorder, Sizes
from entmtp_calib.targets.packed import PackedLinear, can_pack

RANK_CAP = 32
"""Child ranks that are ever looked at: the trace records them, and trees may use them."""


@dataclass(frozen=True)
class HeadsConfig:
    """What `heads.json` says of the architecture; together with the tensors it is complete.

    `n_layers` counts residual blocks per head. Hydra's first block reads several vectors and has a
    linear skip connection; the later blocks of one head are one block applied again (the published
    heads tie them the same way). `draft_vocab_size` None means every target token can be drafted.
    """

    kind: str
    n_heads: int
    hidden_size: int
    vocab_size: int
    n_layers: int = 1
    own_projection: bool = False
    projection_bias: bool = False
    draft_vocab_size: int | None = None
    embed_scale: float = 1.0
    prefix: PrefixConfig | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("hydra", "medusa"):
            raise HeadsError(f"heads of kind {self.kind!r}", "hydra or medusa")
        if min(self.n_heads, self.hidden_size, self.vocab_size, self.n_layers) < 1:
            raise HeadsError(f"heads with a size below 1: {self}", "sizes of at least 1")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Inverse of `to_dict`."""
        prefix = values.get("prefix")
        return cls(**{**values, "prefix": PrefixConfig(**prefix) if prefix else None})


class ResBlock(nn.Module):
    """`skip(x) + SiLU(linear(x))`, the skip being a linear layer where the input is wider.

    Args:
        hidden_size: h.
        n_embeddings: token embeddings that stand behind the hidden vector in the input.
    """

    def __init__(self, hidden_size: int, n_embeddings: int = 0) -> None:
        super().__init__()
        width = (1 + n_embeddings) * hidden_size
        self.linear = nn.Linear(width, hidden_size)
        self.skip = nn.Linear(width, hidden_size) if n_embeddings else None

    def forward(self, vector: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """vector [..., h] and embeddings [..., n_embeddings * h] -> [..., h]."""
        inner = _wide(self.linear, vector, embeddings)
        passed = _wide(self.skip, vector, embeddings) if self.skip else vector
        return passed + F.silu(inner)


def _wide(layer: nn.Linear, vector: Tensor, embeddings: Tensor | None) -> Tensor:
    """The layer on the concatenated input, in two products.

    A vector that many paths share is multiplied once, and no gradient is formed for embeddings.
    """
    if embeddings is None:
        return layer(vector)
    width = vector.shape[-1]
    shared = F.linear(vector, layer.weight[:, :width], layer.bias)
    return shared + F.linear(embeddings, layer.weight[:, width:])


class Head(nn.Module):
    """The residual blocks of one depth, and its own vocabulary projection if it has one."""

    def __init__(self, config: HeadsConfig, depth: int) -> None:
        super().__init__()
        h = config.hidden_size
        self.first = ResBlock(h, depth if config.kind == "hydra" else 0)
        self.again = ResBlock(h) if config.n_layers > 1 else None
        self.n_again = config.n_layers - 1
        width = config.draft_vocab_size or config.vocab_size
        own, bias = config.own_projection, config.projection_bias
        self.projection = nn.Linear(h, width, bias=bias) if own else None

    def forward(self, vector: Tensor, embeddings: Tensor | None) -> Tensor:
        """vector [..., h] and path embeddings [..., depth * h] -> [..., h], to be projected."""
        x = self.first(vector, embeddings)
        if self.again is not None:
            for _ in range(self.n_again):
                x = self.again(x)
        return x


class HeadState:
    """What drafting is conditioned on: vectors of the newest committed rows, and prefix keys."""

    def __init__(self) -> None:
        self.vectors = torch.empty(0)
        self.past: KeysValues | Past | None = None

    @property
    def vector(self) -> Tensor:
        """[h], that of the last committed token."""
        return self.vectors[-1]


class Heads(nn.Module):
    """A full set of heads bound to a target's embeddings and output projection.

    Args:
        config: the architecture.
        embedding: [V, h] the target's token embeddings as its first layer sees them.
        lm_head: [V, h] the target's output projection (used where projections are shared).
        draft_ids: [Vd] target ids of the draft vocabulary, or None for all.
    """

    draft_ids: Tensor | None
    embedding: Tensor
    shared_projection: Tensor | None

    def __init__(
        self,
        config: HeadsConfig,
        embedding: Tensor,
        lm_head: Tensor,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.kind, self.n_heads = config.kind, config.n_heads
        self.heads = nn.ModuleList(Head(config, depth) for depth in range(1, self.n_heads + 1))
        prefix = config.prefix
        self.prefix = PrefixLayer(config.hidden_size, prefix) if prefix else None
        self.register_buffer("draft_ids", draft_ids)
        # The target's weights are read, never trained: without detach they would join the graph.
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        shared = None
        if not config.own_projection:
            rows = lm_head.detach()
            shared = rows if draft_ids is None else rows[draft_ids.to(rows.device)]
        self.register_buffer("shared_projection", shared, persistent=False)
        self._packed: list[PackedHead] = []
        self._packed_prefix: PackedPrefix | None = None
        self.graphs: HeadGraphs | None = None

    def pack(self) -> None:
        """Pack the weights for drafting on a CPU; where that cannot be, nothing changes.

        Only for heads that are not trained any more: the packed copy does not follow.
        """
        if not can_pack() or not can_pack_all([*self.parameters(), self.embedding]):
            return
        shared = None
        if self.shared_projection is not None:
            shared = PackedLinear(self.shared_projection)
        self._packed = [_packed(self.head(d + 1), shared) for d in range(self.n_heads)]
        self._packed_prefix = PackedPrefix(self.prefix) if self.prefix else None

    def record(self, record: Recorder, sizes: Sizes | None = None) -> None:
        """Draft by recorded graphs from now on; only for heads that are not trained any more."""
        vector = self.embedding.new_empty(self.config.hidden_size, dtype=self.dtype)
        most_rows = self.n_heads + 1
        self.graphs = HeadGraphs(self._best, vector, self.prefix, most_rows, record, sizes)

    def head(self, depth: int) -> Head:
        """The head that drafts at a depth, 1-based."""
        return cast(Head, self.heads[depth - 1])

    @property
    def device(self) -> torch.device:
        """Where drafting happens."""
        return self.embedding.device

    @property
    def n_ranks(self) -> int:
        """Child ranks a tree may use: what can be drafted, at most `RANK_CAP`."""
        return min(RANK_CAP, self.config.draft_vocab_size or self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """What the heads compute in; the target's own weights may be of another type."""
        return self.head(1).first.linear.weight.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids of any shape -> scaled embeddings [..., h]."""
        return F.embedding(ids, self.embedding).to(self.dtype) * self.config.embed_scale

    def project(self, head: Head, x: Tensor) -> Tensor:
        """[..., h] -> draft logits [..., Vd], float32."""
        if head.projection is not None:
            return head.projection(x).float()
        assert self.shared_projection is not None  # the constructor gave it: no own projection
        return F.linear(x.to(self.shared_projection.dtype), self.shared_projection).float()

    def observe(self, state: HeadState, hidden: Tensor, positions: Tensor) -> None:
        """Take in newly committed rows.

        Args:
            hidden: [n, h] the target's hidden states of the rows, after its final norm.
            positions: [n] their absolute positions.
        """
        hidden = hidden.to(self.dtype)
        if self.prefix is None:
            state.vectors = hidden
        elif self._packed_prefix is not None:
            assert not isinstance(state.past, tuple)
            state.vectors, state.past = self._packed_prefix(hidden, positions, state.past)
        elif self.graphs is not None:
            assert not isinstance(state.past, tuple)
            state.vectors, state.past = self.graphs.follow(state, hidden, positions, state.past)
        else:
            assert not isinstance(state.past, Past)
            out, new = self.prefix(hidden[None], positions, state.past)
            state.past = appended(state.past, new)
            state.vectors = out[0]

    def level_logits(self, depth: int, vectors: Tensor, path_ids: Tensor) -> Tensor:
        """Draft logits for the children of R paths.

        Args:
            depth: the depth of the children, 1-based.
            vectors: [h] or [R, h], what drafting is conditioned on.
            path_ids: [R, depth] token ids from the root to the parent.

        Returns:
            [R, Vd] float32.
        """
        head = self.head(depth)
        embeddings = self.embed(path_ids).flatten(1) if self.kind == "hydra" else None
        if self._packed:
            logits = self._packed[depth - 1](vectors, embeddings)
        else:
            logits = self.project(head, head(vectors, embeddings))
        return logits.expand(len(path_ids), -1)

    def draft_level(
        self, depth: int, vector: Tensor, path_ids: Tensor, n_probs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best children of R paths from one position: `top` of `level_logits`.

        Medusa's choices are the same on every path, so they are computed once.
        """
        best = self.graphs.best if self.graphs else self._best
        if self.kind == "hydra":
            return best(depth, vector, path_ids, n_probs)
        ids, probs = best(depth, vector, path_ids[:1], n_probs)
        return ids.expand(len(path_ids), -1), probs.expand(len(path_ids) * len(probs), -1)

    def _best(
        self, depth: int, vector: Tensor, path_ids: Tensor, n_probs: int | None = None
    ) -> tuple[Tensor, Tensor]:
        vectors = vector if self.kind == "hydra" else vector[None]
        return self.top(self.level_logits(depth, vectors, path_ids), n_probs)

    def top(self, logits: Tensor, n_probs: int | None = None) -> tuple[Tensor, Tensor]:
        """The best `RANK_CAP` children: target ids and probabilities, each [R, k].

        Every caller uses the same k, so that a rank means the same in a trace and in decoding.

        Args:
            logits: [R, Vd].
            n_probs: rows whose probabilities are wanted, the first ones; None: all. They cost as
                much as the choices.
        """
        _, index = top(logits, self.n_ranks)
        probs = logits[:n_probs].softmax(-1).gather(-1, index[:n_probs])
        return (index if self.draft_ids is None else self.draft_ids[index]), probs


def _packed(head: Head, shared: PackedLinear | None) -> PackedHead:
    def of(layer: nn.Linear) -> tuple[Tensor, Tensor]:
        return layer.weight, layer.bias

    own = head.projection
    projection = shared if own is None else PackedLinear(own.weight, own.bias)
    assert projection is not None  # a head without its own projection shares the target's
    return PackedHead(
        of(head.first.linear),
        of(head.first.skip) if head.first.skip else None,
        of(head.again.linear) if head.again else None,
        head.n_again,
        projection,
    )
