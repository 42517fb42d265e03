"""How the weight of a product is stored: which tensors a checkpoint has for it, and what the kernels are given when these are
loaded. A product may be made of several parts (q, k and v), whose tensors stand one below the other.

Kernels for quantised weights are Hopper's and take bfloat16. Elsewhere such a weight is made plain once, when it is loaded:
the answers are the same, the memory is that of a plain model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stoker.kernels.dispatch import overlaps
from stoker.kernels.linear import Weight, pack_weight
from stoker.kernels.quant import WORD_CODES, dequantise, fp8_weight, int4_weight, unpack_int4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the model's own


class Stored(Protocol):
    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors that a checkpoint may have beside the others, and that are not needed here."""

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        """Of one part, by the checkpoint's names."""

    def ready(self, tensors: Mapping[str, Tensor], parts: Sequence[int], num_ins: int, dtype: torch.dtype) -> Weight:
        """`tensors`: those of all parts, of `parts` outputs each, one below the other."""


@dataclass(frozen=True, slots=True)
class Plain:
    unused: tuple[str, ...] = ()

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((num_outs, num_ins))}

    def ready(self, tensors: Mapping[str, Tensor], parts: Sequence[int], num_ins: int, dtype: torch.dtype) -> Weight:
        return pack_weight(tensors["weight"])


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class Fp8:
    """Numbers of 8 bits. A scale covers `row_block` outputs and `col_block` inputs; None: all of a part's."""

    row_block: int | None
    col_block: int | None
    scale: str  # the tensor's name
    quantises_inputs: bool  # what the product is given may be brought to 8 bits too
    unused: tuple[str, ...] = ("input_scale",)

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        rows, cols = _blocks(num_outs, self.row_block), _blocks(num_ins, self.col_block)
        shape = (1,) if self.row_block is self.col_block is None else (rows, cols)
        return {
            "weight": StoredTensor((num_outs, num_ins), torch.float8_e4m3fn),
            self.scale: StoredTensor(shape, torch.float32),
        }

    def ready(self, tensors: Mapping[str, Tensor], parts: Sequence[int], num_ins: int, dtype: torch.dtype) -> Weight:
        codes, scale = tensors["weight"], tensors[self.scale]
        scale = scale.view(len(scale), -1)
        row_block = self.row_block
        if row_block is None or any(part % row_block for part in parts[:-1]):
            # Blocks that begin anew with each part, not at a multiple of their size: each output gets its own.
            counts = [_blocks(part, row_block) for part in parts]
            scale = torch.cat(
                [
                    block.repeat_interleave(row_block or part, 0)[:part]
                    for block, part in zip(scale.split(counts), parts, strict=True)
                ]
            )
            row_block = 1
        weight = fp8_weight(codes, scale, row_block, self.col_block or num_ins, self.quantises_inputs)
        return weight if _has_kernels(codes, dtype) else pack_weight(dequantise(weight, dtype))


@dataclass(frozen=True, slots=True)
class Int4:
    """Whole numbers of 4 bits, eight in a word; `group` inputs share a scale."""

    group: int
    unused: tuple[str, ...] = ("weight_shape",)

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        return {
            "weight_packed": StoredTensor((num_outs, num_ins // WORD_CODES), torch.int32),
            "weight_scale": StoredTensor((num_outs, num_ins // self.group)),
        }

    def ready(self, tensors: Mapping[str, Tensor], parts: Sequence[int], num_ins: int, dtype: torch.dtype) -> Weight:
        words, scale = tensors["weight_packed"], tensors["weight_scale"]
        if _has_kernels(words, dtype):
            return int4_weight(words, scale)
        return pack_weight(unpack_int4(words, scale, dtype))


def stacked(stored: Stored, parts: Sequence[int], num_ins: int) -> dict[str, StoredTensor]:
    """The tensors of all parts, one below the other."""
    of_parts = [stored.tensors(part, num_ins) for part in parts]
    return {
        name: StoredTensor((sum(part[name].shape[0] for part in of_parts), *tensor.shape[1:]), tensor.dtype)
        for name, tensor in of_parts[0].items()
    }


def _blocks(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)


def _has_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    return overlaps(x) and dtype == torch.bfloat16
