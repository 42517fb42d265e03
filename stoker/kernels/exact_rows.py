# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Matmul in which a row's bits do not depend on the number of rows: y = x W^T.  x [rows, in]   ->  [rows, out]

Few rows go through the kernels of skinny.py and quant_skinny.py, with tiles that all split the inputs at the same places
(exact_tiles.py). Many rows go through the kernels here: a program takes some outputs and some rows, computes the same
parts one after the other, and adds them up in the order in which the other kernels add them. The inputs are never
quantised to 8 bits, because few rows are not. linear.py has the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, overlaps, tl, triton
from stoker.kernels.exact_tiles import SMALL_TILES, ExactTiles, exact_tiles
from stoker.kernels.quant import QuantWeight
from stoker.kernels.quant_skinny import (
    EXPAND,
    EXPAND_REGISTERS,
    fp8_part_sums,
    fp8_scaled,
    int4_part_sums,
    quant_rows_linear,
)
from stoker.kernels.skinny import KIND, added, few_rows_linear, part_sums

# A product and a sum would round once instead of twice, but only in those kernels where they follow each other.
_OPTIONS = {"enable_fp_fusion": False}
_GROUP = 8  # blocks of rows that use the same part of the weight one after the other, so that it stays in the L2 cache


@dataclass(frozen=True, slots=True)
class ExactWeight:
    """A weight on a GPU, with the tiles for all numbers of rows."""

    weight: Tensor | QuantWeight
    tiles: ExactTiles

    @classmethod
    def of(cls, weight: Tensor | QuantWeight) -> ExactWeight:
        if isinstance(weight, QuantWeight):
            return cls(weight, exact_tiles(weight.kind, *weight.shape))
        is_plain = overlaps(weight) and weight.element_size() == 2
        return cls(weight, exact_tiles(KIND, *weight.shape) if is_plain else SMALL_TILES)


@triton.jit
def _place(num_rows, num_outs, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, GROUP: tl.constexpr):
    """Return the rows [1, ROWS] and the outputs [BLOCK_OUT, 1] of this program."""
    program, num_tiles, num_blocks = tl.program_id(0), tl.cdiv(num_outs, BLOCK_OUT), tl.cdiv(num_rows, ROWS)
    group = program // (GROUP * num_tiles)
    inside = program % (GROUP * num_tiles)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    block, tile = group * GROUP + inside % height, inside // height
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    return row, tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]


@triton.jit
def _put(sums, out, row, made, num_rows, num_outs, ADD: tl.constexpr):
    place, is_mine = out + row * num_outs + made, (row < num_rows) & (made < num_outs)
    if ADD:
        sums = added(sums, tl.load(place, mask=is_mine, other=0.0).to(tl.float32))
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_mine)


@triton.jit(do_not_specialize=["num_rows"])
def _many_rows(
    x, weight, out, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, made = _place(num_rows, num_outs, ROWS, BLOCK_OUT, GROUP)
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + BLOCK_IN - 1) // BLOCK_IN + SPLITS - 1) // SPLITS * BLOCK_IN
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if SPLITS == 1:
        sums = part_sums(x, weight, made, row, is_made, is_row, 0, INS, PART, BLOCK_IN, SPLITS)
    else:
        sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
        for split in range(SPLITS):
            sums = added(sums, part_sums(x, weight, made, row, is_made, is_row, split, INS, PART, BLOCK_IN, SPLITS))
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    _put(sums, out, row, made, num_rows, num_outs, ADD)


@triton.jit(do_not_specialize=["num_rows"])
def _many_fp8_rows(
    x, codes, scale, out, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, made = _place(num_rows, num_outs, ROWS, BLOCK_OUT, GROUP)
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + BLOCK_IN - 1) // BLOCK_IN + SPLITS - 1) // SPLITS * BLOCK_IN
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for split in range(SPLITS):
        part = fp8_part_sums(
            x, codes, scale, made, row, is_made, is_row, split, INS, PART, BLOCK_IN, SPLITS, ROW_BLOCK, COL_BLOCK
        )
        part = fp8_scaled(part, scale, made, is_made, INS, ROW_BLOCK, COL_BLOCK)
        if SPLITS == 1:
            sums = part
        else:
            sums = added(sums, part)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    _put(sums, out, row, made, num_rows, num_outs, ADD)


@triton.jit(do_not_specialize=["num_rows"])
def _many_int4_rows(
    x, codes, scale, out, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, made = _place(num_rows, num_outs, ROWS, BLOCK_OUT, GROUP)
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + 255) // 256 + SPLITS - 1) // SPLITS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for split in range(SPLITS):
        part = int4_part_sums(
            x, codes, scale, made, row, is_made, is_row, split, num_outs,
            INS, PART, SPLITS, PAIRS, EXPAND, EXPAND_REGISTERS,
        )  # fmt: skip
        if SPLITS == 1:
            sums = part
        else:
            sums = added(sums, part)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    _put(sums, out, row, made, num_rows, num_outs, ADD)


def exact_linear(x: Tensor, weight: ExactWeight, *, add_to: Tensor | None = None) -> Tensor:
    """Return x W^T; with `add_to`, the sum, in place."""
    tile, ready = weight.tiles.for_rows(len(x)), weight.weight
    if tile is None:
        return _many_rows_linear(x, weight, add_to)
    if isinstance(ready, QuantWeight):
        return quant_rows_linear(x, ready, add_to=add_to, tile=tile, options=_OPTIONS)
    return few_rows_linear(x, ready, add_to=add_to, tile=tile)


def _many_rows_linear(x: Tensor, weight: ExactWeight, add_to: Tensor | None) -> Tensor:
    assert x.is_contiguous()
    assert add_to is None or add_to.is_contiguous()
    ready, tile, rows = weight.weight, weight.tiles.many, weight.tiles.many_rows
    num_outs, num_ins = ready.shape
    out = x.new_empty(len(x), num_outs) if add_to is None else add_to
    grid, overlap = (cdiv(len(x), rows) * cdiv(num_outs, tile.outs),), overlaps(x)
    common = {
        "INS": num_ins, "ROWS": rows, "BLOCK_OUT": tile.outs, "SPLITS": tile.splits, "GROUP": _GROUP,
        "ADD": add_to is not None, "OVERLAP": overlap,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": overlap, **_OPTIONS,
    }  # fmt: skip
    if not isinstance(ready, QuantWeight):
        assert ready.is_contiguous()
        _many_rows[grid](x, ready, out, len(x), num_outs, BLOCK_IN=tile.ins, **common)
    elif ready.is_int4:
        pairs = overlap and x.dtype == torch.bfloat16
        given = (x, ready.codes, ready.scale, out, len(x), num_outs)
        _many_int4_rows[grid](*given, PAIRS=pairs, EXPAND=EXPAND, EXPAND_REGISTERS=EXPAND_REGISTERS, **common)
    else:
        blocks = {"ROW_BLOCK": ready.row_block, "COL_BLOCK": ready.col_block}
        given = (x, ready.codes, ready.scale, out, len(x), num_outs)
        _many_fp8_rows[grid](*given, BLOCK_IN=tile.ins, **blocks, **common)
    return out
