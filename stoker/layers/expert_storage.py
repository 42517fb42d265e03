"""How a checkpoint stores the experts of a layer in one tensor, in place of tensors for each expert (quant.py).

gate_up [experts, hidden, 2 * width]   down [experts, width, hidden]: each expert's matrix is transposed
MXFP4: blocks [experts, outs, ins / 32, 16] of two 4-bit numbers per byte, scales [experts, outs, ins / 32]

The outputs of gate_up may alternate between gate and up. The kernels take all of gate, then all of up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.quant import fp8_weight
from stoker.layers.quant import Int8Packing, Ready, StoredTensor, has_kernels

_BLOCK = 32  # inputs that share a scale in MXFP4
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; those from 8 on are negative
_BIAS = 127  # of a scale, which is a power of two
_ROOM = 6  # binary digits between the largest value of MXFP4 and that of float8


def _split_gate_up(rows: Tensor) -> Tensor:
    """[outs, ins], gate and up in turn -> all of gate, then all of up"""
    return rows.view(-1, 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The matrices of all experts in the model's dtype, transposed. `alternates`: gate and up do."""

    num_experts: int
    alternates: bool = False
    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "bf16"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((self.num_experts, num_ins, num_outs // self.num_experts))}

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        weight = tensors["weight"]
        if not weight.is_meta:
            for expert in weight:  # in place: only one expert is in memory twice
                rows = expert.t().contiguous()
                expert.view(rows.shape).copy_(_split_gate_up(rows) if self.alternates else rows)
        return weight.view(-1, num_ins)


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """The matrices of all experts in MXFP4. `alternates`: gate and up do.

    There are no MXFP4 kernels. With bfloat16 on Hopper the weights become float8 with one scale per output, which the
    kernels of experts read: the values stay the same while the scales of one output differ by at most 2**14, and smaller
    ones are rounded. Elsewhere they are dequantised.
    """

    num_experts: int
    alternates: bool = False
    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "fp8"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        shape = (self.num_experts, num_outs // self.num_experts, num_ins // _BLOCK)
        return {"blocks": StoredTensor((*shape, _BLOCK // 2), torch.uint8), "scales": StoredTensor(shape, torch.uint8)}

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        blocks, scales = tensors["blocks"], tensors["scales"]
        num_outs, as_float8 = sum(parts), has_kernels(blocks, dtype)
        weight = blocks.new_empty(num_outs, num_ins, dtype=torch.float8_e4m3fn if as_float8 else dtype)
        factors = blocks.new_empty(num_outs, 1, dtype=torch.float32)
        if not blocks.is_meta:
            each = num_outs // self.num_experts
            for expert, first in enumerate(range(0, num_outs, each)):
                exponents = scales[expert].int() - _BIAS
                largest = exponents.amax(1, keepdim=True) - _ROOM
                rows = _unpack(blocks[expert], exponents - largest if as_float8 else exponents)
                factor = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest)
                if self.alternates:
                    rows, factor = _split_gate_up(rows), _split_gate_up(factor)
                weight[first : first + each] = rows
                factors[first : first + each] = factor
        return fp8_weight(weight, factors, 1, num_ins) if as_float8 else weight


def _unpack(blocks: Tensor, exponents: Tensor) -> Tensor:
    """[outs, groups, 16] of uint8, [outs, groups]  ->  [outs, groups * 32] of float32"""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).int()
    return torch.ldexp(values[codes], exponents[..., None]).flatten(1)
