"""The check at load: an engine that gets any part of a tree wrong does not pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from entmtp_calib.errors import ModelError
from entmtp_calib.targets.batch import BatchCache
from entmtp_calib.targets.cache import TreeCache
from entmtp_calib.targets.hf import TransformersEngine
from entmtp_calib.targets.load import load_target
from entmtp_calib.targets.selfcheck import honours_window, self_check


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
            cache._store[:, :, cache.length - 2 : cache.length] = 0
        return super().hidden(ids, positions, cache, mask)

    def hidden_batch(self, ids: Tensor, positions: Tensor, cache: BatchCache) -> Tensor:
        if self.fault == "texts of one length":
            positions = positions.max().expand(len(positions))
        return super().hidden_batch(ids, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits = logits * 0.5 if self.fault == "output layer" else logits
        return logits * torch.nan if self.fault == "not finite" else logits


@pytest.mark.parametrize(
    "fault",
    [
        "siblings seen",
        "inverted mask",
        "positions in a row",
        "rows not gathered",
        "texts of one length",
        "output layer",
        "not finite",
    ],
)
def test_a_fault_does_not_pass(fault: str) -> None:
    with pytest.raises(ModelError, match=r"'llama' with attention 'sdpa' \(transformers engine"):
        self_check(Faulty(fault), toys.rand().model)


def test_a_model_that_overflows_itself_is_left_to_where_tokens_are_chosen(tmp_path: Path) -> None:
    folder = toys.save_rand(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1e5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    target = load_target(folder, dtype="float16")
    hidden = target.forward([1, 2], [0, 1], target.new_cache(2))
    assert not target.logits(hidden).isfinite().all()


def test_a_sound_engine_passes() -> None:
    self_check(Faulty("none"), toys.rand().model)


def test_an_engine_that_does_not_keep_to_a_sliding_window_is_found_out() -> None:
    config = transformers.MistralConfig(**toys.rand().config.to_dict() | {"sliding_window": 20})
    model = transformers.MistralForCausalLM(config).eval()

    def blind(network: Any) -> TransformersEngine:
        engine = TransformersEngine(network)
        engine.window = None
        return engine

    assert honours_window(TransformersEngine, model)
    assert not honours_window(blind, model)
    assert model.config.sliding_window == 20
    self_check(blind(model), model)  # nothing is wrong within the window
