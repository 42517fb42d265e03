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

from stoker.kernels.quant import float_values, int4_weight
from stoker.layers.quant import Int8Packing, Ready, StoredTensor, has_kernels

MXFP4_BLOCK = 32  # inputs that share a scale in MXFP4
_BIAS = 127  # of a scale, which is a power of two


def _split_gate_up(rows: Tensor) -> Tensor:
    """[outs, ins], gate and up in turn -> all of gate, then all of up"""
    return rows.view(-1, 2, rows.shape[1]).transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The matrices of all experts in the model's dtype, transposed. `alternates`: gate and up do.

    A rank's columns of gate and of up may not be neighbours. With `halves`, they are matrices of their own in the parameter,
    [2 * experts, hidden, width]: each expert's gate, then its up.
    """

    num_experts: int
    alternates: bool = False
    halves: bool = False
    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "bf16"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        count = 2 * self.num_experts if self.halves else self.num_experts
        return {"weight": StoredTensor((count, num_ins, num_outs // count))}

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

    With bfloat16 on Hopper, the kernels of 4-bit experts read the codes. Elsewhere the weights are dequantised.
    """

    num_experts: int
    alternates: bool = False
    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "int4"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        shape = (self.num_experts, num_outs // self.num_experts, num_ins // MXFP4_BLOCK)
        return {
            "blocks": StoredTensor((*shape, MXFP4_BLOCK // 2), torch.uint8),
            "scales": StoredTensor(shape, torch.uint8),
        }

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        blocks, scales = tensors["blocks"], tensors["scales"]
        if self.alternates and not blocks.is_meta:
            for expert, scale in zip(blocks, scales, strict=True):  # in place: only one expert is in memory twice
                expert.copy_(_split_gate_up(expert.flatten(1)).view(expert.shape))
                scale.copy_(_split_gate_up(scale))
        num_outs = sum(parts)
        words, stored = blocks.view(num_outs, -1).view(torch.int32), scales.view(num_outs, -1)
        if has_kernels(blocks, dtype):
            return int4_weight(words, _scale_values(stored), floats=True)
        weight = blocks.new_empty(num_outs, num_ins, dtype=dtype)
        if not blocks.is_meta:
            each = num_outs // self.num_experts
            for first in range(0, num_outs, each):
                rows = slice(first, first + each)
                weight[rows] = _unpack(blocks.view(num_outs, -1, MXFP4_BLOCK // 2)[rows], stored[rows].int() - _BIAS)
        return weight


def _scale_values(stored: Tensor) -> Tensor:
    """Return the powers of two whose exponents are stored."""
    values = torch.empty_like(stored, dtype=torch.float32)
    if values.is_meta:  # arithmetic on a meta tensor would import torch's compiler, which takes seconds
        return values
    return torch.ldexp(values.fill_(1.0), stored.int() - _BIAS)


def _unpack(blocks: Tensor, exponents: Tensor) -> Tensor:
    """[outs, groups, 16] of uint8, [outs, groups]  ->  [outs, groups * 32] of float32"""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).int()
    return torch.ldexp(float_values(blocks.device)[codes], exponents[..., None]).flatten(1)
