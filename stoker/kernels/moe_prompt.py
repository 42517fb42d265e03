# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Experts over lists of so many pairs that arithmetic is the limit: moe_many.py's products in large tiles, pairs as the tall side.

An expert's last pairs take a tile of half the size where that holds them: with 500 pairs, a tenth of all rows would else be
padding. Gate and up are read by the card's copy engine. For 16-bit weights on Hopper and later; moe.py has the reference.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.moe_many import Tile, find_tile, most_tiles
from stoker.kernels.moe_route import COUNT_STRIDE, Lists

# Measured on an H200 with Qwen3-30B-A3B's shape: bench/gpu.py --tiles.
GATE_UP = Tile(rows=128, outs=128, ins=64, num_warps=8, num_stages=4)
DOWN = Tile(rows=128, outs=256, ins=64, num_warps=8, num_stages=4)
LEAST_LOAD = 60  # pairs of an expert, on average, from which on these tiles pay
GRANULE = 64  # of gate_up: see moe.py
_ALIGNED = 8  # values in 16 bytes, the copy engine's measure


def fits(gate_up: Tensor) -> bool:
    hidden, width = gate_up.shape[2], gate_up.shape[1] // 2
    return overlaps(gate_up) and gate_up.element_size() == 2 and hidden % _ALIGNED == 0 and width % GRANULE == 0


@triton.jit
def _gate_up_tile(
    x, weight, pairs, inner, first_out, first_weight, left,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, GRANULE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    is_row = row < left
    pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_IN)
    given_from = x + (pair // TOP_K)[:, None] * HIDDEN + column[None, :]
    sums = tl.zeros([ROWS, 2 * BLOCK_OUT], tl.float32)
    for start in range(0, HIDDEN, BLOCK_IN):
        taken = weight.load([first_weight, start])
        if HIDDEN % BLOCK_IN == 0:
            given = tl.load(given_from + start)  # rows that are padding read pair 0's token: it is there
        else:
            given = tl.load(given_from + start, mask=(start + column < HIDDEN)[None, :], other=0.0)
        sums = tl.dot(given, taken.T, sums)
    gate, up = sums.reshape(ROWS, BLOCK_OUT // GRANULE, 2, GRANULE).permute(0, 1, 3, 2).split()
    found = (gate / (1 + tl.exp(-gate)) * up).reshape(ROWS, BLOCK_OUT)
    out = first_out + tl.arange(0, BLOCK_OUT)
    place = inner + pair[:, None] * WIDTH + out[None, :]
    tl.store(place, found.to(inner.dtype.element_ty), mask=is_row[:, None] & (out < WIDTH)[None, :])


@triton.jit
def _gate_up(
    x, weight, counts, pairs, inner, capacity,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    GRANULE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (WIDTH + BLOCK_OUT - 1) // BLOCK_OUT
    expert, first, left = find_tile(counts, tl.program_id(0) // PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, COUNTS)
    first_out = (tl.program_id(0) % PARTS) * BLOCK_OUT
    first_weight = 2 * (expert * WIDTH + first_out)
    mine = pairs + expert.to(tl.int64) * capacity + first
    if left > ROWS // 2:
        _gate_up_tile(
            x, weight, mine, inner, first_out, first_weight, left,
            HIDDEN, WIDTH, TOP_K, GRANULE, ROWS, BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
    elif left > 0:
        _gate_up_tile(
            x, weight, mine, inner, first_out, first_weight, left,
            HIDDEN, WIDTH, TOP_K, GRANULE, ROWS // 2, BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip


@triton.jit
def _down_tile(
    inner, weight, pairs, made, first_out, left,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    is_row = row < left
    pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_IN)
    out = first_out + tl.arange(0, BLOCK_OUT)
    is_out = out < HIDDEN
    given_from = inner + pair[:, None] * WIDTH + column[None, :]
    taken_from = weight + out[None, :] * WIDTH + column[:, None]
    sums = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        if WIDTH % BLOCK_IN == 0 and HIDDEN % BLOCK_OUT == 0:
            taken = tl.load(taken_from + start)
            given = tl.load(given_from + start)
        else:
            is_in = start + column < WIDTH
            taken = tl.load(taken_from + start, mask=is_in[:, None] & is_out[None, :], other=0.0)
            given = tl.load(given_from + start, mask=is_in[None, :], other=0.0)
        sums = tl.dot(given, taken, sums)
    place = made + pair[:, None] * HIDDEN + out[None, :]
    tl.store(place, sums.to(made.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _down(
    inner, weight, counts, pairs, made, capacity,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (HIDDEN + BLOCK_OUT - 1) // BLOCK_OUT
    expert, first, left = find_tile(counts, tl.program_id(0) // PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, COUNTS)
    first_out = (tl.program_id(0) % PARTS) * BLOCK_OUT
    weight += expert.to(tl.int64) * (HIDDEN * WIDTH)
    mine = pairs + expert.to(tl.int64) * capacity + first
    if left > ROWS // 2:
        _down_tile(inner, weight, mine, made, first_out, left, HIDDEN, WIDTH, ROWS, BLOCK_OUT, BLOCK_IN)
    elif left > 0:
        _down_tile(inner, weight, mine, made, first_out, left, HIDDEN, WIDTH, ROWS // 2, BLOCK_OUT, BLOCK_IN)


def gate_up_prompt(lists: Lists, gate_up: Tensor, granule: int, tile: Tile = GATE_UP) -> Tensor:
    """-> [pairs, width]"""
    assert tile.outs % granule == 0
    num_experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    overlap = overlaps(gate_up)
    inner = lists.normed.new_empty(lists.weights.numel(), width)
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    weight = descriptor.from_tensor(gate_up.view(-1, hidden), [2 * tile.outs, tile.ins])
    _gate_up[(most_tiles(lists, tile.rows) * cdiv(width, tile.outs),)](
        lists.normed, weight, lists.counts, lists.pairs, inner, lists.pairs.shape[1],
        HIDDEN=hidden, WIDTH=width, TOP_K=lists.weights.shape[1], EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts), GRANULE=granule, ROWS=tile.rows, BLOCK_OUT=tile.outs,
        BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return inner


def down_prompt(lists: Lists, inner: Tensor, down: Tensor, tile: Tile = DOWN) -> Tensor:
    """-> [pairs, hidden]"""
    num_experts, hidden, width = down.shape
    overlap = overlaps(down)
    made = inner.new_empty(len(inner), hidden)
    _down[(most_tiles(lists, tile.rows) * cdiv(hidden, tile.outs),)](
        inner, down, lists.counts, lists.pairs, made, lists.pairs.shape[1],
        HIDDEN=hidden, WIDTH=width, EXPERTS=num_experts, BLOCK_EXPERTS=next_power_of_2(num_experts),
        ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return made
