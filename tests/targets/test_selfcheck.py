"""The check at load: an engine that gets any part of a tree wrong does not pass."""

from __future__ import annotations

import pytest
import torch
import toys
from torch import Tensor

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.selfcheck import self_check


class Faulty(TransformersEngine):
    """A transformers engine with one fault."""

    def __init__(self, fault: str) -> None:
        super().__init__(toys.rand().model)
        self.fault = fault

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: TreeCache, mask: Tensor | None
    ) -> Tensor:
        if mask is not None and self.fault == "siblings seen":
            mask = torch.ones_like(mask).tril()
        if mask is not None and self.fault == "inverted mask":
            mask = ~mask
        if mask is not None and self.fault == "positions in a row":
            positions = positions[0] + torch.arange(len(positions))
        if mask is None and self.fault == "rows not gathered" and len(ids) == 1:
            cache._keys[:, :, cache.length - 2 : cache.length] = 0
        return super().hidden(ids, positions, cache, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits * 0.5 if self.fault == "output layer" else logits


@pytest.mark.parametrize(
    "fault",
    ["siblings seen", "inverted mask", "positions in a row", "rows not gathered", "output layer"],
)
def test_a_fault_does_not_pass(fault: str) -> None:
    with pytest.raises(ModelError, match=r"'llama' with attention 'sdpa' \(transformers engine"):
        self_check(Faulty(fault), toys.rand().model)


def test_a_sound_engine_passes() -> None:
    self_check(Faulty("none"), toys.rand().model)
