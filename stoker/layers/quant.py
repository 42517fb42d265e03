"""How the weight of a matmul is stored: which tensors a checkpoint has for it, and what the kernels get after loading.
A matmul may be made of several parts (q, k and v), whose tensors are stacked.

The kernels for quantised weights of checkpoints in safetensors need Hopper and bfloat16. Elsewhere such a weight is
dequantised once, after loading: the results are the same, and it takes the memory of a plain model. The weights of GGUF
files are requantised for the 8-bit kernels of a CPU (cpu_int8.py), or dequantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Protocol

import torch
from torch import Tensor, nn

from stoker.base.errors import ModelFilesError
from stoker.kernels.cpu_int8 import Int8Kernel as Int8Kernel
from stoker.kernels.cpu_int8 import Int8Weight, rotate_outputs
from stoker.kernels.dispatch import overlaps
from stoker.kernels.quant import WORD_CODES, QuantWeight, dequantise, fp8_weight, int4_weight, unpack_int4

Ready = Tensor | QuantWeight | Int8Weight


@dataclass(frozen=True, slots=True)
class Int8Packing:
    """How a weight is requantised for the 8-bit kernels of a CPU."""

    kernel: Int8Kernel
    # Outputs that are rotated together, for each part of the matmul, 1: not rotated. The matmul that takes them as its
    # inputs need not rotate them then.
    out_blocks: tuple[int, ...]
    rotated_block: int | None = None  # inputs that were rotated together; None: this matmul rotates its inputs


_SLICE_BYTES = 16 << 20  # dequantised values that are held at a time


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape and dtype of a tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the model's dtype


class Stored(Protocol):
    """The storage format of a weight."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of tensors that a checkpoint may have besides, and that are not needed here."""

    def kind(self, num_ins: int) -> str:
        """Return the kind of the kernels' weight, as tiles are chosen by it (kernels/tile_profiles.py)."""

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        """Return the tensors of one part, by the checkpoint's names."""

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        """Return the weight for the kernels. `tensors` are those of all parts, stacked; `parts` has the outputs of
        each. The tensors are consumed. `int8` is for weights that may be requantised to 8 bits."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A weight in the model's dtype."""

    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "bf16"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        return {"weight": StoredTensor((num_outs, num_ins))}

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        return tensors["weight"]


PLAIN = Plain()

StoredAs = Callable[[str], Stored]
"""Returns how the weight of a matmul is stored, by the matmul's name in the model."""


def all_plain(matmul: str) -> Stored:
    """The StoredAs of a model without quantised weights."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class Fp8:
    """8-bit floating-point values. A scale covers `row_block` outputs and `col_block` inputs; None means all of a part."""

    row_block: int | None
    col_block: int | None
    scale: str  # name of the scale tensor
    quantises_inputs: bool  # the input of the matmul may be quantised to 8 bits too
    unused: tuple[str, ...] = ("input_scale",)

    def kind(self, num_ins: int) -> str:
        return "fp8" if self.col_block is None or self.col_block >= num_ins else "blocks"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        rows, cols = _blocks(num_outs, self.row_block), _blocks(num_ins, self.col_block)
        shape = (1,) if self.row_block is self.col_block is None else (rows, cols)
        return {
            "weight": StoredTensor((num_outs, num_ins), torch.float8_e4m3fn),
            self.scale: StoredTensor(shape, torch.float32),
        }

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        codes, scale = tensors["weight"], tensors[self.scale]
        scale = scale.view(len(scale), -1)
        row_block = self.row_block
        if row_block is None or any(part % row_block for part in parts[:-1]):
            # Blocks start at the beginning of each part, not at a multiple of their size, so each output gets its own
            # scale.
            counts = [_blocks(part, row_block) for part in parts]
            scale = torch.cat(
                [
                    block.repeat_interleave(row_block or part, 0)[:part]
                    for block, part in zip(scale.split(counts), parts, strict=True)
                ]
            )
            row_block = 1
        weight = fp8_weight(codes, scale, row_block, self.col_block or num_ins, self.quantises_inputs)
        return weight if has_kernels(codes, dtype) else dequantise(weight, dtype)


@dataclass(frozen=True, slots=True)
class Int4:
    """4-bit integers, eight in a word. `group` inputs share a scale."""

    group: int
    unused: tuple[str, ...] = ("weight_shape",)

    def kind(self, num_ins: int) -> str:
        return "int4"

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        return {
            "weight_packed": StoredTensor((num_outs, num_ins // WORD_CODES), torch.int32),
            "weight_scale": StoredTensor((num_outs, num_ins // self.group)),
        }

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        words, scale = tensors["weight_packed"], tensors["weight_scale"]
        if has_kernels(words, dtype):
            return int4_weight(words, scale)
        return unpack_int4(words, scale, dtype)


@dataclass(frozen=True, slots=True)
class Grouped:
    """8-bit codes, as converted GGUF files have them. `group` inputs share a scale and a minimum: the weight is code *
    scale + minimum."""

    group: int
    unused: tuple[str, ...] = ()

    def kind(self, num_ins: int) -> str:
        return "bf16"  # on a GPU it is dequantised

    def tensors(self, num_outs: int, num_ins: int) -> dict[str, StoredTensor]:
        groups = StoredTensor((num_outs, num_ins // self.group), torch.float16)
        return {
            "weight": StoredTensor((num_outs, num_ins), torch.int8),
            "weight_scale": groups,
            "weight_min": groups,
        }

    def ready(
        self,
        tensors: Mapping[str, Tensor],
        parts: Sequence[int],
        num_ins: int,
        dtype: torch.dtype,
        int8: Int8Packing | None,
    ) -> Ready:
        columns = [tensors[name] for name in self.tensors(1, num_ins)]
        if int8 is not None:
            slices = _rotated_slices(columns, num_ins, parts, int8.out_blocks)
            return Int8Weight.of_rows(slices, int8.kernel, int8.rotated_block)
        weight = columns[0].new_empty(columns[0].shape, dtype=dtype)
        first = 0
        for rows in _slices(columns, num_ins):
            weight[first : first + len(rows)] = rows
            first += len(rows)
        return weight


def dequantise_grouped(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[rows, in] int8, [rows, groups], [rows, groups] -> [rows, in] float32"""
    groups = codes.float().view(*scale.shape, -1)
    return groups.mul_(scale.float()[..., None]).add_(minimum.float()[..., None]).view(codes.shape)


