"""Rotary position embedding.  x [tokens, heads, head_dim]   cos, sin [tokens, head_dim]: the two halves of a head are
rotated."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(
    inverse_frequencies: Tensor, num_positions: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin for every position."""
    positions = torch.arange(num_positions, device=inverse_frequencies.device)
    return rope_angles(inverse_frequencies, positions, scale, dtype)


def rope_angles(
    inverse_frequencies: Tensor, positions: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin for these positions, times `scale` where the frequency is not 0. sin carries the sign of the
    rotated half, so that applying it takes two multiplications."""
    frequencies = inverse_frequencies.double()
    angles = torch.outer(positions.double(), frequencies)
    cos, sin = (
        angles.cos() * torch.full_like(frequencies, scale).masked_fill_(frequencies == 0, 1.0),
        angles.sin() * scale,
    )
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = x.roll(x.shape[-1] // 2, -1)
    return (x * cos[:, None]).addcmul_(rotated, sin[:, None]).to(x.dtype)
