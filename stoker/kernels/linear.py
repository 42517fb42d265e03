"""Matmul with a weight: y = x W^T.  x [tokens, in]   weight [out, in]   ->  [tokens, out]

On a CPU, the weight is packed once at load time into the layout of the matrix library. With few rows of x,
packing it in every call costs more than the matmul (140 ms instead of 70 ms for all matmuls of a 135M model at 8 rows).
Weights of GGUF files stay in 8 bits there (cpu_int8.py).
On a GPU, few rows go through skinny.py, which fuses the norm or the addition; many rows go through cuBLAS. 8-bit and
4-bit weights (quant.py) have their own two paths, quant_skinny.py and quant_many.py. With numerics=exact, all numbers of
rows go through exact_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from stoker.kernels.activation import silu_mul
from stoker.kernels.cpu_int8 import Int8Weight, NormGrid, int8_linear, int8_norm_linear
from stoker.kernels.cpu_rows import Matmul, RowCalls, calls_of, matmul_by_rows, plain_matmul
from stoker.kernels.dispatch import overlaps, use_triton
from stoker.kernels.exact_rows import ExactWeight, exact_linear
from stoker.kernels.norm import rms_norm
from stoker.kernels.quant import QuantWeight
from stoker.kernels.quant_many import many_rows_linear
from stoker.kernels.quant_skinny import quant_rows_linear
from stoker.kernels.skinny import KIND, MAX_ROWS, few_rows_linear, one_row_linear
from stoker.kernels.tile_choice import is_library_faster

# The row count that the packed layout is tuned for. It is a hint: results are the same for any number of rows, and this
# value was the best, or close to it, from 2 to 256 rows.
_PACK_ROWS = 128


@dataclass(frozen=True)
class Norm:
    """The norm that is applied to the input of a matmul."""

    weight: Tensor
    eps: float

    @cached_property
    def grid(self) -> NormGrid:
        """The grid of the 8-bit matmuls on a CPU."""
        return NormGrid.of(self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """MKL's own copy of a weight. `shape` is a tensor of the weight's shape without its memory."""

    packed: Tensor
    shape: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        return cls(packed, weight.new_empty(1, 1).expand(weight.shape))


@dataclass(frozen=True, slots=True)
class CpuRowsWeight:
    """A weight on a CPU whose matmul gives a row the same bits with any number of rows (cpu_rows.py)."""

    weight: Tensor | PackedWeight
    calls: RowCalls

    @classmethod
    def of(cls, weight: Tensor) -> CpuRowsWeight:
        if _has_mkl(weight):
            return cls(PackedWeight.of(weight), calls_of(weight, _packed_matmul))
        return cls(weight, calls_of(weight, plain_matmul))


Weight = Tensor | PackedWeight | CpuRowsWeight | Int8Weight | QuantWeight | ExactWeight


def pack_weight(weight: Tensor | QuantWeight | Int8Weight, exact: bool = False) -> Weight:
    """Return what `linear` takes: the weight itself, or a packed copy that replaces it. `exact`: a row's result must not
    depend on the number of rows. That of 8-bit weights on a CPU never does."""
    if isinstance(weight, Int8Weight):
        return weight
    if isinstance(weight, QuantWeight):
        return ExactWeight.of(weight) if exact else weight
    if exact and weight.device.type == "cpu":
        return CpuRowsWeight.of(weight)
    if exact and use_triton(weight):
        return ExactWeight.of(weight)
    return PackedWeight.of(weight) if _has_mkl(weight) else weight


def _has_mkl(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkl.is_available()


def _packed_matmul(weight: Tensor) -> Matmul:
    packed = PackedWeight.of(weight)
    return lambda x: linear(x, packed)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, PackedWeight):
        return torch.ops.mkl._mkl_linear(x, weight.packed, weight.shape, bias, len(x))
    if isinstance(weight, CpuRowsWeight):
        out = matmul_by_rows(x, lambda rows: linear(rows, weight.weight), weight.calls)
        return out if bias is None else out.add_(bias)
    if isinstance(weight, ExactWeight):
        out = exact_linear(x, weight)
        return out if bias is None else out.add_(bias)
    if isinstance(weight, Int8Weight):
        out, factor = int8_linear(x, weight)
        out.mul_(factor)
        return out if bias is None else out.add_(bias)
    if isinstance(weight, QuantWeight):
        out = (quant_rows_linear if weight.is_few(len(x)) else many_rows_linear)(x, weight)
        return out if bias is None else out.add_(bias)
    return torch.nn.functional.linear(x, weight, bias)


def norm_linear(x: Tensor, norm: Norm, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return the matmul of norm(x)."""
    if _is_skinny(weight, x, bias):
        if len(x) == 1:
            return one_row_linear(x, weight, norm=norm.weight, eps=norm.eps)
        return few_rows_linear(rms_norm(x, norm.weight, norm.eps), weight)
    if isinstance(weight, Int8Weight):
        out = int8_norm_linear(x, norm.grid, weight)
        return out if bias is None else out.add_(bias)
    return linear(rms_norm(x, norm.weight, norm.eps), weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return total + x W^T. The memory of `total` is reused."""
    if _is_skinny(weight, x, bias):
        return (one_row_linear if len(x) == 1 else few_rows_linear)(x, weight, add_to=total)
    if isinstance(weight, ExactWeight) and bias is None:
        return exact_linear(x, weight, add_to=total)
    if isinstance(weight, Int8Weight) and bias is None:
        return total.addcmul_(*int8_linear(x, weight))
    if isinstance(weight, QuantWeight) and bias is None:
        return (quant_rows_linear if weight.is_few(len(x)) else many_rows_linear)(x, weight, add_to=total)
    if isinstance(weight, Tensor) and weight.is_cuda and bias is None:
        return total.addmm_(x, weight.t())
    return total.add_(linear(x, weight, bias))


def add_gated_linear(total: Tensor, gate_up: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return total + x W^T, where x is gate_up's second half, gated by its first. The memory of `total` is reused."""
    if len(gate_up) == 1 and _is_skinny(weight, gate_up, bias):
        return one_row_linear(gate_up, weight, is_gated=True, add_to=total)
    return add_linear(total, silu_mul(gate_up), weight, bias)


def _is_skinny(weight: Weight, x: Tensor, bias: Tensor | None) -> TypeGuard[Tensor]:
    """Return True if the kernels for few rows apply and the library is not faster. Tiles of several rows need Hopper's
    shared memory."""
    num_rows, max_rows = len(x), MAX_ROWS if overlaps(x) else 1
    if not isinstance(weight, Tensor) or bias is not None or num_rows > max_rows or not use_triton(x):
        return False
    return not is_library_faster(KIND, num_rows, *weight.shape)
