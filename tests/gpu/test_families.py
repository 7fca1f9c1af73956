"""Families with sliding windows on a CUDA device: the CPU's text, beyond the window too."""

from __future__ import annotations

from pathlib import Path

import published_configs
import pytest
from test_lossless_families import N_TOKENS, PROMPTS, SAMPLINGS, TREES, plain
from toy_heads import random_heads, save_for

from entmtp_calib.decoding import Decoder
from entmtp_calib.heads.native import load_heads
from entmtp_calib.policy import Static
from entmtp_calib.targets.load import load_target


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "qwen2-window", "phi3"])
def test_recorded_passes_keep_to_the_windows(name: str, tmp_path: Path) -> None:
    folder = published_configs.save(name, tmp_path / "model")
    here = load_target(folder, device="cpu", engine="transformers")
    target = load_target(folder, device="cuda", dtype="float32")
    assert target.engine == "graphed"
    assert target.max_positions == published_configs.MAX_POSITIONS
    saved = save_for(random_heads(here, n_heads=2), here, tmp_path / "heads")
    heads = load_heads(saved, target)
    for sampling in SAMPLINGS:
        expected = plain(here, sampling, PROMPTS[0])
        assert plain(target, sampling, PROMPTS[0]) == expected
        generated = Decoder(target, heads, TREES, sampling).generate(
            PROMPTS[0], Static(3), N_TOKENS
        )
        assert generated.tokens == expected
