"""On a CPU, the reference kernels give a row the same bits in every batch, chunk and number of threads. The shapes are
SmolLM2's. 8-bit matmuls are tested in test_cpu_int8.py. Other matmuls, and attention of one token, do so where
numerics=exact asks for it; tests/models/test_exact_cpu.py tests whole models."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from stoker.kernels.activation import silu_mul
from stoker.kernels.attention import SpanShape, group_spans, paged_attention_ref
from stoker.kernels.linear import linear, pack_weight
from stoker.kernels.norm import rms_norm
from stoker.kernels.rope import rope

SEED = 18
CPU = torch.device("cpu")
NUM_ROWS, HIDDEN, INNER = 200, 576, 1536
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cuts(length: int, generator: random.Random) -> Iterator[tuple[int, int]]:
    """Yield first and count of chunks that cover a length."""
    first = 0
    while first < length:
        count = min(length - first, generator.choice([1, 1, 2, 7, 16, generator.randint(1, 80)]))
        yield first, count
        first += count


def values(generator: torch.Generator, *shape: int) -> Tensor:
    """Values of very different sizes, as activations have them."""
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul_(1.5).exp_()


def check(op: Callable[..., Tensor], *tensors: Tensor) -> None:
    print(f"seed {SEED}")
    generator = random.Random(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = op(*tensors)
    torch.set_num_threads(threads)
    assert torch.equal(op(*tensors), expected)
    for _ in range(3):
        for first, count in cuts(len(expected), generator):
            found = op(*(tensor[first : first + count].clone() for tensor in tensors))
            assert torch.equal(found, expected[first : first + count]), f"{count} rows from {first}"


@pytest.mark.usefixtures("threads")
def test_rms_norm() -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight = values(generator, HIDDEN)
    check(lambda x: rms_norm(x, weight, 1e-5), values(generator, NUM_ROWS, HIDDEN))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("inner", [INNER, 90])
def test_silu_mul(inner: int) -> None:
    check(silu_mul, values(torch.Generator().manual_seed(SEED), NUM_ROWS, 2 * inner))


@pytest.mark.usefixtures("threads")
def test_rope() -> None:
    generator = torch.Generator().manual_seed(SEED)
    angles = torch.rand(NUM_ROWS, HEAD_DIM, generator=generator) * 6
    check(rope, values(generator, NUM_ROWS, HEADS + KV_HEADS, HEAD_DIM), angles.cos(), angles.sin())


@pytest.mark.usefixtures("threads")
def test_attention_in_float64() -> None:
    """Not exact by construction: float64 differs in its last bits, and float32 hides it. See engine.md."""
    print(f"seed {SEED}")
    generator, seeds = random.Random(SEED), torch.Generator().manual_seed(SEED)
    length = 330
    num_blocks = -(-length // BLOCK)
    pages = values(seeds, 2 * num_blocks * 2 * KV_HEADS, BLOCK * HEAD_DIM)
    q = values(seeds, length, HEADS, HEAD_DIM)
    blocks = generator.sample(range(2 * num_blocks), num_blocks)

    def attend(first: int, count: int, others: int) -> Tensor:
        """Compute some of the tokens, in a step with other sequences of one token each."""
        mine = [block * 2 * KV_HEADS for block in blocks[: -(-(first + count) // BLOCK)]]
        spans = [SpanShape(0, first, count, mine)]
        spans += [SpanShape(count + i, 13 * i, 1, mine[:1] * (13 * i // BLOCK + 1)) for i in range(others)]
        groups = group_spans(spans, KV_HEADS, BLOCK, CPU, torch.float64, in_place=False)
        queries = torch.cat([q[first : first + count], q[:others]])
        return paged_attention_ref(queries, pages, groups, KV_HEADS, HEAD_DIM**-0.5)[:count]

    expected = attend(0, length, 0)
    for others in (0, 1, 5):
        for first, count in cuts(length, generator):
            found = attend(first, count, others)
            assert torch.equal(found, expected[first : first + count]), f"{count} tokens from {first}, {others} others"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_outs", "num_ins"), [(960, 576), (576, 1536), (48, 32), (7, 33)])
def test_exact_matmul(num_outs: int, num_ins: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(SEED)
    weight = pack_weight(values(generator, num_outs, num_ins).to(dtype), exact=True)
    check(lambda x: linear(x, weight), values(generator, NUM_ROWS, num_ins).to(dtype))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("block", [4, 16])
def test_exact_attention_of_drafts_is_that_of_single_tokens(in_place: bool, block: int) -> None:
    print(f"seed {SEED}")
    generator, seeds = random.Random(SEED), torch.Generator().manual_seed(SEED)
    length, num_blocks = 300, 300 // block + 1
    dtype = torch.float32 if in_place else torch.float64
    pages = values(seeds, 2 * num_blocks * 2 * KV_HEADS, block * HEAD_DIM)
    q = values(seeds, length, HEADS, HEAD_DIM)
    blocks = [place * 2 * KV_HEADS for place in generator.sample(range(2 * num_blocks), num_blocks)]

    def attend(first: int, count: int, others: int) -> Tensor:
        spans = [SpanShape(0, first, count, blocks[: -(-(first + count) // block)], num_drafts=count - 1)]
        spans += [SpanShape(count + i, 31 * i, 1, blocks[: 31 * i // block + 1]) for i in range(others)]
        groups = group_spans(spans, KV_HEADS, block, CPU, dtype, in_place, exact=True)
        queries = torch.cat([q[first : first + count], q[:others]])
        return paged_attention_ref(queries, pages, groups, KV_HEADS, HEAD_DIM**-0.5)[:count]

    expected = torch.cat([attend(position, 1, 0) for position in range(length)])
    for first in (0, 3, 14, 15, 16, 100, 284):
        for count, others in ((1, 9), (2, 0), (5, 3), (16, 9)):
            found = attend(first, count, others)
            assert torch.equal(found, expected[first : first + count]), f"{count} tokens from {first}, {others} others"
