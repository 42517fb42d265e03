"""Matmuls on a CPU in which a row's bits do not depend on the number of rows: y = x W^T.

The matrix library chooses its kernels by the number of rows, and they add up in different orders. It treats all rows
alike if their number is a multiple of its tile, so the rows are padded to a multiple. Which multiple suffices depends on
the CPU and the weight's shape. It is tried out once per shape; where none suffices, the rows are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Matmul = Callable[[Tensor], Tensor]

_STEPS = (4, 8, 16, 48)
_ROW_BY_ROW = 1
_TRIED_ROWS = (1, 2, 3, 5, 8, 14, 16, 17, 31, 50)
_MAX_OUTS = 4096  # of a larger weight, a part is tried out: the order of additions runs over the inputs


def matmul_by_rows(x: Tensor, matmul: Matmul, step: int) -> Tensor:
    """Return `matmul(x)`, called with a multiple of `step` rows, or with each row alone."""
    num_rows = len(x)
    if step == _ROW_BY_ROW:
        # Copies, because a row inside of x may be aligned differently.
        return torch.cat([matmul(row.clone()) for row in x.split(1)])
    missing = -num_rows % step
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    return matmul(padded)[:num_rows]


@cache
def row_step(num_outs: int, num_ins: int, dtype: torch.dtype, pack: Callable[[Tensor], Matmul]) -> int:
    """Return the step for a weight [num_outs, num_ins]. `pack` returns the matmul with a weight."""
    weight = _numbers(min(num_outs, _MAX_OUTS), num_ins, dtype)
    matmul, x = pack(weight), _numbers(max(_TRIED_ROWS), num_ins, dtype)
    threads = torch.get_num_threads()
    try:
        return next((step for step in _STEPS if _is_independent(matmul, x, step, threads)), _ROW_BY_ROW)
    finally:
        torch.set_num_threads(threads)


def plain_matmul(weight: Tensor) -> Matmul:
    return lambda x: torch.nn.functional.linear(x, weight)


def exact_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for an unpacked weight."""
    return matmul_by_rows(x, plain_matmul(weight), row_step(*weight.shape, weight.dtype, plain_matmul))


def _is_independent(matmul: Matmul, x: Tensor, step: int, max_threads: int) -> bool:
    """Return True if parts of x give the same bits as all of x, with one thread and with many."""
    torch.set_num_threads(1)
    expected = matmul_by_rows(x, matmul, step)
    for threads in {1, max_threads}:
        torch.set_num_threads(threads)
        for count in _TRIED_ROWS:
            for first in {0, 1, len(x) - count}:
                rows = x[first : first + count].clone()
                if not torch.equal(matmul_by_rows(rows, matmul, step), expected[first : first + count]):
                    return False
    return True


def _numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of either sign without a random generator."""
    return torch.arange(rows * columns, dtype=torch.float64).mul_(12.9898).sin_().view(rows, columns).to(dtype)
