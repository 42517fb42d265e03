"""Rotary position embedding tables, with the scalings that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stoker.kernels.rope import rope_tables


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        # Low frequencies are stretched, high ones kept, those in between blended.
        wave_length = 2 * math.pi / plain
        per_context = config.original_positions / wave_length
        blend = (per_context - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = blend.clamp(0, 1)
        return blend * plain + (1 - blend) * plain / config.factor
    return plain


class Rope(nn.Module):
    """Tables for the positions that will be served, in float32: bfloat16 cannot distinguish late positions."""

    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        super().__init__()
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        if device.type == "meta":  # torch imports its compiler for arithmetic on meta tensors, which takes a second
            cos = sin = torch.empty(num_positions, head_dim, dtype=dtype)
        else:
            cos, sin = rope_tables(inverse_frequencies(config, head_dim).to(device), num_positions, 1.0, dtype)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]
