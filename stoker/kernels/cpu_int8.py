"""Matmul with an 8-bit weight on a CPU: y = x W^T.  x [tokens, in] float32   weight [out, in]   ->  [tokens, out] float32

The weight has one scale per output, and each row of x is quantised to 8 bits with a scale of its own. Both are first
rotated in blocks of inputs by a Hadamard matrix, which leaves the matmul unchanged and spreads outliers. Without the
rotation, the perplexity of SmolLM2 rises by 3.5%; with it, by 0.4% (at most 0.7% on one of three texts).

A row's result never depends on the other rows or on the kernel. The products are summed as integers. The rotation sums
integers that float32 represents exactly, so the order of the additions does not matter. The length of a row, for its
norm, is summed by torch in an order that depends on the width only. All other operations are elementwise or maxima.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

# The name of this number format in a model's fingerprint. Change it when the same weights give other results.
FORMAT = "int8-rotated-3"
_BLOCKS = (64, 32)  # inputs that are rotated together: the first that divides the number of inputs
_MAX_CODE = 127
_SUM_BITS = 23  # of the largest sum in a rotation, before its terms are rounded; float32 is exact up to 1 << 24
# Constants are tensors: an operator takes 1.6 us longer with a number, which is most of its time for one row.
_TINY = torch.tensor(1e-30)
_PER_CODE = torch.tensor(1.0 / _MAX_CODE)
_ZERO_POINT = 128  # the kernels take unsigned codes of x


class Int8Kernel(Protocol):
    """A matmul of 8-bit integers."""

    name: str

    def pack(self, codes: Tensor, scale: Tensor) -> Any:
        """Return the weight in the layout of the kernel. codes [out, in] int8   scale [out] float32"""

    def matmul(self, x: Tensor, packed: Any) -> Tensor:
        """Return (x codes^T) * scale. x [tokens, in]: integers from -127 to 127, in float32."""


class ReferenceKernel:
    """The matmul in float64, which is exact for these integers."""

    name = "reference"

    def pack(self, codes: Tensor, scale: Tensor) -> Any:
        return codes, scale

    def matmul(self, x: Tensor, packed: Any) -> Tensor:
        codes, scale = packed
        return (x.double() @ codes.double().t()).float() * scale


class FbgemmKernel:
    """FBGEMM, which quantises its input by itself. It is the fastest for few rows."""

    name = "fbgemm"

    def pack(self, codes: Tensor, scale: Tensor) -> Any:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():  # torch calls its quantised tensors deprecated
            warnings.simplefilter("ignore")
            weight = torch._make_per_channel_quantized_tensor(codes, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(weight, None)

    @cached_property
    def _linear(self) -> Any:
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

    def matmul(self, x: Tensor, packed: Any) -> Tensor:
        return self._linear(x, 1.0, _ZERO_POINT, packed)  # type: ignore[no-any-return]


class OneDnnKernel:
    """oneDNN's quantised matmul."""

    name = "onednn"

    def pack(self, codes: Tensor, scale: Tensor) -> Any:
        zeros = torch.zeros(len(scale), dtype=torch.int32)
        return torch.ops.onednn.qlinear_prepack(codes.contiguous(), None), scale, zeros

    def matmul(self, x: Tensor, packed: Any) -> Tensor:
        codes, scale, zeros = packed
        unsigned = x.add(_ZERO_POINT).to(torch.uint8)
        linear = torch.ops.onednn.qlinear_pointwise
        found: Tensor = linear(
            unsigned, 1.0, _ZERO_POINT, codes, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return found


KERNELS: dict[str, Int8Kernel] = {kernel.name: kernel for kernel in (FbgemmKernel(), OneDnnKernel())}


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight in the layout of a kernel."""

    packed: Any
    kernel: Int8Kernel
    block: int  # inputs that are rotated together
    is_input_rotated: bool  # by the matmul before, whose outputs were rotated with its weight

    @classmethod
    def of_rows(cls, weight: Iterable[Tensor], kernel: Int8Kernel, rotated_block: int | None = None) -> Int8Weight:
        """Quantise a weight [out, in] in float32, given some of its rows at a time. `rotated_block`: the inputs will be
        rotated already, in blocks of this size."""
        codes, scales, blocks = zip(*(quantise_weight(rows, rotated_block) for rows in weight), strict=True)
        return cls(kernel.pack(torch.cat(codes), torch.cat(scales)), kernel, blocks[0], rotated_block is not None)


@cache
def hadamard(size: int) -> Tensor:
    """Return the Hadamard matrix of a size that is a power of two: 1 and -1, symmetric, its square is `size` times the
    identity."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def input_block(num_ins: int) -> int:
    """Return how many inputs are rotated together."""
    return next(size for size in _BLOCKS if num_ins % size == 0)


def rotate_outputs(weight: Tensor, block: int) -> Tensor:
    """Return the weight [out, in] whose outputs are rotated in blocks. Float64 adds up these float32 numbers exactly,
    unless their sizes differ by more than 2^20."""
    blocks = weight.double().view(-1, block, weight.shape[1])
    return torch.matmul(hadamard(block).double(), blocks).mul_(block**-0.5).float().view(weight.shape)


def quantise_weight(weight: Tensor, rotated_block: int | None = None) -> tuple[Tensor, Tensor, int]:
    """Return the codes [out, in] and scales [out] of the rotated weight, and the size of the rotated blocks. The scales
    contain the constant factors of the matmul: the weight's rotation is not normalised, and neither is that of x, unless
    it was done before (`rotated_block`)."""
    block = rotated_block or input_block(weight.shape[1])
    rotated, unit = _rotate(weight, block)
    codes, scale = to_grid(rotated, _PER_CODE)
    factor = block**-0.5 if rotated_block else 1.0 / block
    return codes.to(torch.int8), scale.mul_(unit).squeeze(1) * factor, block


def to_grid(x: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of x to integers, in float32, in units that are this share of the row's largest value. Return them,
    and the units [rows, 1]."""
    unit = x.abs().amax(1, True).mul_(share).clamp_min_(_TINY)
    return x.div(unit).round_(), unit


@cache
def rotation_share(block: int) -> Tensor:
    """Return the share for `to_grid` that keeps the sums of a rotation exact: it adds `block` integers."""
    return torch.tensor(block / 2.0**_SUM_BITS)


def _rotate(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    grid, unit = to_grid(x, rotation_share(block))
    return torch.mm(grid.view(-1, block), hadamard(block)).view(x.shape), unit


def int8_linear(x: Tensor, weight: Int8Weight) -> tuple[Tensor, Tensor]:
    """Return the matmul without the scales of the rows, and these [tokens, 1]. The caller multiplies."""
    if weight.is_input_rotated:
        codes, factor = to_grid(x, _PER_CODE)
    else:
        rotated, unit = _rotate(x, weight.block)
        codes, factor = to_grid(rotated, _PER_CODE)
        factor.mul_(unit)
    return weight.kernel.matmul(codes, weight.packed), factor


@dataclass(frozen=True, slots=True)
class NormGrid:
    """A grid for the rotation of normed rows. The norm bounds their values, so one grid serves all rows."""

    weight: Tensor  # of the norm, in units of the grid
    unit: Tensor  # a power of two
    eps: Tensor  # that of the norm, times the width

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> NormGrid:
        """A normed row has at most the length sqrt(width), so the sum of a block is at most that times the length of the
        block of weights (Cauchy and Schwarz). The root of the width is a part of the weight."""
        width, block = len(weight), input_block(len(weight))
        largest = float(torch.linalg.vector_norm(weight.double().view(-1, block), dim=1).max()) * width**0.5
        unit = 2.0 ** (math.ceil(math.log2(max(largest, float(_TINY)))) - _SUM_BITS)
        return cls((weight.double() * width**0.5).float() / unit, torch.tensor(unit), torch.tensor(eps * width))


def int8_norm_linear(x: Tensor, grid: NormGrid, weight: Int8Weight) -> Tensor:
    """Return the matmul of norm(x)."""
    length = torch.linalg.vector_norm(x, 2.0, 1, True)
    length.mul_(length).add_(grid.eps).sqrt_()
    normed = x.div(length).mul_(grid.weight).round_()
    rotated = torch.mm(normed.view(-1, weight.block), hadamard(weight.block)).view(x.shape)
    codes, factor = to_grid(rotated, _PER_CODE)
    return weight.kernel.matmul(codes, weight.packed).mul_(factor.mul_(grid.unit))


def is_exact(kernel: Int8Kernel) -> bool:
    """Return True if the kernel gives exact results on this machine. Some instruction sets add pairs of products in 16
    bits, where the largest codes overflow."""
    generator = np.random.default_rng(0)  # an engine process does without torch.Generator, which imports the compiler
    reference = ReferenceKernel()
    scale = torch.from_numpy(generator.random(96, np.float32)).add_(0.5)
    try:
        for low, num_tokens in ((_MAX_CODE, 1), (_MAX_CODE, 5), (0, 1), (0, 7), (0, 40)):
            signs = generator.integers(0, 2, (96, 320)) * 2 - 1
            sizes = generator.integers(low, _MAX_CODE + 1, (96, 320))
            codes = torch.from_numpy(signs * sizes).to(torch.int8)
            codes[0], codes[1] = _MAX_CODE, -_MAX_CODE
            x = torch.from_numpy(generator.integers(low, _MAX_CODE + 1, (num_tokens, 320))).float()
            x[:, ::3] *= -1 if low == 0 else 1
            found = kernel.matmul(x, kernel.pack(codes, scale))
            if not torch.equal(found, reference.matmul(x, reference.pack(codes, scale))):
                return False
    except (RuntimeError, AttributeError):  # this build of torch does not have the operator
        return False
    return True
