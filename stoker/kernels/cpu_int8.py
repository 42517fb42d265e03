"""Matmul with an 8-bit weight on a CPU: y = x W^T.  x [tokens, in] float32   weight [out, in]   ->  [tokens, out] float32

The weight has one scale per output, and each row of x is quantised to 8 bits with a scale of its own. Both are first
rotated in blocks of inputs by a Hadamard matrix, which leaves the matmul unchanged and spreads outliers. Without the
rotation, the perplexity of SmolLM2 rises by 3.5%; with it, by 0.4% (at most 0.7% on one of three texts).

A row's result never depends on the other rows or on the kernel. The products are summed as integers. The rotation sums
integers that float32 represents exactly, so the order of the additions does not matter. All other operations are
elementwise or maxima.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

# The name of this number format in a model's fingerprint. Change it when the same weights give other results.
FORMAT = "int8-rotated-2"
_BLOCKS = (64, 32)  # inputs that are rotated together: the first that divides the number of inputs
_MAX_CODE = 127
_GRID = float(1 << 17)  # the rotation adds 64 integers up to this; float32 is exact up to 1 << 24
_TINY = 1e-30
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

    def matmul(self, x: Tensor, packed: Any) -> Tensor:
        linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return linear(x, 1.0, _ZERO_POINT, packed)  # type: ignore[no-any-return]


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
    block: int

    @classmethod
    def of_rows(cls, weight: Iterable[Tensor], kernel: Int8Kernel) -> Int8Weight:
        """Quantise a weight [out, in] in float32, given some of its rows at a time."""
        codes, scales, blocks = zip(*map(quantise_weight, weight), strict=True)
        return cls(kernel.pack(torch.cat(codes), torch.cat(scales)), kernel, blocks[0])


@cache
def hadamard(size: int) -> Tensor:
    """Return the Hadamard matrix of a size that is a power of two: 1 and -1, symmetric, its square is `size` times the
    identity."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the codes [out, in] and scales [out] of the rotated weight, and the size of the rotated blocks. The scales
    contain the constant factors of `int8_linear`."""
    block = next(size for size in _BLOCKS if weight.shape[1] % size == 0)
    codes, scale = quantise_rows(weight, block)
    return codes.to(torch.int8), scale.squeeze(1) * _unit(block), block


def _unit(block: int) -> float:
    """Return the value of one, in units of the quantised matmul: both operands have a grid and codes, and both are
    rotated by a matrix whose square is `block` times the identity."""
    return 1.0 / (_MAX_CODE * _MAX_CODE * _GRID * _GRID * block)


def quantise_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Rotate the rows of x and round them to codes, in float32. Return the codes, and a factor for each row."""
    peak = x.abs().amax(1, True).clamp_min_(_TINY)
    grid = x.mul(peak.reciprocal().mul_(_GRID)).round_()
    rotated = torch.mm(grid.view(-1, block), hadamard(block)).view(x.shape)
    rotated_peak = rotated.abs().amax(1, True).clamp_min_(1.0)
    codes = rotated.mul_(rotated_peak.reciprocal().mul_(_MAX_CODE)).round_()
    return codes, rotated_peak.mul_(peak)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    codes, factor = quantise_rows(x, weight.block)
    return weight.kernel.matmul(codes, weight.packed).mul_(factor)


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
