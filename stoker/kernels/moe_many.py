# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Experts over lists of pairs (moe_route.py): a matmul with gate and up, one with down, and each token's weighted sum.

A program takes some of an expert's pairs and some of its outputs, with the weights as the tall side. It finds its
expert from the counts. The grid is the most that this number of tokens can need; programs beyond the actual need exit
at once.
"""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton, wait_for_inputs
from stoker.kernels.moe_gate import SILU, Gate, gate_biases, gated
from stoker.kernels.moe_route import COUNT_STRIDE, Lists
from stoker.kernels.moe_tile_model import Format, PairTile, pair_tile

_COMBINED = 1024


@triton.jit
def find_tile(
    counts, program, PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    PANEL: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Return the expert of this program, its part of the outputs, its first pair, and how many pairs are left from
    there; 0 or less means none.

    An expert's programs are ordered by panels of PANEL tiles of pairs. Within a panel, the tiles that read the same
    part of the weight follow each other, so that a weight larger than the L2 cache is read from memory once per
    panel, not once per tile."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    count = tl.load(counts + expert * COUNTS, mask=expert < EXPERTS, other=0)
    num_tiles = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(num_tiles, 0) * PARTS
    mine = tl.sum((ends <= program).to(tl.int32))
    place = program - tl.sum(tl.where(expert < mine, num_tiles, 0)) * PARTS
    panel = place // (PANEL * PARTS)
    height = tl.minimum(tl.maximum(tl.sum(tl.where(expert == mine, num_tiles, 0)) - panel * PANEL, 1), PANEL)
    place -= panel * PANEL * PARTS
    first = (panel * PANEL + place % height) * ROWS
    return mine, place // height, first, tl.sum(tl.where(expert == mine, count, 0)) - first


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
    if left <= 0:
        return
    row = tl.arange(0, ROWS)
    is_row = row < left
    pair = tl.load(pairs + expert.to(tl.int64) * capacity + first + row, mask=is_row, other=0).to(tl.int64)
    out = part * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < WIDTH
    column = tl.arange(0, BLOCK_IN)
    gate_row = out + (out // GRANULE) * GRANULE
    gate_from = weight + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + gate_row[:, None] * HIDDEN + column[None, :]
    given_from = x + (pair // TOP_K)[None, :] * HIDDEN + column[:, None]
    gate = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    up = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for start in range(0, HIDDEN, BLOCK_IN):
        is_in = start + column < HIDDEN
        if HIDDEN % BLOCK_IN == 0:
            is_in = column < BLOCK_IN
        is_taken = is_out[:, None] & is_in[None, :]
        gate_weight = tl.load(gate_from + start, mask=is_taken, other=0.0)
        up_weight = tl.load(gate_from + (GRANULE * HIDDEN + start), mask=is_taken, other=0.0)
        given = tl.load(given_from + start, mask=is_row[None, :] & is_in[:, None], other=0.0)
        gate = tl.dot(gate_weight, given, gate, input_precision="ieee")
        up = tl.dot(up_weight, given, up, input_precision="ieee")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if GATE_BIAS:
        gate_bias, up_bias = gate_biases(bias, expert, out, WIDTH)
        gate, up = gate + gate_bias[:, None], up + up_bias[:, None]
    found = gated(gate, up, LIMIT, ALPHA)
    place = inner + pair[None, :] * WIDTH + out[:, None]
    tl.store(place, found.to(inner.dtype.element_ty), mask=is_out[:, None] & is_row[None, :])


@triton.jit
def _down(
    inner, weight, bias, counts, pairs, made, capacity,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr,
    PANEL: tl.constexpr, DOWN_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (HIDDEN + BLOCK_OUT - 1) // BLOCK_OUT
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, PANEL, COUNTS)
    if left <= 0:
        return
    row = tl.arange(0, ROWS)
    is_row = row < left
    pair = tl.load(pairs + expert.to(tl.int64) * capacity + first + row, mask=is_row, other=0).to(tl.int64)
    out = part * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < HIDDEN
    column = tl.arange(0, BLOCK_IN)
    taken_from = weight + expert.to(tl.int64) * (HIDDEN * WIDTH) + out[:, None] * WIDTH + column[None, :]
    given_from = inner + pair[None, :] * WIDTH + column[:, None]
    sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for start in range(0, WIDTH, BLOCK_IN):
        is_in = start + column < WIDTH
        if WIDTH % BLOCK_IN == 0:
            is_in = column < BLOCK_IN
        taken = tl.load(taken_from + start, mask=is_out[:, None] & is_in[None, :], other=0.0)
        given = tl.load(given_from + start, mask=is_row[None, :] & is_in[:, None], other=0.0)
        sums = tl.dot(taken, given, sums, input_precision="ieee")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if DOWN_BIAS:
        own = tl.load(bias + expert.to(tl.int64) * HIDDEN + out, mask=is_out, other=0.0).to(tl.float32)
        sums = sums + own[:, None]
    place = made + pair[None, :] * HIDDEN + out[:, None]
    tl.store(place, sums.to(made.dtype.element_ty), mask=is_out[:, None] & is_row[None, :])


@triton.jit
def _combine(
    x, made, weights, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.load(x + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        weight = tl.load(weights + pair)
        width = HIDDEN
        if SPLIT:  # what `made` has for an expert of another rank is undefined
            width = tl.where(weight != 0, HIDDEN, 0)
        total += tl.load(made + pair * HIDDEN + column, mask=column < width, other=0.0).to(tl.float32) * weight
    tl.store(x + token * HIDDEN + column, total.to(x.dtype.element_ty), mask=inside)


def _form(weight: Tensor) -> Format:
    return "float32" if weight.element_size() == 4 else "plain"


def gate_up_lists(
    lists: Lists, gate_up: Tensor, granule: int, tile: PairTile | None = None, gate: Gate = SILU
) -> Tensor:
    """Return [pairs, width]."""
    num_experts, width, hidden = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    assert gate_up.is_contiguous()
    tile = tile or pair_tile(_form(gate_up), "gate_up", lists.expected_pairs, num_experts, width, hidden)
    top_k, overlap = lists.weights.shape[1], overlaps(gate_up)
    inner = lists.normed.new_empty(lists.weights.numel(), width)
    _gate_up[(max_tiles(lists, tile.rows) * cdiv(width, tile.outs),)](
        lists.normed, gate_up, inner if gate.bias is None else gate.bias, lists.counts, lists.pairs, inner,
        lists.pairs.shape[1],
        HIDDEN=hidden, WIDTH=width, TOP_K=top_k, EXPERTS=num_experts, BLOCK_EXPERTS=next_power_of_2(num_experts),
        GRANULE=granule, ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE,
        PANEL=tile.panel, OVERLAP=overlap, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
        **gate.constants,
    )  # fmt: skip
    return inner


def down_lists(
    lists: Lists, inner: Tensor, down: Tensor, tile: PairTile | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return [pairs, hidden]. bias [experts, hidden]"""
    num_experts, hidden, width = down.shape
    assert down.is_contiguous()
    tile = tile or pair_tile(_form(down), "down", lists.expected_pairs, num_experts, hidden, width)
    overlap = overlaps(down)
    made = inner.new_empty(len(inner), hidden)
    _down[(max_tiles(lists, tile.rows) * cdiv(hidden, tile.outs),)](
        inner, down, made if bias is None else bias, lists.counts, lists.pairs, made, lists.pairs.shape[1],
        HIDDEN=hidden, WIDTH=width, EXPERTS=num_experts, BLOCK_EXPERTS=next_power_of_2(num_experts),
        ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, COUNTS=COUNT_STRIDE, DOWN_BIAS=bias is not None,
        PANEL=tile.panel, OVERLAP=overlap, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return made


def combine(x: Tensor, made: Tensor, lists: Lists) -> Tensor:
    """Return x + the weighted sum of each token's pairs, in place."""
    weights = lists.weights
    num_tokens, hidden = x.shape
    overlap = overlaps(x)
    _combine[(num_tokens, cdiv(hidden, _COMBINED))](
        x, made, weights, HIDDEN=hidden, TOP_K=weights.shape[1], BLOCK=_COMBINED, SPLIT=lists.is_split,
        OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return x


def max_tiles(lists: Lists, rows: int) -> int:
    """Upper bound of the number of tiles of `rows` pairs: the full ones, and one for the rest of each expert that has
    any pair."""
    return min(lists.num_pairs, lists.num_pairs // rows + lists.num_experts)
