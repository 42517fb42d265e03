# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""8-bit and 4-bit experts over lists of pairs: moe_many.py's matmuls, reading only the codes of a weight.

The QuantWeight of a layer's experts has the rows of all experts stacked; gate_up has each expert's gate, then its up.
Where the checkpoint was made for it, both sides are multiplied in 8 bits, also in steps of few tokens: converting each
code to the dtype of x takes longer than reading it from memory. 4-bit codes are decoded inside the matmul. A program takes
some of an expert's pairs and some rows of its weight as the tall side, gate and up of an output together. moe.py has the
reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.moe_gate import SILU, Gate, gate_biases, gated
from stoker.kernels.moe_many import find_tile, max_tiles
from stoker.kernels.moe_route import COUNT_STRIDE, Lists
from stoker.kernels.moe_tile_model import Format, PairTile, Side, pair_tile
from stoker.kernels.quant import QuantWeight, code_value, half_of_pair
from stoker.kernels.quant_many import quantise_triton
from stoker.kernels.quant_skinny import EXPAND, EXPAND_REGISTERS, expand


def takes_codes(weight: QuantWeight) -> bool:
    """Return True if the input is quantised to 8 bits too. As in quant_many.py, without the library's constraints on
    shapes."""
    return weight.quantises_inputs and weight.shape[1] % weight.col_block == 0


def format_of(weight: QuantWeight) -> Format:
    if weight.is_int4:
        return "int4"
    if not takes_codes(weight):
        return "fp8"
    return "codes" if weight.col_block == weight.shape[1] else "code blocks"


