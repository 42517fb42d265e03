"""Rotary position embedding.  x [tokens, heads, head_dim]   cos, sin [tokens, head_dim]: the two halves of a head are
rotated."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    inverse_frequencies: Tensor, num_positions: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin for every position. sin carries the sign of the rotated half, so that applying it takes two
    multiplications."""
    positions = torch.arange(num_positions, dtype=torch.float64, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.double())
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = x.roll(x.shape[-1] // 2, -1)
    return (x * cos[:, None]).addcmul_(rotated, sin[:, None]).to(x.dtype)
