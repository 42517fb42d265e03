"""Rotary position embedding tables, with the scalings that checkpoints use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from stoker.kernels.rope import rope_angles, rope_tables

_MAX_TABLE_POSITIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    kind: str = "default"  # default, linear, llama3 or yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    # YaRN: turns within the original context from which a frequency is kept, and below which it is stretched.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True  # YaRN: the frequencies between the two begin and end at whole numbers
    table_scale: float = 1.0  # of cos and sin
    rotated: int | None = None  # values of a head that are rotated, the first ones; None: all


def inverse_frequencies(config: RopeConfig, width: int) -> Tensor:
    """Return one frequency for each pair of a head's `width` values. Those that are not rotated have the frequency 0."""
    rotated = width if config.rotated is None else config.rotated
    found = _scaled_frequencies(config, rotated)
    return torch.cat([found, torch.zeros((width - rotated) // 2)])


def _scaled_frequencies(config: RopeConfig, width: int) -> Tensor:
    plain = 1.0 / config.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        # Low frequencies are stretched, high ones kept, those in between blended.
        wave_length = 2 * math.pi / plain
        per_context = config.original_positions / wave_length
        blend = (per_context - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = blend.clamp(0, 1)
        return blend * plain + (1 - blend) * plain / config.factor
    if config.kind == "yarn":
        stretched = _yarn_blend(config, width)
        return stretched * plain / config.factor + (1 - stretched) * plain
    return plain


def _yarn_blend(config: RopeConfig, width: int) -> Tensor:
    """Return how much of each frequency is stretched: from 0 for the fast ones to 1 for the slow ones."""

    def index(turns: float) -> float:
        """Return the frequency, as a real number, that makes this many turns within the original context."""
        return width * math.log(config.original_positions / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = index(config.beta_fast), index(config.beta_slow)
    if config.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32) - first
    return (steps / (last - first or 0.001)).clamp(0, 1)  # both are equal in a config with beta_fast = beta_slow


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of attention for contexts that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@lru_cache(maxsize=64)
def half_order(width: int, rotated: int, interleaved: bool) -> tuple[int, ...]:
    """Return the order of a head's values in which those of a rotated pair are half a head apart, as rope() takes them.

    `rotated` values are rotated, the first ones. The checkpoint's pairs are neighbours if `interleaved`, otherwise half of
    `rotated` apart. Both q and k in this order have the same product as before.
    """
    half, kept = rotated // 2, range(rotated, width)
    first, second = (range(0, rotated, 2), range(1, rotated, 2)) if interleaved else (range(half), range(half, rotated))
    return (*first, *kept[: len(kept) // 2], *second, *kept[len(kept) // 2 :])


class Rope(nn.Module):
    """Gives cos and sin of positions, in float32, because bfloat16 cannot distinguish late positions.

    They come from tables of the positions that will be served. For very long contexts they are computed, because the tables
    would take gigabytes.
    """

    def __init__(self, config: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> None:
        super().__init__()
        self._dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self._scale, self._width = config.table_scale, head_dim
        self._has_tables = num_positions <= _MAX_TABLE_POSITIONS
        if device.type == "meta":  # torch imports its compiler for arithmetic on meta tensors, which takes a second
            tables = [torch.empty(num_positions, head_dim, dtype=self._dtype)] * 2
            frequencies = torch.empty(head_dim // 2)
        else:
            frequencies = inverse_frequencies(config, head_dim).to(device)
            count = num_positions if self._has_tables else 0
            tables = list(rope_tables(frequencies, count, config.table_scale, self._dtype))
        names = ("cos", "sin") if self._has_tables else ("frequencies",)
        for name, values in zip(names, tables if self._has_tables else [frequencies], strict=True):
            self.register_buffer(name, values, persistent=False)

    @property
    def bytes_per_token(self) -> int:
        """Memory of the angles of one token: cos and sin, and if they are computed, three values of each pair in
        float64."""
        computed = 0 if self._has_tables else 3 * self._width // 2 * torch.float64.itemsize
        return 2 * self._width * self._dtype.itemsize + computed

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._has_tables:
            return self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]
        if positions.is_meta:
            shape = (len(positions), self._width)
            return positions.new_empty(shape, dtype=self._dtype), positions.new_empty(shape, dtype=self._dtype)
        return rope_angles(self.get_buffer("frequencies"), positions, self._scale, self._dtype)
