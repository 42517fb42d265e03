# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Matmul of many rows of x with an 8-bit or 4-bit weight (quant.py), where arithmetic is the limit.

Where the checkpoint was made for 8-bit activations and the tensor cores support them, each row of x (or each 128 inputs
of it, if the weight has blocks) gets a scale of its own. Otherwise the weight is dequantised and multiplied by the
library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton, wait_for_inputs
from stoker.kernels.quant import QuantWeight, dequantise_triton

_LARGEST = 448.0  # largest float8_e4m3fn value
_PART_BYTES = 128 << 20
_ROW_STEP = 256
_TOGETHER = 2048  # values that one program quantises


def quantise_ref(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes [rows, in] float8_e4m3fn and scale [rows, in / group] float32: the largest value of a group becomes
    the largest code."""
    groups = x.double().view(len(x), -1, group)
    scale = (groups.abs().amax(-1) / _LARGEST).clamp_min(1e-12).float()
    codes = (groups / scale[..., None]).flatten(1).clamp(-_LARGEST, _LARGEST)
    return codes.float().to(torch.float8_e4m3fn), scale


@triton.jit(do_not_specialize=["num_rows"])
def _quantise(
    x, codes, scale, num_rows,
    NUM_GROUPS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group, column = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    inside = (group < NUM_GROUPS)[:, None] & (column < GROUP)[None, :]
    place = (row * NUM_GROUPS + group[:, None]) * GROUP + column[None, :]
    given = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(given), 1) / 448.0, 1e-12)
    tl.store(scale + group * num_rows + row, factor, mask=group < NUM_GROUPS)
    tl.store(codes + place, (given / factor[:, None]).to(tl.float8e4nv), mask=inside)


def quantise_triton(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise in the layout of the library: neighbouring scales belong to neighbouring rows, and rows of
    undefined content pad their number to a multiple of four."""
    assert x.is_contiguous()
    num_rows, num_groups = -(-len(x) // 4) * 4, x.shape[1] // group
    codes = torch.empty(num_rows, x.shape[1], dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(group)
    together, overlap = max(1, _TOGETHER // block), overlaps(x)
    _quantise[(len(x), cdiv(num_groups, together))](
        x, codes, scale, num_rows, NUM_GROUPS=num_groups, GROUP=group, TOGETHER=together, BLOCK=block, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return codes, scale.t()


def many_rows_linear(x: Tensor, weight: QuantWeight, *, add_to: Tensor | None = None) -> Tensor:
    """Return x W^T; with `add_to`, the sum, in place."""
    if not _takes_fp8(weight):
        return _plain(x, weight, add_to)
    found = fp8_linear(x, weight)
    return found if add_to is None else add_to.add_(found)


def _takes_fp8(weight: QuantWeight) -> bool:
    """Return True if the library has 8-bit matmuls for these operands."""
    num_outs, num_ins = weight.shape
    if not weight.quantises_inputs or num_outs % 16 or num_ins % 16:
        return False
    if weight.col_block == num_ins:
        return weight.row_block == 1
    return weight.row_block == weight.col_block == 128 and num_ins % 512 == 0


def fp8_linear(x: Tensor, weight: QuantWeight) -> Tensor:
    """Matmul with both sides in 8 bits. Each row of x, or each 128 inputs of it, is scaled by its largest value."""
    is_whole = weight.col_block == x.shape[1]
    codes, scale = quantise_triton(x, weight.col_block)
    of_weight = weight.scale.view(1, -1) if is_whole else weight.scale.t()
    found = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=scale, scale_b=of_weight, out_dtype=x.dtype, use_fast_accum=is_whole
    )
    return found[: len(x)]


def _plain(x: Tensor, weight: QuantWeight, add_to: Tensor | None) -> Tensor:
    """Dequantise some outputs at a time, so that the result is read again from the L2 cache and takes little memory."""
    num_outs, num_ins = weight.shape
    out = x.new_empty(len(x), num_outs) if add_to is None else add_to
    most = max(_ROW_STEP, _PART_BYTES // (num_ins * x.element_size()) // _ROW_STEP * _ROW_STEP)
    for first in range(0, num_outs, most):
        count = min(most, num_outs - first)
        plain, part = dequantise_triton(weight, x.dtype, first, count), out[:, first : first + count]
        if add_to is None:
            torch.mm(x, plain.t(), out=part)
        else:
            torch.addmm(part, x, plain.t(), out=part)
    return out
