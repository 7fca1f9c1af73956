"""Everything in this folder needs a CUDA device and is skipped without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    """The device to test on."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
