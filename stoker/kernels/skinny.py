# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""y = x W^T for few rows of x, where reading W is all the work.  x [rows, in]   weight [out, in]   ->  [rows, out]

One row is multiplied and added up, and its norm or its gate done on the way: x times the norm's weight as it is read, the
row's scale at the end. Several rows go through the matrix units, with W as the tall side. Both can add to a sum. The next
kernel is let in when a program has read its part of W: earlier it would only take the place of programs that still have to.
linear.py has the reference and decides when this pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stoker.kernels.dispatch import overlaps, tl, triton

MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program works: so many outputs, so many inputs at a time."""

    outs: int
    ins: int
    num_warps: int
    num_stages: int


# Measured on an H200 with Llama-3.1-8B's shapes: bench/gpu.py --tiles.
ONE_ROW = Tile(outs=8, ins=1024, num_warps=4, num_stages=2)
ONE_ROW_ADDED = Tile(outs=8, ins=512, num_warps=8, num_stages=2)
FEW_ROWS = Tile(outs=64, ins=256, num_warps=4, num_stages=4)
FEW_WIDE_ROWS = Tile(outs=32, ins=64, num_warps=4, num_stages=2)  # of float32


@triton.jit
def _one_row(
    x, weight, norm, out, eps, num_outs,
    INS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    made = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_made = made < num_outs
    column = tl.arange(0, BLOCK_IN)
    taken_from = weight + made.to(tl.int64)[:, None] * INS + column[None, :]
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for start in range(0, INS, BLOCK_IN):
        is_in = start + column < INS
        if INS % BLOCK_IN == 0:
            is_in = column < BLOCK_IN
        taken = tl.load(taken_from + start, mask=is_made[:, None] & is_in[None, :], other=0.0)
        given = tl.load(x + start + column, mask=is_in, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(x + INS + start + column, mask=is_in, other=0.0).to(tl.float32)
            given = given / (1 + tl.exp(-given)) * up
        if NORM:
            squares += given * given
            given = given * tl.load(norm + start + column, mask=is_in, other=0.0).to(tl.float32)
        sums += taken.to(tl.float32) * given[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    found = tl.sum(sums, 1)
    if NORM:
        found = found * tl.rsqrt(tl.sum(squares) / INS + eps)
    if ADD:
        found += tl.load(out + made, mask=is_made, other=0.0).to(tl.float32)
    tl.store(out + made, found.to(out.dtype.element_ty), mask=is_made)


@triton.jit
def _few_rows(
    x, weight, out, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)[None, :]
    made = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_made, is_row = made < num_outs, row < num_rows
    column = tl.arange(0, BLOCK_IN)
    taken_from = weight + made.to(tl.int64) * INS + column[None, :]
    given_from = x + row * INS + column[:, None]
    sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for start in range(0, INS, BLOCK_IN):
        is_in = start + column < INS
        if INS % BLOCK_IN == 0:
            is_in = column < BLOCK_IN
        taken = tl.load(taken_from + start, mask=is_made & is_in[None, :], other=0.0)
        given = tl.load(given_from + start, mask=is_row & is_in[:, None], other=0.0)
        sums = tl.dot(taken, given, sums, input_precision="ieee")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    place = out + row * num_outs + made
    if ADD:
        sums += tl.load(place, mask=is_made & is_row, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_made & is_row)


def one_row_linear(
    x: Tensor, weight: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, is_gated: bool = False,
    add_to: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """`norm`: of x, before the product. `is_gated`: x is twice as wide, and its first half gates its second. `add_to`: the
    sum, in place."""
    assert len(x) == 1
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = x.new_empty(1, len(weight)) if add_to is None else add_to
    tile = tile or (ONE_ROW if add_to is None else ONE_ROW_ADDED)
    overlap = overlaps(x)
    _one_row[(triton.cdiv(len(weight), tile.outs),)](
        x, weight, x if norm is None else norm, out, eps, len(weight),
        INS=weight.shape[1], BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins,
        NORM=norm is not None, GATED=is_gated, ADD=add_to is not None, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return out


def few_rows_linear(x: Tensor, weight: Tensor, *, add_to: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """At most MOST_ROWS. `add_to`: the sum, in place."""
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert add_to is None or add_to.is_contiguous()
    out = x.new_empty(len(x), len(weight)) if add_to is None else add_to
    tile = tile or (FEW_WIDE_ROWS if x.element_size() == 4 else FEW_ROWS)
    overlap = overlaps(x)
    _few_rows[(triton.cdiv(len(weight), tile.outs),)](
        x, weight, out, len(x), len(weight),
        INS=x.shape[1], ROWS=MOST_ROWS, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins,
        ADD=add_to is not None, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return out
