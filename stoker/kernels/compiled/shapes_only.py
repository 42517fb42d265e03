"""Results of torch's operations on meta tensors, as far as the models need them.

torch has them too. But it imports its compiler for some of them, which takes a second of every start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _mm(x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    return x.new_empty(len(x), other.shape[1]) if out is None else out


def _addmm(total: Tensor, x: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.empty_like(total) if out is None else out


def _scaled_mm(x: Tensor, other: Tensor, *, out_dtype: torch.dtype, **options: Any) -> Tensor:
    return x.new_empty(len(x), other.shape[1], dtype=out_dtype)


def _embedding(ids: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return parts[0].new_empty(shape)


def _getitem(x: Tensor, index: Any) -> Tensor:
    if isinstance(index, Tensor):
        return x.new_empty(*index.shape, *x.shape[1:])
    return Tensor.__getitem__(x, index)


def _first(x: Tensor, *others: Any, **options: Any) -> Tensor:
    return x


_RESULTS: dict[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.mm: _mm,
    torch.addmm: _addmm,
    torch._scaled_mm: _scaled_mm,
    Tensor.__getitem__: _getitem,
    Tensor.add_: _first,
    Tensor.addmm_: _first,
    Tensor.index_copy_: _first,
    torch.cat: _cat,
}


class ShapesOnly(TorchFunctionMode):
    """While it is active, these operations compute nothing but the shape and the dtype of their result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _RESULTS.get(func, func)(*args, **(kwargs or {}))
