# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Matmul of few rows of x, where reading W is all the work.  x [rows, in]   weight [out, in]   ->  [rows, out]

One row is multiplied and accumulated, and its norm or gate is fused: x times the norm's weight as it is read, the row's
scale at the end. Several rows go through the tensor cores, with W as the tall side. Where there are few outputs,
several programs share the inputs, and the last of them to finish adds up the partial sums. Both can add to a total. The
next kernel may start when a program has read its part of W: earlier, it would only take the place of programs that have
not started. linear.py has the reference and decides when this is used.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.tile_choice import max_rows, skinny_tile
from stoker.kernels.tile_model import MAX_TILES, SkinnyTile

KIND = "bf16"  # of the weights, for the choice of tiles
MAX_ROWS = max_rows(KIND)
MAX_SIZE = (1 << 31) // MAX_ROWS - 1  # outputs or inputs: offsets into x and the result have 32 bits
_MIN_ROWS = 16  # the smallest row count of the tensor cores


WIDE = SkinnyTile(outs=32, ins=64, num_warps=4, num_stages=2)  # for several rows of float32


@cache
def _counters(device: torch.device) -> Tensor:
    """Return counters that are zero before and after a matmul; matmuls run one after the other."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def padded_rows(num_rows: int) -> int:
    return max(_MIN_ROWS, next_power_of_2(num_rows))


def workspace(tile: SkinnyTile, rows: int, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return where programs that share their inputs leave their partial sums, and how many have finished."""
    if tile.splits == 1:
        return out, out  # not used
    num_tiles = cdiv(out.shape[1], tile.outs)
    assert num_tiles <= MAX_TILES
    size = num_tiles * tile.splits * tile.outs * rows
    return torch.empty(size, dtype=torch.float32, device=out.device), _counters(out.device)


@triton.jit
def _fetch(address):
    """Prefetch into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _one_row(
    x, weight, norm, out, eps, num_outs,
    INS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
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
    # num_stages is set here: without a tl.dot in it, a loop's loads are not pipelined otherwise.
    for start in tl.range(0, INS, BLOCK_IN, num_stages=STAGES):
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
def put_sums(sums, out, parts, finished, tile, split, num_rows, num_outs, SPLITS: tl.constexpr, ADD: tl.constexpr):
    """Finish a program that computed `sums` [outs, rows] over its share of the inputs. The last program of a tile adds
    up the parts, always in the same order."""
    BLOCK_OUT: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    row, made = tl.arange(0, ROWS)[None, :], tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_last = True
    if SPLITS > 1:
        mine = parts + tile * (SPLITS * BLOCK_OUT * ROWS) + tl.arange(0, BLOCK_OUT)[:, None] * ROWS + row
        tl.store(mine + split * (BLOCK_OUT * ROWS), sums)
        tl.debug_barrier()  # all of this program's part is written before it counts as finished
        is_last = tl.atomic_add(finished + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(finished + tile, 0)
            sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
            for number in tl.static_range(SPLITS):
                sums += tl.load(mine + number * (BLOCK_OUT * ROWS), cache_modifier=".cg")
    if is_last:
        place, is_mine = out + row * num_outs + made, (row < num_rows) & (made < num_outs)
        if ADD:
            sums = added(sums, tl.load(place, mask=is_mine, other=0.0).to(tl.float32))
        tl.store(place, sums.to(out.dtype.element_ty), mask=is_mine)


@triton.jit
def added(sums, more):
    """Return sums + more. If `sums` comes from one tl.dot, Triton would turn the sum into the start of that matmul, which is
    rounded differently. Whether it comes from one depends on the tile. It does not do that to a difference."""
    return sums - (-more)


@triton.jit
def part_sums(
    x, weight, made, row, is_made, is_row, split,
    INS: tl.constexpr, PART: tl.constexpr, BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return [outs, rows]: the matmul over one part of the inputs."""
    column = split * PART + tl.arange(0, BLOCK_IN)
    taken_from = weight + made.to(tl.int64) * INS + column[None, :]
    given_from = x + row * INS + column[:, None]
    sums = tl.zeros([made.shape[0], row.shape[1]], tl.float32)
    for start in range(0, PART, BLOCK_IN):
        is_in = start + column < INS
        if INS % (SPLITS * BLOCK_IN) == 0:
            is_in = column >= 0
        taken = tl.load(taken_from + start, mask=is_made & is_in[None, :], other=0.0)
        given = tl.load(given_from + start, mask=is_row & is_in[:, None], other=0.0)
        sums = tl.dot(taken, given, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x, weight, out, parts, finished, num_rows, num_outs,
    INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, SPLITS: tl.constexpr,
    FETCHED: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)[None, :]
    made = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_made, is_row = made < num_outs, row < num_rows
    PART: tl.constexpr = ((INS + BLOCK_IN - 1) // BLOCK_IN + SPLITS - 1) // SPLITS * BLOCK_IN
    if OVERLAP:
        if FETCHED:
            line = split * PART + tl.arange(0, FETCHED * BLOCK_IN // 64) * 64
            _fetch(weight + tl.minimum(made, num_outs - 1).to(tl.int64) * INS + tl.minimum(line, INS - 1)[None, :])
        tl.extra.cuda.gdc_wait()
    sums = part_sums(x, weight, made, row, is_made, is_row, split, INS, PART, BLOCK_IN, SPLITS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    put_sums(sums, out, parts, finished, tile, split, num_rows, num_outs, SPLITS, ADD)


def one_row_linear(
    x: Tensor, weight: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, is_gated: bool = False,
    add_to: Tensor | None = None, tile: SkinnyTile | None = None,
) -> Tensor:  # fmt: skip
    """Return x W^T for one row. `norm` is applied to x first. With `is_gated`, x is twice as wide and its first half
    gates its second. With `add_to`, the sum, in place."""
    assert len(x) == 1
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = x.new_empty(1, len(weight)) if add_to is None else add_to
    tile = tile or skinny_tile(KIND, 1, *weight.shape)
    overlap = overlaps(x)
    _one_row[(cdiv(len(weight), tile.outs),)](
        x, weight, x if norm is None else norm, out, eps, len(weight),
        INS=weight.shape[1], BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, STAGES=tile.num_stages,
        NORM=norm is not None, GATED=is_gated, ADD=add_to is not None, OVERLAP=overlap,
        num_warps=tile.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


def few_rows_linear(
    x: Tensor, weight: Tensor, *, add_to: Tensor | None = None, tile: SkinnyTile | None = None
) -> Tensor:
    """Return x W^T for few rows, by default at most MAX_ROWS; with `add_to`, the sum, in place."""
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert add_to is None or add_to.is_contiguous()
    num_outs, num_ins = weight.shape
    out = x.new_empty(len(x), num_outs) if add_to is None else add_to
    tile = tile or (WIDE if x.element_size() == 4 else skinny_tile(KIND, len(x), num_outs, num_ins))
    rows, overlap = padded_rows(len(x)), overlaps(x)
    _few_rows[(cdiv(num_outs, tile.outs), tile.splits)](
        x, weight, out, *workspace(tile, rows, out), len(x), num_outs,
        INS=num_ins, ROWS=rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, SPLITS=tile.splits, FETCHED=tile.fetched,
        ADD=add_to is not None, OVERLAP=overlap,
        num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return out
