# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Experts over long lists of pairs, where arithmetic is the limit: the matmuls of moe_many.py in large tiles, with the
pairs as the tall side.

If an expert's last pairs fit into a tile of half the size, they take one: with 500 pairs, a tenth of all rows would be
padding otherwise. The bulk tensor copy engine (TMA) reads the weights and the input of the down projection. That input
is in list order, not in pair order, so that a tile of it is one contiguous piece. For 16-bit weights on Hopper and
later. moe.py has the reference.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.moe_gate import SILU, Gate, gate_biases, gated
from stoker.kernels.moe_many import find_tile, max_tiles
from stoker.kernels.moe_route import COUNT_STRIDE, Lists
from stoker.kernels.moe_tile_model import PairTile, pair_tile

GRANULE = 64  # rows of a granule of gate_up: see moe.py
_ALIGNED = 8  # values in 16 bytes, the alignment of the copy engine


def fits(gate_up: Tensor) -> bool:
    hidden, width = gate_up.shape[2], gate_up.shape[1] // 2
    return overlaps(gate_up) and gate_up.element_size() == 2 and hidden % _ALIGNED == 0 and width % GRANULE == 0


@triton.jit
def _pairs_before(counts, expert, BLOCK_EXPERTS: tl.constexpr, COUNTS: tl.constexpr):
    """Return the number of pairs of the experts before this one."""
    other = tl.arange(0, BLOCK_EXPERTS)
    return tl.sum(tl.load(counts + other * COUNTS, mask=other < expert, other=0))


