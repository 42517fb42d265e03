"""Copies small host values to the device and back, without making the host wait for the device.

A plain `torch.tensor(values, device="cuda")` waits until the GPU has finished all queued work. One such call per step
would prevent running ahead of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[float] | Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Start a copy to the host. It is complete once an event recorded after this call has been reached."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
