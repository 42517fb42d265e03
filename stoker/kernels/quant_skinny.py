# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Matmul of few rows of x with an 8-bit or 4-bit weight (quant.py). Only the codes of W are read; they are converted to
the dtype of x on the way into the tensor cores. linear.py has the reference and decides when this is used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, overlaps, tl, triton
from stoker.kernels.quant import QuantWeight, half_of_pair
from stoker.kernels.skinny import padded_rows, put_sums, workspace
from stoker.kernels.tile_choice import skinny_tile
from stoker.kernels.tile_model import SkinnyTile

# Two words and eight factors -> eight pairs of bfloat16: pair j has the words' codes j times factor j. A code in the
# low bits of 128.0 makes 128 + code, and codes are stored plus 8. Two at a time, since one by one would take longer
# than reading them.
EXPAND = "\n".join(
    [
        "{ .reg .b32 low, high, part, base;",
        "mov.b32 base, 0x43084308;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
        *(
            f"shr.u32 part, {half}, {4 * (j % 4)};\n"
            "lop3.b32 part, part, 0x000F000F, 0x43004300, 0xEA;\n"
            "sub.rn.bf16x2 part, part, base;\n"
            f"mul.rn.bf16x2 ${j}, part, ${10 + 2 * j};"
            for j, half in enumerate(["low"] * 4 + ["high"] * 4)
        ),
        "}",
    ]
)
EXPAND_REGISTERS = ",".join(["=&r"] * 8 + ["r"] * 18)