@triton.jit
def _gate_up_tile(
    x, weight, bias, pairs, inner, expert, first_made, first_out, first_weight, left,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, GRANULE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATE_BIAS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr,
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
            given = tl.load(given_from + start)  # padding rows read pair 0's token, which always exists
        else:
            given = tl.load(given_from + start, mask=(start + column < HIDDEN)[None, :], other=0.0)
        sums = tl.dot(given, taken.T, sums)
    gate, up = sums.reshape(ROWS, BLOCK_OUT // GRANULE, 2, GRANULE).permute(0, 1, 3, 2).split()
    out = first_out + tl.arange(0, BLOCK_OUT)
    if GATE_BIAS:
        gate_bias, up_bias = gate_biases(bias, expert, out, WIDTH)
        gate += gate_bias.reshape(1, BLOCK_OUT // GRANULE, GRANULE)
        up += up_bias.reshape(1, BLOCK_OUT // GRANULE, GRANULE)
    found = gated(gate, up, LIMIT, ALPHA).reshape(ROWS, BLOCK_OUT)
    place = inner + (first_made + row).to(tl.int64)[:, None] * WIDTH + out[None, :]
    tl.store(place, found.to(inner.dtype.element_ty), mask=is_row[:, None] & (out < WIDTH)[None, :])


@triton.jit
def _gate_up(
    x, weight, bias, counts, pairs, inner, capacity,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    GRANULE: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr,
    PANEL: tl.constexpr, GATE_BIAS: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (WIDTH + BLOCK_OUT - 1) // BLOCK_OUT
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, PANEL, COUNTS)
    first_out = part * BLOCK_OUT
    first_weight = 2 * (expert * WIDTH + first_out)
    first_made = _pairs_before(counts, expert, BLOCK_EXPERTS, COUNTS) + first
    mine = pairs + expert.to(tl.int64) * capacity + first
    if left > ROWS // 2:
        _gate_up_tile(
            x, weight, bias, mine, inner, expert, first_made, first_out, first_weight, left,
            HIDDEN, WIDTH, TOP_K, GRANULE, ROWS, BLOCK_OUT, BLOCK_IN, GATE_BIAS, LIMIT, ALPHA,
        )  # fmt: skip
    elif left > 0:
        _gate_up_tile(
            x, weight, bias, mine, inner, expert, first_made, first_out, first_weight, left,
            HIDDEN, WIDTH, TOP_K, GRANULE, ROWS // 2, BLOCK_OUT, BLOCK_IN, GATE_BIAS, LIMIT, ALPHA,
        )  # fmt: skip


@triton.jit
def _down_tile(
    given, weight, bias, pairs, made, expert, first_given, first_weight, first_out, left,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    DOWN_BIAS: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        # Rows and outputs beyond the expert's belong to another expert, and columns beyond the last are zero.
        sums = tl.dot(given.load([first_given, start]), weight.load([first_weight, start]).T, sums)
    row = tl.arange(0, ROWS)
    is_row = row < left
    pair = tl.load(pairs + row, mask=is_row, other=0).to(tl.int64)
    out = first_out + tl.arange(0, BLOCK_OUT)
    if DOWN_BIAS:
        own = tl.load(bias + expert.to(tl.int64) * HIDDEN + out, mask=out < HIDDEN, other=0.0).to(tl.float32)
        sums = sums + own[None, :]
    place = made + pair[:, None] * HIDDEN + out[None, :]
    tl.store(place, sums.to(made.dtype.element_ty), mask=is_row[:, None] & (out < HIDDEN)[None, :])


@triton.jit
def _down(
    inner, inner_half, weight, bias, counts, pairs, made, capacity,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr,
    PANEL: tl.constexpr, DOWN_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (HIDDEN + BLOCK_OUT - 1) // BLOCK_OUT
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, PANEL, COUNTS)
    first_given = _pairs_before(counts, expert, BLOCK_EXPERTS, COUNTS) + first
    first_out = part * BLOCK_OUT
    first_weight = expert * HIDDEN + first_out
    mine = pairs + expert.to(tl.int64) * capacity + first
    if left > ROWS // 2:
        _down_tile(
            inner, weight, bias, mine, made, expert, first_given, first_weight, first_out, left,
            HIDDEN, WIDTH, ROWS, BLOCK_OUT, BLOCK_IN, DOWN_BIAS,
        )  # fmt: skip
    elif left > 0:
        _down_tile(
            inner_half, weight, bias, mine, made, expert, first_given, first_weight, first_out, left,
            HIDDEN, WIDTH, ROWS // 2, BLOCK_OUT, BLOCK_IN, DOWN_BIAS,
        )  # fmt: skip


def gate_up_prompt(
    lists: Lists, gate_up: Tensor, granule: int, tile: PairTile | None = None, gate: Gate = SILU
) -> Tensor:
    """Return [pairs, width], expert by expert, each one's pairs in list order."""
    num_experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    tile = tile or pair_tile("prompt", "gate_up", lists.expected_pairs, num_experts, width, hidden)
    assert tile.outs % granule == 0
    overlap = overlaps(gate_up)
    inner = lists.normed.new_empty(lists.weights.numel(), width)
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    weight = descriptor.from_tensor(gate_up.view(-1, hidden), [2 * tile.outs, tile.ins])
    _gate_up[(max_tiles(lists, tile.rows) * cdiv(width, tile.outs),)](
        lists.normed, weight, inner if gate.bias is None else gate.bias, lists.counts, lists.pairs, inner,
        lists.pairs.shape[1],
        HIDDEN=hidden, WIDTH=width, TOP_K=lists.weights.shape[1], EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts), GRANULE=granule, ROWS=tile.rows, BLOCK_OUT=tile.outs,
        BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE, PANEL=tile.panel, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap, **gate.constants,
    )  # fmt: skip
    return inner


def down_prompt(
    lists: Lists, inner: Tensor, down: Tensor, tile: PairTile | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return [pairs, hidden] in pair order, from the result of gate_up_prompt. bias [experts, hidden]"""
    num_experts, hidden, width = down.shape
    tile = tile or pair_tile("prompt", "down", lists.expected_pairs, num_experts, hidden, width)
    overlap = overlaps(down)
    made = inner.new_empty(len(inner), hidden)
    described = import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    given, given_half = (described(inner, [rows, tile.ins]) for rows in (tile.rows, tile.rows // 2))
    weight = described(down.view(-1, width), [tile.outs, tile.ins])
    _down[(max_tiles(lists, tile.rows) * cdiv(hidden, tile.outs),)](
        given, given_half, weight, made if bias is None else bias, lists.counts, lists.pairs, made,
        lists.pairs.shape[1], DOWN_BIAS=bias is not None,
        HIDDEN=hidden, WIDTH=width, EXPERTS=num_experts, BLOCK_EXPERTS=next_power_of_2(num_experts),
        ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE, PANEL=tile.panel, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return made
