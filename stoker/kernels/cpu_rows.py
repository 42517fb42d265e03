"""Matmuls on a CPU in which a row's bits do not depend on the number of rows: y = x W^T.

The matrix library chooses its kernels by the number of rows, and they add up in different orders. For some numbers it
treats all rows alike. So the library is called with a few numbers of rows only: one large number, and the multiples of a
tile up to a limit. Many rows are split, and the last call is padded. Which numbers suffice depends on the CPU, the weight's
shape and the number of threads. Every number that is used is tried out once per shape; where none suffices, the rows are
multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Matmul = Callable[[Tensor], Tensor]

_MOST_ROWS = 48
_LARGE = (480, 192)
_MAX_OUTS = 4096  # of a larger weight, a part is tried out: the order of additions runs over the inputs
_TRIED = 11  # rows that take turns in the places of a call
_LEAST_NUMBERS = 96  # results to compare in each place, since two orders of additions may give the same bits by chance


class RowCalls(NamedTuple):
    """The numbers of rows that the matrix library is called with: multiples of `step` up to `most`, and `large`."""

    step: int
    most: int
    large: int

    def next_count(self, num_rows: int) -> int:
        """Return how many of these rows the next call has."""
        return self.large if num_rows >= self.large else min(num_rows, self.most)


_ROW_BY_ROW = RowCalls(1, 1, 1)
# The ranges first, since larger calls take less time for a row.
_SMALL = (*((step, _MOST_ROWS) for step in (4, 8, 16, 48)), (16, 16), (8, 8), (4, 4))


def matmul_by_rows(x: Tensor, matmul: Matmul, calls: RowCalls) -> Tensor:
    """Return `matmul(x)`, called with the numbers of rows that `calls` allows."""
    num_rows = len(x)
    if calls.next_count(num_rows) == num_rows:
        missing = -num_rows % calls.step
        return matmul(torch.nn.functional.pad(x, (0, 0, 0, missing)))[:num_rows] if missing else matmul(x)
    parts, first = [], 0
    while first < num_rows:
        count = calls.next_count(num_rows - first)
        # A copy, because rows inside of x may be aligned differently.
        parts.append(matmul_by_rows(x[first : first + count].clone(), matmul, calls))
        first += count
    return torch.cat(parts)


@cache
def row_calls(
    num_outs: int, num_ins: int, dtype: torch.dtype, pack: Callable[[Tensor], Matmul], num_threads: int
) -> RowCalls:
    """Return the calls for a weight [num_outs, num_ins]. `pack` returns the matmul with a weight."""
    trial = _RowTrial(pack(_numbers(min(num_outs, _MAX_OUTS), num_ins, dtype)), _numbers(_TRIED, num_ins, dtype))
    before = torch.get_num_threads()
    try:
        for step, most in _SMALL:
            torch.set_num_threads(1)
            expected = trial.first_rows(step)
            if all(trial.agrees(expected, count, num_threads) for count in range(step, most + 1, step)):
                large = (count for count in _LARGE if trial.agrees(expected, count, num_threads))
                return RowCalls(step, most, next(large, most))
        return _ROW_BY_ROW
    finally:
        torch.set_num_threads(before)


def calls_of(weight: Tensor, pack: Callable[[Tensor], Matmul]) -> RowCalls:
    """Return the calls for a weight, with the number of threads that torch uses now."""
    return row_calls(*weight.shape, weight.dtype, pack, torch.get_num_threads())


def plain_matmul(weight: Tensor) -> Matmul:
    return lambda x: torch.nn.functional.linear(x, weight)


def exact_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T for an unpacked weight."""
    return matmul_by_rows(x, plain_matmul(weight), calls_of(weight, plain_matmul))


class _RowTrial:
    """Some rows, and the matmul whose results for them are compared between calls."""

    def __init__(self, matmul: Matmul, rows: Tensor) -> None:
        self._matmul = matmul
        self._rows = rows

    def first_rows(self, count: int) -> Tensor:
        """Return each row's result as the first one in a call of `count` rows."""
        return torch.stack([self._result(first, count)[0] for first in range(_TRIED)])

    def agrees(self, expected: Tensor, count: int, num_threads: int) -> bool:
        """Return True if a call of `count` rows gives the expected bits in every place, with one thread and with all."""
        shifts = max(3, -(-_LEAST_NUMBERS // expected.shape[1]))
        for threads in {1, num_threads}:
            torch.set_num_threads(threads)
            for first in range(min(shifts, _TRIED)):
                if not torch.equal(self._result(first, count), expected[self._places(first, count)]):
                    return False
        return True

    def _result(self, first: int, count: int) -> Tensor:
        return self._matmul(self._rows[self._places(first, count)])

    def _places(self, first: int, count: int) -> Tensor:
        """Return which rows are in a call: all in turn, from `first` on."""
        return (torch.arange(count) + first) % _TRIED


def _numbers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of either sign without a random generator."""
    return torch.arange(rows * columns, dtype=torch.float64).mul_(12.9898).sin_().view(rows, columns).to(dtype)
