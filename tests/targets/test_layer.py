"""The pieces of a packed decoder layer."""

from __future__ import annotations

import torch

from entmtp_calib.targets.layer import RMSNorm, paired


def test_the_norm_is_torchs_and_its_rows_do_not_meet() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(90, 576, generator=generator), torch.randn(576, generator=generator)
    found = RMSNorm(weight, 1e-5)(x)
    assert torch.allclose(found, torch.rms_norm(x, (576,), weight, 1e-5), atol=1e-6)
    for n in (1, 2, 5, 60):
        assert torch.equal(RMSNorm(weight, 1e-5)(x[:n]), found[:n])


def test_rows_that_rotate_together_become_neighbors() -> None:
    weight, bias = paired((torch.arange(16.0)[:, None], torch.arange(16.0)), head_dim=8)
    assert weight[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert bias is not None
    assert torch.equal(bias, weight[:, 0])