@triton.jit
def fp8_part_sums(
    x, codes, scale, made, row, is_made, is_row, split,
    INS: tl.constexpr, PART: tl.constexpr, BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return [outs, rows]: the matmul over one part of the inputs, before `fp8_scaled`."""
    column = split * PART + tl.arange(0, BLOCK_IN)
    taken_from = codes + made.to(tl.int64) * INS + column[None, :]
    given_from = x + row * INS + column[:, None]
    COLS: tl.constexpr = (INS + COL_BLOCK - 1) // COL_BLOCK
    scale_from = scale + (made // ROW_BLOCK) * COLS
    sums = tl.zeros([made.shape[0], row.shape[1]], tl.float32)
    for start in range(0, PART, BLOCK_IN):
        is_in = start + column < INS
        if INS % (SPLITS * BLOCK_IN) == 0:
            is_in = column >= 0
        taken = tl.load(taken_from + start, mask=is_made & is_in[None, :], other=0.0)
        # Through float16 and float32: the direct conversion to bfloat16 has a quarter of the speed.
        taken = taken.to(tl.float16).to(tl.float32).to(x.dtype.element_ty)
        given = tl.load(given_from + start, mask=is_row & is_in[:, None], other=0.0)
        if COLS == 1:
            sums = tl.dot(taken, given, sums, input_precision="ieee")
        else:
            block = tl.minimum((split * PART + start) // COL_BLOCK, COLS - 1)  # beyond it, x is zero
            factor = tl.load(scale_from + block, mask=is_made, other=0.0)
            sums += tl.dot(taken, given, input_precision="ieee") * factor
    return sums


@triton.jit
def fp8_scaled(
    sums, scale, made, is_made, INS: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr
):  # fmt: skip
    """Multiply by the scale of each output, where all its inputs share one."""
    if (INS + COL_BLOCK - 1) // COL_BLOCK == 1:
        return sums * tl.load(scale + made // ROW_BLOCK, mask=is_made, other=0.0)
    else:
        return sums


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_rows(
    x, codes, scale, out, parts, finished, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)[None, :]
    made = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + BLOCK_IN - 1) // BLOCK_IN + SPLITS - 1) // SPLITS * BLOCK_IN
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums = fp8_part_sums(
        x, codes, scale, made, row, is_made, is_row, split, INS, PART, BLOCK_IN, SPLITS, ROW_BLOCK, COL_BLOCK
    )
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    sums = fp8_scaled(sums, scale, made, is_made, INS, ROW_BLOCK, COL_BLOCK)
    put_sums(sums, out, parts, finished, tile, split, num_rows, num_outs, SPLITS, ADD)


@triton.jit
def _twice(pair, HIGH: tl.constexpr):
    """Return one of the two halves of a word, in both halves."""
    return (pair & -65536) | ((pair >> 16) & 65535) if HIGH else (pair << 16) | (pair & 65535)


@triton.jit
def expand(taken, pair0, pair1, pair2, pair3, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr):
    """Words, and the four pairs of scales of their 256 inputs -> the weights of 32 inputs, eight times, in bfloat16."""
    return tl.inline_asm_elementwise(
        EXPAND, EXPAND_REGISTERS,
        [taken, _twice(pair0, 0), _twice(pair0, 1), _twice(pair1, 0), _twice(pair1, 1),
         _twice(pair2, 0), _twice(pair2, 1), _twice(pair3, 0), _twice(pair3, 1)],
        (tl.bfloat16,) * 8, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def int4_part_sums(
    x, codes, scale, made, row, is_made, is_row, split, num_outs,
    INS: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, PAIRS: tl.constexpr, EXPAND: tl.constexpr,
    EXPAND_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Return [outs, rows]: the matmul over one part of the inputs. PART is in spans of 256 inputs."""
    word = tl.arange(0, 32)
    SPANS: tl.constexpr = (INS + 255) // 256
    taken_from = codes + made.to(tl.int64) * (SPANS * 32) + word[None, :]
    given_from = x + row * INS + word[:, None]
    sums = tl.zeros([made.shape[0], row.shape[1]], tl.float32)
    for number in range(PART):
        span = split * PART + number
        known = tl.minimum(span, SPANS - 1)  # beyond it, x is zero
        taken = tl.load(taken_from + known * 32, mask=is_made, other=0)
        pairs_from = scale + known * 4 * num_outs + made
        pair0 = tl.load(pairs_from, mask=is_made, other=0)
        pair1 = tl.load(pairs_from + num_outs, mask=is_made, other=0)
        pair2 = tl.load(pairs_from + 2 * num_outs, mask=is_made, other=0)
        pair3 = tl.load(pairs_from + 3 * num_outs, mask=is_made, other=0)
        pairs = (pair0, pair1, pair2, pair3)
        if PAIRS:
            values = expand(taken, pair0, pair1, pair2, pair3, EXPAND, EXPAND_REGISTERS)
        for j in tl.static_range(8):
            start = span * 256 + j * 32
            is_in = start + word < INS
            if INS % (SPLITS * 256) == 0:
                is_in = word < 32
            given = tl.load(given_from + start, mask=is_row & is_in[:, None], other=0.0)
            if PAIRS:
                value = values[j]
            else:
                value = (((taken >> (4 * j)) & 15) - 8).to(tl.float32) * half_of_pair(pairs[j // 2], j % 2)
                value = value.to(x.dtype.element_ty)
            sums = tl.dot(value, given, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _int4_rows(
    x, codes, scale, out, parts, finished, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    PAIRS: tl.constexpr, EXPAND: tl.constexpr, EXPAND_REGISTERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)[None, :]
    made = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + 255) // 256 + SPLITS - 1) // SPLITS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums = int4_part_sums(
        x, codes, scale, made, row, is_made, is_row, split, num_outs, INS, PART, SPLITS, PAIRS, EXPAND, EXPAND_REGISTERS
    )
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    put_sums(sums, out, parts, finished, tile, split, num_rows, num_outs, SPLITS, ADD)


def quant_rows_linear(
    x: Tensor,
    weight: QuantWeight,
    *,
    add_to: Tensor | None = None,
    tile: SkinnyTile | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Return x W^T for few rows, by default those of `weight.is_few`; with `add_to`, the sum, in place. `options` are
    further ones of the compiler."""
    assert x.is_contiguous()
    assert add_to is None or add_to.is_contiguous()
    num_outs, num_ins = weight.shape
    out = x.new_empty(len(x), num_outs) if add_to is None else add_to
    tile = tile or skinny_tile(weight.kind, len(x), num_outs, num_ins)
    assert weight.kind != "blocks" or weight.col_block % tile.ins == 0
    rows, overlap = padded_rows(len(x)), overlaps(x)
    grid = (cdiv(num_outs, tile.outs), tile.splits)
    given = (x, weight.codes, weight.scale, out, *workspace(tile, rows, out), len(x), num_outs)
    if weight.is_int4:
        assert not weight.floats, "only the kernels of experts read MXFP4"
        _int4_rows[grid](
            *given, INS=num_ins, ROWS=rows, BLOCK_OUT=tile.outs, SPLITS=tile.splits, ADD=add_to is not None,
            PAIRS=overlap and x.dtype == torch.bfloat16, EXPAND=EXPAND, EXPAND_REGISTERS=EXPAND_REGISTERS,
            OVERLAP=overlap, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap, **options,
        )  # fmt: skip
    else:
        _fp8_rows[grid](
            *given, INS=num_ins, ROWS=rows, ROW_BLOCK=weight.row_block, COL_BLOCK=weight.col_block,
            BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, SPLITS=tile.splits, ADD=add_to is not None, OVERLAP=overlap,
            num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap, **options,
        )  # fmt: skip
    return out
