"""8-bit matmuls on a CPU: the kernels agree with their reference bit for bit, and a row never depends on other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels.cpu_int8 import (
    KERNELS,
    Int8Kernel,
    Int8Weight,
    ReferenceKernel,
    hadamard,
    int8_linear,
    is_exact,
    quantise_rows,
)

SHAPES = [(1, 32), (7, 96), (33, 64), (576, 1536), (960, 576), (130, 4096)]  # outputs, inputs
MAX_ROWS = 64
SEED = 18


@pytest.fixture(params=sorted(KERNELS))
def kernel(request: pytest.FixtureRequest) -> Int8Kernel:
    found = KERNELS[request.param]
    if not is_exact(found):
        pytest.skip(f"{found.name} is not exact on this CPU")
    return found


def inputs(num_rows: int, num_ins: int, generator: torch.Generator) -> Tensor:
    """Rows of very different sizes, with outliers, a row of zeros and one of tiny numbers."""
    x = torch.randn(num_rows, num_ins, generator=generator)
    x *= torch.rand(num_rows, 1, generator=generator).mul_(20).sub_(10).exp()
    x[:, 3] *= 80
    x[num_rows // 2] = 0
    x[num_rows // 3] *= 1e-34
    return x


def test_at_least_one_kernel_is_exact_on_a_cpu_with_vnni() -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("needs AVX-512")
    assert any(is_exact(kernel) for kernel in KERNELS.values())


@pytest.mark.parametrize(("num_outs", "num_ins"), SHAPES)
def test_a_kernel_gives_the_bits_of_its_reference_for_every_batch(
    kernel: Int8Kernel, num_outs: int, num_ins: int
) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(num_outs, num_ins, generator=generator) * 0.02
    x = inputs(MAX_ROWS, num_ins, generator)
    ready = Int8Weight.of_rows(weight.split(50), kernel)
    expected = int8_linear(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    assert torch.isfinite(expected).all()
    for num_rows in range(1, MAX_ROWS + 1):
        first = int(torch.randint(0, MAX_ROWS - num_rows + 1, (1,), generator=generator))
        found = int8_linear(x[first : first + num_rows].clone(), ready)
        assert torch.equal(found, expected[first : first + num_rows]), f"{num_rows} rows from {first}"


def test_rows_that_are_not_numbers_do_not_touch_others(kernel: Int8Kernel) -> None:
    generator = torch.Generator().manual_seed(SEED)
    ready = Int8Weight.of_rows([torch.randn(40, 64, generator=generator)], kernel)
    x = inputs(5, 64, generator)
    expected = int8_linear(x, ready)
    x[1, 7], x[3, 9] = float("nan"), float("inf")
    found = int8_linear(x, ready)
    assert torch.equal(found[::2], expected[::2])
    assert not torch.isfinite(found[1::2]).any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_does_not_change_a_bit(kernel: Int8Kernel, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight, x = torch.randn(960, 576, generator=generator), inputs(40, 576, generator)
    expected = int8_linear(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(int8_linear(x, Int8Weight.of_rows([weight], kernel)), expected)
    finally:
        torch.set_num_threads(before)


def test_the_result_is_close_to_float64_also_with_outliers() -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight, x = torch.randn(200, 576, generator=generator), torch.randn(16, 576, generator=generator)
    x[:, 5] *= 50
    exact = x.double() @ weight.double().t()
    found = int8_linear(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("block", [32, 64])
def test_the_rotation_is_exact(block: int) -> None:
    """The grid's sums stay below 2^24, so that every order of additions gives the same float32."""
    x = torch.ones(3, 2 * block) * hadamard(block)[5].repeat(2)
    codes, factor = quantise_rows(x, block)
    assert float(factor[0] / block) == 131072.0  # all energy is in one rotated input, and exactly block times the grid
    assert codes.abs().sum(1).tolist() == [2 * 127.0] * 3
