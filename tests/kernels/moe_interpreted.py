"""Runs the Triton kernels of experts on a CPU. test_moe_kernels.py starts this in a process of its own, like
interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels import moe_cases
from kernels.moe_cases import Shape

from stoker.kernels.dispatch import tl
from stoker.kernels.moe_many import find_tile
from stoker.kernels.moe_tile_model import PairTile

assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is to be set"
CPU = torch.device("cpu")
SHAPES = [
    Shape(72, 40, 5, 3, renormalises=False),
    Shape(100, 20, 11, 6, granule=4),
    Shape(32, 16, 3, 3, granule=16),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def nothing_is_zero():
    """Fill new memory with NaN, so that a kernel cannot read what none has written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_routing(num_tokens, shape):
    moe_cases.routing(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_few_tokens(num_tokens, shape):
    moe_cases.few(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 35])
def test_many_tokens(num_tokens, shape):
    moe_cases.many(num_tokens, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", [*SHAPES, moe_cases.routed(SHAPES[0], "gpt-oss")], ids=str)
def test_prompts(shape):
    tile = PairTile(rows=32, outs=16, ins=32, num_warps=4, num_stages=2)
    moe_cases.prompt(60, shape, CPU, torch.float32, tile, tile)


@pytest.mark.parametrize("routing", moe_cases.ROUTINGS)
def test_routings(routing):
    shape = moe_cases.routed(Shape(72, 40, 12, 5), routing)
    moe_cases.routing(9, shape, CPU, torch.float32)
    moe_cases.few(2, shape, CPU, torch.float32)
    moe_cases.many(5, shape, CPU, torch.float32)


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_a_whole_layer(num_tokens):
    moe_cases.whole(num_tokens, Shape(72, 40, 7, 1), CPU, torch.float32)
    moe_cases.whole(num_tokens, moe_cases.routed(Shape(72, 40, 7, 4), "gpt-oss"), CPU, torch.float32)


@pytest.mark.parametrize("shape", moe_cases.PARTS, ids=str)
def test_a_rank_computes_the_experts_that_it_holds(shape, nothing_is_zero):
    moe_cases.routing(5, shape, CPU, torch.float32)
    moe_cases.few(2, shape, CPU, torch.float32)
    moe_cases.many(7, shape, CPU, torch.float32)
    moe_cases.whole(1, shape, CPU, torch.float32)
    if shape.on_input:
        tile = PairTile(rows=32, outs=16, ins=32, num_warps=4, num_stages=2)
        moe_cases.prompt(30, shape, CPU, torch.float32, tile, tile)


@triton.jit
def _find_tiles(
    counts, found, PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PANEL: tl.constexpr,
):  # fmt: skip
    expert, part, first, left = find_tile(counts, tl.program_id(0), PARTS, EXPERTS, BLOCK, ROWS, PANEL, 1)
    place = found + tl.program_id(0) * 4
    tl.store(place, expert)
    tl.store(place + 1, part)
    tl.store(place + 2, first)
    tl.store(place + 3, left)


@pytest.mark.parametrize("panel", [1, 2, 3, 16])
def test_every_part_of_every_tile_has_one_program(panel):
    counts, parts, rows = [0, 37, 16, 0, 1, 100, 0], 3, 16
    num_programs = parts * (sum(counts) // rows + len(counts))
    found = torch.full((num_programs, 4), -1, dtype=torch.int32)
    given = torch.tensor(counts, dtype=torch.int32)
    _find_tiles[(num_programs,)](given, found, PARTS=parts, EXPERTS=7, BLOCK=8, ROWS=rows, PANEL=panel)
    working = [tuple(line) for line in found.tolist() if line[3] > 0]
    expected = {
        (expert, part, first, count - first)
        for expert, count in enumerate(counts)
        for first in range(0, count, rows)
        for part in range(parts)
    }
    assert len(working) == len(expected)
    assert set(working) == expected
    # Within a panel, the tiles of a part follow each other.
    largest = [(first // rows // panel, part) for expert, part, first, _left in working if expert == 5]
    assert largest == sorted(largest)