def _slices(columns: Sequence[Tensor], num_ins: int, block: int = 1) -> Iterator[Tensor]:
    """Dequantise some rows at a time, in multiples of `block`: float32 takes four times the memory of the codes."""
    num_rows = max(1, _SLICE_BYTES // (4 * num_ins * block)) * block
    for parts in zip(*(column.split(num_rows) for column in columns), strict=True):
        yield dequantise_grouped(*parts)


def _rotated_slices(
    columns: Sequence[Tensor], num_ins: int, parts: Sequence[int], blocks: Sequence[int]
) -> Iterator[Tensor]:
    """Like `_slices`, with the outputs of each part rotated in blocks."""
    first = 0
    for part, block in zip(parts, blocks, strict=True):
        rows = [column[first : first + part] for column in columns]
        first += part
        for weight in _slices(rows, num_ins, block):
            yield weight if block == 1 else rotate_outputs(weight, block)


def stacked(stored: Stored, parts: Sequence[int], num_ins: int) -> dict[str, StoredTensor]:
    """Return the tensors of all parts, stacked."""
    by_size = {part: stored.tensors(part, num_ins) for part in set(parts)}
    return {
        name: StoredTensor((sum(by_size[part][name].shape[0] for part in parts), *tensor.shape[1:]), tensor.dtype)
        for name, tensor in by_size[parts[0]].items()
    }


class StoredWeight(nn.Module):
    """The parameters of a weight, under the checkpoint's names. `parts` has the outputs of each projection that is
    fused here."""

    def __init__(self, in_features: int, parts: Sequence[int], stored: Stored) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.in_features, self.out_features = in_features, sum(self._parts)
        self._stored, self._dtype = stored, torch.get_default_dtype()
        for name, tensor in stacked(stored, self._parts, in_features).items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self._names = list(self._parameters)

    @property
    def kind(self) -> str:
        """How the kernels' weight is stored, on a GPU that has kernels for it."""
        return self._stored.kind(self.in_features)

    def ready(self, int8: Int8Packing | None = None) -> Ready:
        """Convert the parameters to what the kernels need, once after loading. The result replaces the parameters, so
        that the weight is in memory once and is still counted as a parameter."""
        parameters = [self.get_parameter(name) for name in self._names]
        tensors = {name: parameter.data for name, parameter in zip(self._names, parameters, strict=True)}
        weight = self._stored.ready(tensors, self._parts, self.in_features, self._dtype, int8)
        kept = _kept(weight)
        for parameter, tensor in zip(parameters, chain(kept, repeat(torch.empty(0))), strict=False):
            parameter.data = tensor
        return weight

    def reorder_rows(self, rows: Sequence[int]) -> None:
        """Reorder the first outputs, before `ready`: output i becomes what `rows[i]` was. Scales that several outputs
        share stay where they are. Raises ModelFilesError if an output would get another scale."""
        index = torch.tensor(rows)
        for name in self._names:
            values = self.get_parameter(name).data
            if values.is_meta:
                continue
            if len(values) == self.out_features:
                moved = (
                    values.view(torch.uint8) if values.itemsize == 1 else values
                )  # torch cannot index every 8-bit dtype
                moved[: len(rows)] = moved[index.to(values.device)]
            elif not torch.equal((scale := self._scale_of_rows())[index], scale[: len(rows)]):
                raise ModelFilesError(
                    f"{name}: {len(values)} scales for {self.out_features} outputs, and the order in which heads are rotated "
                    "moves outputs from one scale to another; use a checkpoint with one scale per output"
                )

    def _scale_of_rows(self) -> Tensor:
        """Return the number of each output's scale, if outputs share scales."""
        block = getattr(self._stored, "row_block", None)
        found, first = [], 0
        for part in self._parts:
            found.append(first + torch.arange(part) // (block or part))
            first += _blocks(part, block)
        return torch.cat(found)

    def drop(self) -> None:
        """Drop the parameters; the kernels have their own copy."""
        for name in self._names:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.new_empty(0)


def _kept(weight: Ready) -> list[Tensor]:
    """Return the tensors of a weight that stay parameters. Int8Weight is opaque."""
    if isinstance(weight, QuantWeight):
        return [weight.codes, weight.scale]
    return [weight] if isinstance(weight, Tensor) else []


def _blocks(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)


def has_kernels(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the device of x has kernels for quantised weights of a model with this dtype."""
    return overlaps(x) and dtype == torch.bfloat16
