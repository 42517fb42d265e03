"""Which tile each kernel of a layer of experts uses, for any number of tokens, any number of experts and any widths.

What decides is how the work divides, not the model. The main quantity is the load, the average number of pairs of token
and expert per expert: a tile with more rows than an expert has pairs computes padding, and one with fewer reads the
weights from the L2 cache more often. A tile is taken from the table of its weight's format by the load. If that leaves
most multiprocessors without a program, because an expert has few outputs, the next smaller tile of the table is taken.

The tables are from an H200, over the shapes in tests/kernels/moe_tile_times.json, which also has the times that the
test of this module compares the choice with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Literal

import torch

from stoker.base.errors import ModelFilesError
from stoker.kernels.dispatch import cdiv, next_power_of_2

# How the operands of a matmul over lists of pairs are stored, and by which kernel they are read.
Format = Literal["float32", "plain", "prompt", "fp8", "codes", "code blocks", "int4"]
Side = Literal["gate_up", "down"]

_NUM_SMS = 132  # multiprocessors of an H100 or H200
_PANEL_PAIRS = 2048
PROMPT_LOAD = 60  # average pairs per expert from which the kernels of moe_prompt.py are faster

MAX_EXPERTS = 4096
MAX_TOP_K = 64
MAX_HIDDEN = 1 << 16
MAX_VALUES = 1 << 31  # an offset within one expert's weight has 32 bits


@dataclass(frozen=True, slots=True)
class PairTile:
    """The tile of one program over lists of pairs: pairs, outputs and inputs at a time."""

    rows: int
    outs: int
    ins: int
    num_warps: int
    num_stages: int

    @property
    def panel(self) -> int:
        """The number of tiles of an expert's pairs that use the same part of its weight one after the other."""
        return max(1, _PANEL_PAIRS // self.rows)


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The tile of one program for very few tokens: outputs and inputs at a time, and how many loop steps are in
    flight."""

    outs: int
    ins: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class RouterTile:
    """The tile of one program of the router: tokens, experts and inputs at a time, and its share of all inputs."""

    rows: int
    outs: int
    ins: int
    num_stages: int
    splits: int = 1


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a table: the tile for at most `load` pairs per expert and `ins` inputs of the matmul."""

    load: float
    tile: PairTile
    ins: float = inf


# In ascending order of the tiles' sizes. A row for no load is only used where the next leaves multiprocessors idle.
_WIDE = (_Row(inf, PairTile(16, 32, 32, 4, 2)),)
_TILES: dict[tuple[Format, Side], tuple[_Row, ...]] = {
    ("float32", "gate_up"): _WIDE,
    ("float32", "down"): _WIDE,
    ("plain", "gate_up"): (
        _Row(10, PairTile(16, 64, 128, 4, 3)),
        _Row(20, PairTile(32, 64, 64, 4, 3)),
        _Row(inf, PairTile(64, 64, 64, 4, 3)),
    ),
    ("plain", "down"): (
        _Row(10, PairTile(16, 128, 128, 8, 3)),
        _Row(20, PairTile(32, 64, 64, 4, 3)),
        _Row(inf, PairTile(64, 128, 64, 4, 4)),
    ),
    ("prompt", "gate_up"): (_Row(0, PairTile(64, 128, 64, 4, 4)), _Row(inf, PairTile(128, 128, 64, 8, 4))),
    # With few inputs, the end of a program is a large part of it: two smaller ones on a multiprocessor overlap.
    ("prompt", "down"): (
        _Row(0, PairTile(64, 128, 64, 4, 4)),
        _Row(200, PairTile(128, 128, 64, 4, 3)),
        _Row(inf, PairTile(128, 128, 64, 4, 3), ins=2047),
        _Row(inf, PairTile(128, 256, 64, 8, 3)),
    ),
    # 8-bit weights, multiplied in the dtype of x.
    ("fp8", "gate_up"): (
        _Row(12, PairTile(16, 64, 128, 4, 4)),
        _Row(30, PairTile(32, 64, 128, 4, 3)),
        _Row(250, PairTile(64, 64, 128, 4, 3)),
        _Row(inf, PairTile(128, 64, 128, 8, 3)),
    ),
    ("fp8", "down"): (
        _Row(12, PairTile(16, 128, 128, 4, 4)),
        _Row(30, PairTile(32, 128, 128, 4, 3)),
        _Row(250, PairTile(64, 128, 128, 4, 3)),
        _Row(inf, PairTile(128, 128, 128, 8, 3)),
    ),
    # Both sides in 8 bits, with one scale per output.
    ("codes", "gate_up"): (
        _Row(14, PairTile(16, 64, 128, 4, 6)),
        _Row(28, PairTile(32, 64, 128, 4, 3)),
        _Row(90, PairTile(64, 128, 128, 8, 3)),
        _Row(inf, PairTile(128, 128, 128, 8, 3)),
    ),
    ("codes", "down"): (
        _Row(20, PairTile(16, 128, 128, 4, 4)),
        _Row(28, PairTile(32, 128, 128, 4, 3)),
        _Row(100, PairTile(64, 256, 128, 8, 3)),
        _Row(inf, PairTile(128, 256, 128, 8, 3)),
    ),
    # Both sides in 8 bits, with one scale per 128 inputs: a second set of sums leaves fewer registers.
    ("code blocks", "gate_up"): (
        _Row(14, PairTile(16, 64, 128, 4, 4)),
        _Row(40, PairTile(32, 64, 128, 4, 3)),
        _Row(180, PairTile(64, 128, 128, 8, 3)),
        _Row(inf, PairTile(64, 64, 128, 4, 3)),
    ),
    ("code blocks", "down"): (
        _Row(20, PairTile(16, 128, 128, 4, 4)),
        _Row(40, PairTile(32, 128, 128, 4, 3)),
        _Row(180, PairTile(64, 256, 128, 8, 3)),
        _Row(inf, PairTile(64, 128, 128, 4, 3)),
    ),
    ("int4", "gate_up"): (
        _Row(14, PairTile(16, 64, 256, 4, 3)),
        _Row(56, PairTile(32, 64, 256, 4, 3)),
        _Row(inf, PairTile(64, 64, 256, 4, 2)),
    ),
    ("int4", "down"): (
        _Row(16, PairTile(16, 128, 256, 4, 3)),
        _Row(90, PairTile(32, 128, 256, 4, 3)),
        _Row(inf, PairTile(64, 128, 256, 4, 2)),
    ),
}


@lru_cache(maxsize=4096)
def pair_tile(form: Format, side: Side, num_pairs: int, num_experts: int, num_outs: int, num_ins: int) -> PairTile:
    """Return the tile for `num_pairs` pairs of token and expert. An expert has `num_outs` outputs (gate and up count as
    one) of `num_ins` inputs."""
    table, load = _TILES[form, side], num_pairs / num_experts
    fitting = next(number for number, row in enumerate(table) if load <= row.load and num_ins <= row.ins)
    candidates = [row.tile for row in table[fitting::-1]]
    return next((tile for tile in candidates if _fills(tile, load, num_experts, num_outs)), candidates[-1])


def _fills(tile: PairTile, load: float, num_experts: int, num_outs: int) -> bool:
    """Return True if at least half of the multiprocessors have a program. With fewer, a smaller tile is faster although
    its programs do more work in all."""
    return 2 * max(1, load // tile.rows) * num_experts * cdiv(num_outs, tile.outs) >= _NUM_SMS


# For very few tokens: the format of the weight -> the tiles of gate_up and down.
_FEW: dict[str, tuple[ExpertTile, ExpertTile]] = {
    "plain": (ExpertTile(16, 256, 4), ExpertTile(8, 256, 8)),
    "fp8": (ExpertTile(16, 256, 4), ExpertTile(4, 1024, 4, 2)),
    "int4": (ExpertTile(16, 512, 4), ExpertTile(8, 1024, 4, 3)),
}
_FEW_WIDE_DOWN = ExpertTile(16, 512, 8)  # for plain weights with enough outputs
_MAX_UNROLLED = 32


@lru_cache(maxsize=256)
def few_tile(form: Literal["plain", "fp8", "int4"], side: Side, num_outs: int, num_ins: int) -> ExpertTile:
    """Return the tile for very few tokens. The loop over the inputs of down is unrolled, so that its tile grows with
    their number."""
    gate_up, down = _FEW[form]
    if side == "gate_up":
        return gate_up
    if form == "plain" and cdiv(num_outs, _FEW_WIDE_DOWN.outs) >= _NUM_SMS:
        down = _FEW_WIDE_DOWN
    while num_ins > _MAX_UNROLLED * down.ins:
        down = replace(down, ins=2 * down.ins)
    return down


@lru_cache(maxsize=4096)
def router_tile(num_tokens: int, num_experts: int, value_bytes: int) -> RouterTile:
    """Return the tile of the router. Its matmul is small: the inputs are split until every multiprocessor has work."""
    if value_bytes == 4:
        return RouterTile(16, 16, 32, 2, splits=2)
    if num_tokens <= 64:
        return RouterTile(16, 16, 256, 2, splits=8)
    if num_experts <= 16:
        tile, wanted = RouterTile(32 if num_tokens < 1024 else 64, 16, 128, 3), 256
    elif num_tokens < 1024:
        tile, wanted = RouterTile(64, 32, 128, 3), 128
    else:
        tile, wanted = RouterTile(64, 64, 64, 4), 256
    splits = wanted // (cdiv(num_tokens, tile.rows) * cdiv(num_experts, tile.outs))
    return replace(tile, splits=min(8, 1 << max(0, splits.bit_length() - 1)))


def exact_router_tile(num_tokens: int, value_bytes: int) -> RouterTile:
    """Return the tile of the router if its logits must not depend on the number of tokens: the inputs are always split
    alike, and fewer than 64 experts at a time go through the same instruction of the tensor cores."""
    if value_bytes == 4:
        return RouterTile(16, 16, 32, 2, splits=2)
    return RouterTile(16, 16, 256, 2, splits=8) if num_tokens <= 64 else RouterTile(64, 32, 256, 2, splits=8)


def list_warps(hidden: int) -> int:
    """Return the warps of a program that holds a token of `hidden` values in registers."""
    return min(8, max(1, next_power_of_2(hidden) // 4096))


def check_experts(layer: str, num_experts: int, top_k: int, hidden: int, width: int, device: torch.device) -> None:
    """Raise ModelFilesError if no kernel can serve a layer of experts of this shape. On a CPU, there is no limit."""
    if device.type != "cuda":
        return
    limits = (
        ("num_experts", num_experts, MAX_EXPERTS),
        ("num_experts_per_tok", top_k, MAX_TOP_K),
        ("hidden_size", hidden, MAX_HIDDEN),
        ("the number of values in an expert's gate and up", 2 * width * hidden, MAX_VALUES - 1),
    )
    for name, found, most in limits:
        if found > most:
            raise ModelFilesError(
                f"{layer}: {name} is {found}, and the GPU kernels for experts serve at most {most}; "
                "serve this model on a CPU, or another model"
            )
