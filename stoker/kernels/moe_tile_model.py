"""Which tile each kernel of a layer of experts uses, for any number of tokens, any number of experts and any widths.

What decides is how the work divides, not the model. The main quantity is the load, the average number of pairs of token
and expert per expert: a tile with more rows than an expert has pairs computes padding, and one with fewer reads the
weights from the L2 cache more often. A tile is taken from the table of its weight's format by the load. If that leaves
multiprocessors without a program, because an expert has few outputs, the next smaller tile of the table is taken.

The tables are from an H200, over the shapes in tests/kernels/moe_tile_times.json, which also has the times that the
test of this module compares the choice with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
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


# By the largest load, in ascending order of the loads and of the rows.
_Table = tuple[tuple[float, PairTile], ...]
_WIDE: _Table = ((inf, PairTile(16, 32, 32, 4, 2)),)
_TILES: dict[tuple[Format, Side], _Table] = {
    ("float32", "gate_up"): _WIDE,
    ("float32", "down"): _WIDE,
    ("plain", "gate_up"): (
        (10, PairTile(16, 64, 128, 4, 3)),
        (20, PairTile(32, 64, 64, 4, 3)),
        (inf, PairTile(64, 64, 64, 4, 3)),
    ),
    ("plain", "down"): (
        (10, PairTile(16, 128, 128, 8, 3)),
        (20, PairTile(32, 64, 64, 4, 3)),
        (inf, PairTile(64, 128, 64, 8, 3)),
    ),
    ("prompt", "gate_up"): ((40, PairTile(64, 128, 64, 4, 4)), (inf, PairTile(128, 128, 64, 8, 4))),
    ("prompt", "down"): (
        (40, PairTile(64, 128, 64, 4, 4)),
        (600, PairTile(128, 128, 64, 4, 3)),
        (inf, PairTile(128, 256, 64, 8, 3)),
    ),
    # 8-bit weights, multiplied in the dtype of x.
    ("fp8", "gate_up"): (
        (12, PairTile(16, 64, 128, 4, 4)),
        (30, PairTile(32, 64, 128, 4, 3)),
        (inf, PairTile(64, 64, 128, 4, 3)),
    ),
    ("fp8", "down"): (
        (12, PairTile(16, 128, 128, 4, 4)),
        (30, PairTile(32, 128, 128, 4, 3)),
        (inf, PairTile(64, 128, 128, 4, 3)),
    ),
    # Both sides in 8 bits, with one scale per output.
    ("codes", "gate_up"): (
        (12, PairTile(16, 64, 128, 4, 4)),
        (28, PairTile(32, 64, 128, 4, 3)),
        (400, PairTile(64, 128, 128, 8, 3)),
        (inf, PairTile(128, 64, 128, 8, 3)),
    ),
    ("codes", "down"): (
        (20, PairTile(16, 128, 128, 4, 4)),
        (28, PairTile(32, 128, 128, 4, 3)),
        (300, PairTile(64, 256, 128, 8, 3)),
        (inf, PairTile(64, 128, 128, 4, 3)),
    ),
    # Both sides in 8 bits, with one scale per 128 inputs: a second set of sums leaves fewer registers.
    ("code blocks", "gate_up"): (
        (12, PairTile(16, 64, 128, 4, 4)),
        (40, PairTile(32, 64, 128, 4, 3)),
        (300, PairTile(64, 128, 128, 8, 3)),
        (inf, PairTile(64, 64, 128, 4, 3)),
    ),
    ("code blocks", "down"): (
        (20, PairTile(16, 128, 128, 4, 4)),
        (32, PairTile(32, 128, 128, 4, 3)),
        (300, PairTile(64, 256, 128, 8, 3)),
        (inf, PairTile(64, 128, 128, 4, 3)),
    ),
    ("int4", "gate_up"): (
        (16, PairTile(16, 64, 256, 4, 3)),
        (70, PairTile(32, 64, 256, 4, 3)),
        (inf, PairTile(64, 128, 256, 8, 2)),
    ),
    ("int4", "down"): (
        (16, PairTile(16, 128, 256, 4, 3)),
        (64, PairTile(32, 128, 256, 4, 3)),
        (inf, PairTile(64, 128, 256, 8, 2)),
    ),
}


@lru_cache(maxsize=4096)
def pair_tile(form: Format, side: Side, num_pairs: int, num_experts: int, num_outs: int) -> PairTile:
    """Return the tile for `num_pairs` pairs of token and expert. An expert has `num_outs` outputs (gate and up count as
    one)."""
    table, load = _TILES[form, side], num_pairs / num_experts
    smaller = [tile for _, tile in takewhile(lambda row: row[0] < load, table)]
    candidates = (table[len(smaller)][1], *reversed(smaller))
    return next((tile for tile in candidates if _fills(tile, load, num_experts, num_outs)), candidates[-1])


def _fills(tile: PairTile, load: float, num_experts: int, num_outs: int) -> bool:
    """Return True if there is a program for each multiprocessor."""
    return max(1, load // tile.rows) * num_experts * cdiv(num_outs, tile.outs) >= _NUM_SMS


# For very few tokens: the format of the weight -> the tiles of gate_up and down.
_FEW: dict[str, tuple[ExpertTile, ExpertTile]] = {
    "plain": (ExpertTile(16, 256, 4), ExpertTile(8, 256, 8)),
    "fp8": (ExpertTile(16, 256, 4), ExpertTile(4, 1024, 4, 2)),
    "int4": (ExpertTile(16, 512, 4), ExpertTile(8, 1024, 4, 3)),
}
_MAX_UNROLLED = 16


@lru_cache(maxsize=256)
def few_tile(form: Literal["plain", "fp8", "int4"], side: Side, num_ins: int) -> ExpertTile:
    """Return the tile for very few tokens. The loop over the inputs of down is unrolled, so that its tile grows with
    their number."""
    gate_up, down = _FEW[form]
    if side == "gate_up":
        return gate_up
    ins = down.ins
    while num_ins > _MAX_UNROLLED * ins:
        ins *= 2
    return replace(down, ins=ins)


@lru_cache(maxsize=4096)
def router_tile(num_tokens: int, num_experts: int, value_bytes: int) -> RouterTile:
    """Return the tile of the router. Its matmul is small: the inputs are split until every multiprocessor has work."""
    if value_bytes == 4:
        return RouterTile(16, 16, 32, 2, splits=2)
    if num_tokens <= 64:
        return RouterTile(16, 16, 256, 2, splits=8)
    large = RouterTile(64, 64, 64, 4)
    if _router_programs(large, num_tokens, num_experts) >= _NUM_SMS:
        return large
    tile = RouterTile(64, 32 if num_experts > 16 else 16, 128, 3)
    missing = cdiv(_NUM_SMS, _router_programs(tile, num_tokens, num_experts))
    return replace(tile, splits=min(8, next_power_of_2(missing)))


def _router_programs(tile: RouterTile, num_tokens: int, num_experts: int) -> int:
    return cdiv(num_tokens, tile.rows) * cdiv(num_experts, tile.outs)


def list_warps(hidden: int) -> int:
    """Return the warps of a program that holds a token of `hidden` values in registers."""
    return min(8, max(1, next_power_of_2(hidden) // 2048))


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
