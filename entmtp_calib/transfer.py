"""Small numbers to a device without waiting for it.

A copy from ordinary memory would hold the host up until everything that the device was given before
is done, once per step. This module knows nothing of what the numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """Host values on a device, in order with what it was given before; the same where it is one."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def send_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Row numbers as int64 [m] on a device."""
    return send(torch.tensor(rows, dtype=torch.long), device)
