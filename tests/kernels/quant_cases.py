"""What the kernels for 8-bit and 4-bit weights must do, in the interpreter and on a GPU; see cases.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernels.cases import close
from torch import Tensor

from stoker.kernels.quant import QuantWeight, dequantise_ref, dequantise_triton, fp8_weight, int4_weight
from stoker.kernels.quant_many import many_rows_linear, quantise_ref, quantise_triton
from stoker.kernels.quant_skinny import quant_rows_linear

# Rows and columns that share a scale; None means all of them. 4-bit weights have one scale per 32 columns.
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of the codes 0 to 7
FP8_BLOCKS = [(1, None), (128, 128), (1, 128), (48, 128)]


def made_fp8(
    num_out: int, num_in: int, rows: int, cols: int | None, device: torch.device
) -> tuple[QuantWeight, Tensor]:
    """Return a weight, and its dequantised value in float64."""
    cols = cols or num_in
    codes = torch.randn(num_out, num_in, device=device).mul_(30).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-num_out // rows), -(-num_in // cols), device=device) * 0.01 + 0.001
    row, column = torch.arange(num_out, device=device)[:, None], torch.arange(num_in, device=device)
    return fp8_weight(codes, scale, rows, cols), codes.double() * scale.double()[row // rows, column // cols]


def made_int4(
    num_out: int, num_in: int, group: int, device: torch.device, floats: bool = False
) -> tuple[QuantWeight, Tensor]:
    """`floats`: MXFP4, whose scales are powers of two."""
    codes = torch.randint(0, 16, (num_out, num_in), device=device)
    scale = (torch.rand(num_out, num_in // group, device=device) * 0.01 + 0.001).bfloat16()
    words = sum(codes[:, j::8] << (4 * j) for j in range(8))
    assert isinstance(words, Tensor)
    words = torch.where(words < 2**31, words, words - 2**32).int()
    values = codes - 8
    if floats:
        scale = torch.ldexp(torch.ones_like(scale), torch.randint(-9, -2, scale.shape, device=device))
        values = torch.tensor([*MXFP4, *(-value for value in MXFP4)], device=device)[codes]
    return int4_weight(words, scale, floats=floats), values.double() * scale.double().repeat_interleave(group, 1)


def weights(num_out: int, num_in: int, device: torch.device) -> list[tuple[QuantWeight, Tensor]]:
    found = [made_fp8(num_out, num_in, *block, device) for block in FP8_BLOCKS]
    return found + [made_int4(num_out, num_in, group, device) for group in (32, 64) if num_in % group == 0]


def products(num_rows: int, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, num_in, device=device).to(dtype)
    total = torch.randn(num_rows, num_out, device=device).to(dtype)
    for weight, meant in weights(num_out, num_in, device):
        product = x.double() @ meant.t()
        close(quant_rows_linear(x, weight), product)
        close(quant_rows_linear(x, weight, add_to=total.clone()), total.double() + product)


def many_rows(num_rows: int, num_in: int, num_out: int, device: torch.device) -> None:
    """On a GPU: with 8-bit inputs, which cost about 3% in precision, and without."""
    x = torch.randn(num_rows, num_in, device=device).to(torch.bfloat16)
    total = torch.randn(num_rows, num_out, device=device).to(torch.bfloat16)
    for weight, meant in weights(num_out, num_in, device):
        product = x.double() @ meant.t()
        close(many_rows_linear(x, weight), product)
        close(many_rows_linear(x, weight, add_to=total.clone()), total.double() + product)
        if not weight.is_int4:
            found = many_rows_linear(x, replace(weight, quantises_inputs=True)).double()
            assert float((found - product).norm() / product.norm()) < 0.04


def dequantised(num_in: int, num_out: int, device: torch.device, dtype: torch.dtype) -> None:
    floats = [made_int4(num_out, num_in, 32, device, floats=True)] if num_in % 32 == 0 else []
    for weight, meant in weights(num_out, num_in, device) + floats:
        assert torch.equal(dequantise_ref(weight, torch.float64), meant)
        assert torch.equal(dequantise_triton(weight, dtype), meant.float().to(dtype))


def quantised(
    num_rows: int, num_in: int, group: int, device: torch.device, dtype: torch.dtype, most_others: float
) -> None:
    """`most_others` is the share of codes that may differ from the reference's."""
    x = torch.randn(num_rows, num_in, device=device).to(dtype)
    x[0, :group] = 0
    codes, scale = quantise_triton(x, group)
    expected, expected_scale = quantise_ref(x, group)
    assert torch.allclose(scale[:num_rows], expected_scale, rtol=1e-6)
    assert (codes[:num_rows].float() != expected.float()).float().mean() <= most_others