@triton.jit
def _fp8_sums(
    x, x_scale, x_stride, codes, scale, made, given_row,
    INS: tl.constexpr, BOTH: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_IN)
    taken_from = codes + made.to(tl.int64)[:, None] * INS + column[None, :]
    given_from = x + given_row[None, :] * INS + column[:, None]
    COLS: tl.constexpr = (INS + COL_BLOCK - 1) // COL_BLOCK
    scale_from = scale + (made // ROW_BLOCK)[:, None] * COLS
    given_scale_from = x_scale + given_row[None, :]
    sums = tl.zeros([BLOCK, ROWS], tl.float32)
    for start in range(0, INS, BLOCK_IN):
        if INS % BLOCK_IN == 0:
            taken = tl.load(taken_from + start)
            given = tl.load(given_from + start)
        else:
            is_in = start + column < INS
            taken = tl.load(taken_from + start, mask=is_in[None, :], other=0.0)
            given = tl.load(given_from + start, mask=is_in[:, None], other=0.0)
        if not BOTH:
            # Through float16 and float32: the direct conversion to bfloat16 has a quarter of the speed.
            taken = taken.to(tl.float16).to(tl.float32).to(x.dtype.element_ty)
        if COLS == 1:
            sums = tl.dot(taken, given, sums, input_precision="ieee")
        else:
            factor = tl.load(scale_from + start // COL_BLOCK)
            if BOTH:
                factor = factor * tl.load(given_scale_from + (start // COL_BLOCK) * x_stride)
            sums += tl.dot(taken, given, input_precision="ieee") * factor
    if COLS == 1:
        sums = sums * tl.load(scale_from)
        if BOTH:
            sums = sums * tl.load(given_scale_from)
    return sums


@triton.jit
def _int4_sums(
    x, codes, scale, made, given_row,
    INS: tl.constexpr, ALL_OUTS: tl.constexpr, FLOATS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr,
):  # fmt: skip
    word = tl.arange(0, 32)
    SPANS: tl.constexpr = (INS + 255) // 256
    taken_from = codes + made.to(tl.int64)[:, None] * (SPANS * 32) + word[None, :]
    given_from = x + given_row[None, :] * INS + word[:, None]
    sums = tl.zeros([BLOCK, ROWS], tl.float32)
    for span in range(SPANS):
        taken = tl.load(taken_from + span * 32)
        pairs_from = scale + span * 4 * ALL_OUTS + made[:, None]
        pair0 = tl.load(pairs_from)
        pair1 = tl.load(pairs_from + ALL_OUTS)
        pair2 = tl.load(pairs_from + 2 * ALL_OUTS)
        pair3 = tl.load(pairs_from + 3 * ALL_OUTS)
        pairs = (pair0, pair1, pair2, pair3)
        if PAIRS:
            values = expand(taken, pair0, pair1, pair2, pair3, EXPAND, EXPAND_REGISTERS)
        for j in tl.static_range(8):
            start = span * 256 + j * 32
            if INS % 256 == 0:
                given = tl.load(given_from + start)
            else:
                given = tl.load(given_from + start, mask=(start + word < INS)[:, None], other=0.0)
            if PAIRS:
                value = values[j]
            else:
                value = code_value((taken >> (4 * j)) & 15, FLOATS) * half_of_pair(pairs[j // 2], j % 2)
                value = value.to(x.dtype.element_ty)
            sums = tl.dot(value, given, sums, input_precision="ieee")
    return sums


@triton.jit
def _sums(
    x, x_scale, x_stride, codes, scale, made, given_row,
    INS: tl.constexpr, ALL_OUTS: tl.constexpr, INT4: tl.constexpr, FLOATS: tl.constexpr, BOTH: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
    PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Return [BLOCK, ROWS]: the weight rows `made` multiplied by the rows `given_row` of x."""
    if INT4:
        return _int4_sums(
            x, codes, scale, made, given_row, INS, ALL_OUTS, FLOATS, ROWS, BLOCK, PAIRS, EXPAND, EXPAND_REGISTERS,
        )  # fmt: skip
    else:
        return _fp8_sums(
            x, x_scale, x_stride, codes, scale, made, given_row,
            INS, BOTH, ROW_BLOCK, COL_BLOCK, ROWS, BLOCK, BLOCK_IN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["x_stride"])
def _gate_up(
    x, x_scale, x_stride, codes, scale, bias, counts, pairs, inner, capacity,
    OUTS: tl.constexpr, INS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    INT4: tl.constexpr, FLOATS: tl.constexpr, BOTH: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr, PANEL: tl.constexpr,
    PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr, GATE_BIAS: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = OUTS // 2
    PARTS: tl.constexpr = (WIDTH + BLOCK_OUT - 1) // BLOCK_OUT
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, PANEL, COUNTS)
    if left <= 0:
        return
    row = tl.arange(0, ROWS)
    # Padding, here and below, reads memory that exists and is written nowhere.
    pair = tl.load(pairs + expert.to(tl.int64) * capacity + first + row, mask=row < left, other=0).to(tl.int64)
    first_out = part * BLOCK_OUT
    both = tl.arange(0, 2 * BLOCK_OUT)
    made = expert * OUTS + (both // BLOCK_OUT) * WIDTH + tl.minimum(first_out + both % BLOCK_OUT, WIDTH - 1)
    sums = _sums(
        x, x_scale, x_stride, codes, scale, made, pair // TOP_K,
        INS, EXPERTS * OUTS, INT4, FLOATS, BOTH, ROW_BLOCK, COL_BLOCK, ROWS, 2 * BLOCK_OUT, BLOCK_IN,
        PAIRS, EXPAND, EXPAND_REGISTERS,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    gate, up = sums.reshape(2, BLOCK_OUT, ROWS).permute(1, 2, 0).split()
    out = first_out + tl.arange(0, BLOCK_OUT)
    if GATE_BIAS:
        gate_bias, up_bias = gate_biases(bias, expert, out, WIDTH)
        gate, up = gate + gate_bias[:, None], up + up_bias[:, None]
    found = gated(gate, up, LIMIT, ALPHA)
    place = inner + pair[None, :] * WIDTH + out[:, None]
    tl.store(place, found.to(inner.dtype.element_ty), mask=(out < WIDTH)[:, None] & (row < left)[None, :])


@triton.jit(do_not_specialize=["x_stride"])
def _down(
    x, x_scale, x_stride, codes, scale, bias, counts, pairs, made_of, capacity,
    OUTS: tl.constexpr, INS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    INT4: tl.constexpr, FLOATS: tl.constexpr, BOTH: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, COUNTS: tl.constexpr, PANEL: tl.constexpr,
    PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr, DOWN_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    PARTS: tl.constexpr = (OUTS + BLOCK_OUT - 1) // BLOCK_OUT
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK_EXPERTS, ROWS, PANEL, COUNTS)
    if left <= 0:
        return
    row = tl.arange(0, ROWS)
    pair = tl.load(pairs + expert.to(tl.int64) * capacity + first + row, mask=row < left, other=0).to(tl.int64)
    out = part * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    sums = _sums(
        x, x_scale, x_stride, codes, scale, expert * OUTS + tl.minimum(out, OUTS - 1), pair,
        INS, EXPERTS * OUTS, INT4, FLOATS, BOTH, ROW_BLOCK, COL_BLOCK, ROWS, BLOCK_OUT, BLOCK_IN,
        PAIRS, EXPAND, EXPAND_REGISTERS,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if DOWN_BIAS:
        own = tl.load(bias + expert.to(tl.int64) * OUTS + out, mask=out < OUTS, other=0.0).to(tl.float32)
        sums = sums + own[:, None]
    place = made_of + pair[None, :] * OUTS + out[:, None]
    tl.store(place, sums.to(made_of.dtype.element_ty), mask=(out < OUTS)[:, None] & (row < left)[None, :])


def _launch(
    side: Side, lists: Lists, x: Tensor, weight: QuantWeight, bias: Tensor | None, out: Tensor, tile: PairTile | None,
    constants: Mapping[str, float | bool],
) -> Tensor:  # fmt: skip
    """Launch the kernel for `out` [pairs, outputs], of which a program computes `tile.outs`."""
    form = format_of(weight)
    tile = tile or pair_tile(form, side, lists.expected_pairs, lists.num_experts, out.shape[1], weight.shape[1])
    kernel = _gate_up if side == "gate_up" else _down
    num_experts, num_ins = lists.num_experts, weight.shape[1]
    num_outs, overlap = weight.shape[0] // num_experts, overlaps(x)
    both = form in ("codes", "code blocks")
    given, given_scale = quantise_triton(x, weight.col_block) if both else (x, x)
    assert weight.is_int4 or weight.col_block == num_ins or weight.col_block % tile.ins == 0
    kernel[(max_tiles(lists, tile.rows) * cdiv(out.shape[1], tile.outs),)](
        given, given_scale, given_scale.stride(1), weight.codes, weight.scale, out if bias is None else bias,
        lists.counts, lists.pairs, out, lists.pairs.shape[1],
        OUTS=num_outs, INS=num_ins, TOP_K=lists.weights.shape[1], EXPERTS=num_experts,
        BLOCK_EXPERTS=next_power_of_2(num_experts), INT4=weight.is_int4, FLOATS=weight.floats, BOTH=both,
        ROW_BLOCK=weight.row_block, COL_BLOCK=weight.col_block, ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins,
        COUNTS=COUNT_STRIDE, PANEL=tile.panel, PAIRS=overlap and x.dtype == torch.bfloat16 and not weight.floats,
        EXPAND=EXPAND, EXPAND_REGISTERS=EXPAND_REGISTERS,
        OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap, **constants,
    )  # fmt: skip
    return out


def quant_gate_up(lists: Lists, gate_up: QuantWeight, tile: PairTile | None = None, gate: Gate = SILU) -> Tensor:
    """Return [pairs, width]."""
    inner = lists.normed.new_empty(lists.num_pairs, gate_up.shape[0] // lists.num_experts // 2)
    return _launch("gate_up", lists, lists.normed, gate_up, gate.bias, inner, tile, gate.constants)


def quant_down(
    lists: Lists, inner: Tensor, down: QuantWeight, tile: PairTile | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return [pairs, hidden]. bias [experts, hidden]"""
    made = inner.new_empty(len(inner), lists.normed.shape[1])
    return _launch("down", lists, inner, down, bias, made, tile, {"DOWN_BIAS": bias is not None})
