"""Which numbers of rows the matrix library is called with, for libraries that treat rows in different ways."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from stoker.kernels.cpu_rows import Matmul, RowCalls, matmul_by_rows, row_calls

OUTS, INS = 5, 33


def library(treat: Callable[[int, int], bool]) -> Callable[[Tensor], Matmul]:
    """Return a matrix library that adds up in the opposite order where `treat(place, count)` is true, for a row at this place
    of a call with `count` rows."""

    def pack(weight: Tensor) -> Matmul:
        def matmul(x: Tensor) -> Tensor:
            terms = (x[:, None, :] * weight).unbind(2)
            other = torch.tensor([treat(place, len(x)) for place in range(len(x))])[:, None]
            return torch.where(other, reduce(torch.add, reversed(terms)), reduce(torch.add, terms))

        return matmul

    return pack


CASES = {
    "all rows alike": (lambda place, count: False, RowCalls(4, 48, 480)),
    "by the place in every call": (lambda place, count: place % 8 == 5, RowCalls(4, 4, 4)),
    "by the place, from the second row on": (lambda place, count: place == 1, RowCalls(1, 1, 1)),
    "by the number of rows": (lambda place, count: count > 16, RowCalls(48, 48, 480)),
    "a large call only": (lambda place, count: count == 480, RowCalls(4, 48, 192)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_same_bits_in_every_call(case: str) -> None:
    treat, _ = CASES[case]
    pack = library(treat)
    calls = row_calls(OUTS, INS, torch.float32, pack, 1)
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(OUTS, INS, generator=generator), torch.randn(600, INS, generator=generator)
    matmul = pack(weight)
    expected = matmul_by_rows(x, matmul, calls)
    for count in (1, 3, 4, 5, 17, 100, 500):
        first = 600 - count
        assert torch.equal(matmul_by_rows(x[first:].clone(), matmul, calls), expected[first:]), f"{count} rows, {calls}"


@pytest.mark.parametrize("case", CASES)
def test_the_largest_calls_that_treat_all_rows_alike_are_used(case: str) -> None:
    treat, expected = CASES[case]
    assert row_calls(OUTS, INS, torch.float32, library(treat), 1) == expected
