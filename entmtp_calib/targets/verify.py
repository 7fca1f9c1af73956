"""A step's pass over root and nodes, and what the host reads of it.

Everything that decides about a step comes back as one small tensor, so that whoever runs the step
waits for the device once. This module knows no trees, and not how a forward is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp_calib.sampling import greedy
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.graphs import Recorder


@dataclass(frozen=True, eq=False)
class Verified:
    """What a pass of n rows gave. The next pass over the same cache may overwrite it.

    Attributes:
        hidden: [n, h] after the final norm.
        logits: float32 [n, V].
        report: int64 [2, n], the tokens of the rows and what `greedy` makes of their logits.
    """

    hidden: Tensor
    logits: Tensor
    report: Tensor

    @classmethod
    def of(cls, ids: Tensor, hidden: Tensor, logits: Tensor) -> Verified:
        """With the report made."""
        return cls(hidden, logits, torch.stack([ids, greedy(logits)]))


class Verifying:
    """The step's pass of an engine that has no way of its own for it.

    Attributes:
        recorder: what records its passes, and may record what goes with them; None: nothing does.
        window: positions that its sliding layers see; None where it knows no sliding layers.
    """

    recorder: Recorder | None = None
    window: int | None = None

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def verify(
        self, ids: Tensor, depths: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Verified:
        """Root and nodes behind the committed rows: ids [n], depths [n], mask [n, n] or None."""
        hidden = self.hidden(ids, depths + cache.length, cache, mask)
        return Verified.of(ids, hidden, self.logits(hidden))

    def prepare(self, cache: TreeCache, rows: Iterable[int], first: int, last: int) -> None:
        """Passes of so many rows will come, behind `first` to `last` committed ones."""
