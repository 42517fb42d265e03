"""8-bit matmuls on a CPU: the kernels agree with their reference bit for bit, and a row never depends on other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels.cpu_int8 import (
    KERNELS,
    Int8Kernel,
    Int8Weight,
    NormGrid,
    ReferenceKernel,
    hadamard,
    int8_linear,
    int8_norm_linear,
    is_exact,
    rotate_outputs,
    rotation_share,
    to_grid,
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


def scaled(x: Tensor, weight: Int8Weight) -> Tensor:
    found, factor = int8_linear(x, weight)
    return found * factor


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
    expected = scaled(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    assert torch.isfinite(expected).all()
    for num_rows in range(1, MAX_ROWS + 1):
        first = int(torch.randint(0, MAX_ROWS - num_rows + 1, (1,), generator=generator))
        found = scaled(x[first : first + num_rows].clone(), ready)
        assert torch.equal(found, expected[first : first + num_rows]), f"{num_rows} rows from {first}"


def test_rows_that_are_not_numbers_do_not_touch_others(kernel: Int8Kernel) -> None:
    generator = torch.Generator().manual_seed(SEED)
    ready = Int8Weight.of_rows([torch.randn(40, 64, generator=generator)], kernel)
    x = inputs(5, 64, generator)
    expected = scaled(x, ready)
    x[1, 7], x[3, 9] = float("nan"), float("inf")
    found = scaled(x, ready)
    assert torch.equal(found[::2], expected[::2])
    assert not torch.isfinite(found[1::2]).any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_threads_does_not_change_a_bit(kernel: Int8Kernel, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight, x = torch.randn(960, 576, generator=generator), inputs(40, 576, generator)
    expected = scaled(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(scaled(x, Int8Weight.of_rows([weight], kernel)), expected)
    finally:
        torch.set_num_threads(before)


def test_the_result_is_close_to_float64_also_with_outliers() -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight, x = torch.randn(200, 576, generator=generator), torch.randn(16, 576, generator=generator)
    x[:, 5] *= 50
    exact = x.double() @ weight.double().t()
    found = scaled(x, Int8Weight.of_rows([weight], ReferenceKernel()))
    assert float((found - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("block", [32, 64])
def test_the_rotation_is_exact(block: int) -> None:
    """The grid's sums stay below 2^24, so that every order of additions gives the same float32."""
    x = torch.ones(3, 2 * block) * hadamard(block)[5].repeat(2)
    grid, unit = to_grid(x, rotation_share(block))
    rotated = grid.view(-1, block) @ hadamard(block)
    assert rotated.abs().max() == 2.0**23  # all energy is in one rotated input
    assert torch.equal(rotated, (grid.double().view(-1, block) @ hadamard(block).double()).float())
    assert torch.allclose(grid * unit, x)


def test_rows_on_a_grid_are_integers_of_the_wanted_size() -> None:
    x = inputs(MAX_ROWS, 96, torch.Generator().manual_seed(SEED))
    codes, unit = to_grid(x, torch.tensor(1 / 127))
    assert torch.equal(codes, codes.round())
    assert codes.abs().max() == 127
    assert ((codes * unit - x).abs() <= 0.5001 * unit).all()


@pytest.mark.parametrize("width", [32, 96, 576, 4096])
def test_normed_rows_give_the_same_bits_in_every_batch(kernel: Int8Kernel, width: int) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    weight, norm = torch.randn(70, width, generator=generator), torch.randn(width, generator=generator).exp()
    x, grid = inputs(MAX_ROWS, width, generator), NormGrid.of(norm, 1e-5)
    ready = Int8Weight.of_rows([weight], kernel)
    expected = int8_norm_linear(x, grid, Int8Weight.of_rows([weight], ReferenceKernel()))
    for num_rows in (1, 2, 3, 7, 16, 33, MAX_ROWS):
        for first in (0, 1, MAX_ROWS - num_rows):
            found = int8_norm_linear(x[first : first + num_rows].clone(), grid, ready)
            assert torch.equal(found, expected[first : first + num_rows]), f"{num_rows} rows from {first}"
    wide = x.double()
    normed = wide * (wide.square().mean(1, True) + 1e-5).rsqrt() * norm
    exact = normed @ weight.double().t()
    assert float((expected - exact).norm() / exact.norm()) < 0.02


def test_sums_of_normed_rows_stay_exact_in_the_worst_case() -> None:
    """A row that is parallel to a block of the norm's weights reaches the bound of the grid."""
    norm = torch.ones(128)
    norm[:64] = torch.randn(64, generator=torch.Generator().manual_seed(SEED)).abs() + 0.1
    grid = NormGrid.of(norm, 0.0)
    x = torch.cat([norm[:64], torch.zeros(64)])
    summed = float((x / x.norm() * grid.weight).round().double().sum())
    assert 2**21 < summed < 2**24


@pytest.mark.parametrize("block", [16, 64, 128])
def test_outputs_that_are_rotated_with_the_weight_need_no_rotation_later(kernel: Int8Kernel, block: int) -> None:
    """As for the values of attention and the projection after it."""
    generator = torch.Generator().manual_seed(SEED)
    values, out = torch.randn(256, 64, generator=generator), torch.randn(40, 256, generator=generator)
    x = torch.randn(9, 64, generator=generator)
    rotated = x @ rotate_outputs(values, block).t()
    ready = Int8Weight.of_rows([out], kernel, block)
    exact = (x @ values.t()).double() @ out.double().t()
    assert torch.allclose(rotated.norm(dim=1), (x @ values.t()).norm(dim=1))
    assert float((scaled(rotated, ready) - exact).norm() / exact.norm()) < 0.02
