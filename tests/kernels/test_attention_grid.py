"""Attention on a grid gives a token the same bits in every batch, chunk and number of threads, for each dtype of KV. It is
close to attention in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stoker.kernels.attention import SpanShape
from stoker.kernels.attention_grid import LayerSlots, grid_attention, grid_rope_write, grid_spans, round_to_grid
from stoker.kernels.kv_pages import has_scales
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.rope_write import HeadNorms

SEED = 18
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
ALL_HEADS = HEADS + 2 * KV_HEADS
LENGTH = 150
DTYPES = [torch.float32, torch.float16, torch.int8]
MAX_ERROR = {torch.float32: 1e-2, torch.float16: 1e-2, torch.int8: 1e-1}  # relative; scores are large here


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Cache:
    """The KV of one layer, filled step by step with one long sequence and several others that are only read."""

    def __init__(
        self, dtype: torch.dtype, block_tokens: int, norms: HeadNorms | None = None, reach: Reach = FULL
    ) -> None:
        self.reach = reach
        generator = torch.Generator().manual_seed(SEED)
        self.heads = torch.randn(LENGTH, ALL_HEADS, HEAD_DIM, generator=generator)
        self.heads *= torch.randn(LENGTH, ALL_HEADS, 1, generator=generator).exp()
        angles = torch.rand(LENGTH, HEAD_DIM // 2, generator=generator) * 6
        self.cos, self.sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        self.block_tokens, self.norms = block_tokens, norms
        num_blocks = -(-LENGTH // block_tokens)
        places = random.Random(SEED).sample(range(2 * num_blocks), 2 * num_blocks)
        self.blocks, self.other_blocks = places[:num_blocks], places[num_blocks:]
        values = block_tokens * HEAD_DIM
        shape = (2 * num_blocks * 2 * KV_HEADS, values + 2 * block_tokens if dtype == torch.int8 else values)
        self.pages = torch.zeros(shape, dtype=dtype)

    def step(self, first: int, count: int, others: int, at: int = 0) -> Tensor:
        """Compute tokens of the long sequence, after `at` of the other sequences' single tokens and before the rest."""
        shapes, tokens, slots = [], [], []
        spans = [(11 * i + 1, 1, self.other_blocks) for i in range(others)]
        spans.insert(at, (first, count, self.blocks))
        for start, size, blocks in spans:
            pages = [block * 2 * KV_HEADS for block in blocks[: -(-(start + size) // self.block_tokens)]]
            unseen = self.reach.first_key(start) // self.block_tokens
            shapes.append(SpanShape(len(tokens), start, size, [1 << 40] * unseen + pages[unseen:]))
            for position in range(start, start + size):
                page = blocks[position // self.block_tokens] * 2 * KV_HEADS + np.arange(KV_HEADS)
                slots.append(page * self.block_tokens + position % self.block_tokens)
                tokens.append(position)
        grid = grid_spans(shapes, np.stack(slots), HEADS, KV_HEADS, self.pages, HEAD_DIM, self.reach)
        index = torch.from_numpy(np.stack(slots).ravel())
        sides = self.cos[tokens, None], self.sin[tokens, None]
        layer = LayerSlots.of(self.pages, KV_HEADS, HEAD_DIM, len(self.pages))
        q = grid_rope_write(self.heads[tokens], *sides, layer, index, grid, KV_HEADS, self.norms)
        found = grid_attention(q, layer, grid, KV_HEADS, HEAD_DIM**-0.5)
        return found[at : at + count]


def cuts(generator: random.Random) -> Iterator[tuple[int, int]]:
    first = 0
    while first < LENGTH:
        count = min(LENGTH - first, generator.choice([1, 1, 1, 2, 5, 16, 40]))
        yield first, count
        first += count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("block_tokens", "reach"),
    [(4, FULL), (16, FULL), (24, FULL), (16, Reach(window=37)), (4, Reach(chunk=33))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_in_every_step(dtype: torch.dtype, block_tokens: int, reach: Reach) -> None:
    print(f"seed {SEED}")
    generator = random.Random(SEED)
    whole = Cache(dtype, block_tokens, reach=reach)
    expected = whole.step(0, LENGTH, 0)
    for _ in range(2):
        cache = Cache(dtype, block_tokens, reach=reach)
        for first, count in cuts(generator):
            others = generator.choice([0, 0, 1, 5])
            found = cache.step(first, count, others, generator.randint(0, others))
            assert torch.equal(found, expected[first : first + count]), f"{count} tokens from {first}, {others} others"
        mine = [block * 2 * KV_HEADS + i for block in cache.blocks for i in range(2 * KV_HEADS)]
        assert torch.equal(cache.pages[mine].view(torch.uint8), whole.pages[mine].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("has_norms", "reach"), [(False, FULL), (True, FULL), (True, Reach(window=9)), (True, Reach(chunk=40))]
)
def test_it_is_close_to_attention_in_float64(dtype: torch.dtype, has_norms: bool, reach: Reach) -> None:
    generator = torch.Generator().manual_seed(SEED)
    norms = None
    if has_norms:
        norms = HeadNorms(*(torch.rand(HEAD_DIM, generator=generator) + 0.5 for _ in range(2)), 1e-5)
    cache = Cache(dtype, 16, norms, reach)
    found = cache.step(0, LENGTH, 0)
    heads = cache.heads.double()
    query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
    if norms is not None:
        query = query * (query.square().mean(-1, True) + norms.eps).rsqrt() * norms.query
        key = key * (key.square().mean(-1, True) + norms.eps).rsqrt() * norms.key

    def turned(x: Tensor) -> Tensor:
        return x * cache.cos[:, None] + x.roll(HEAD_DIM // 2, -1) * cache.sin[:, None]

    parts = [part.transpose(0, 1) for part in (turned(query), turned(key), value)]
    keys, positions = torch.arange(LENGTH)[None], torch.arange(LENGTH)[:, None]
    is_seen = (keys <= positions) & (keys >= reach.first_keys(positions))
    expected = scaled_dot_product_attention(*parts, is_seen, enable_gqa=True).transpose(0, 1)
    assert float((found - expected).norm() / expected.norm()) < MAX_ERROR[dtype]


def test_products_on_the_grid_are_exact_in_float32() -> None:
    """Also for the longest vectors, and where query and key are parallel."""
    generator = torch.Generator().manual_seed(SEED)
    cache = Cache(torch.float32, 16)
    cache.heads[:, :HEADS] = cache.heads[:, HEADS : HEADS + 1]
    cache.heads[0, : HEADS + 1] = 1.99 / HEAD_DIM**0.5
    cache.heads[1, : HEADS + 1] = torch.eye(HEAD_DIM)[0] * 1.99
    cache.cos.fill_(1), cache.sin.fill_(0)
    grid = grid_spans(
        [SpanShape(0, 0, LENGTH, [0] * 10)], np.zeros((LENGTH, KV_HEADS), int), HEADS, KV_HEADS, cache.pages, 64
    )
    index = torch.zeros(LENGTH * KV_HEADS, dtype=torch.int64)
    sides = cache.cos[:, None], cache.sin[:, None]
    heads = cache.heads.clone()
    layer = LayerSlots.of(cache.pages, KV_HEADS, HEAD_DIM, len(cache.pages))
    q = grid_rope_write(heads, *sides, layer, index, grid, KV_HEADS, None)
    key = heads[:, HEADS]
    exact = q[:, 0].double() @ key.double().t()
    assert torch.equal(exact.float().double(), exact)
    order = torch.randperm(HEAD_DIM, generator=generator)
    total = torch.zeros(LENGTH, LENGTH)
    for column in order.tolist():
        total += q[:, 0, column, None] * key[None, :, column]
    assert torch.equal(total.double(), exact)


def test_zeros_tiny_vectors_and_vectors_that_are_not_numbers() -> None:
    x = torch.ones(5, HEAD_DIM)
    x[0], x[1], x[3, 2] = 0, 1e-42, float("nan")
    x[4] *= 1e15
    found = round_to_grid(x.clone(), 6144.0)
    assert torch.equal(found[:2], x[:2])
    assert found[3].isnan().all()
    assert torch.allclose(found[[2, 4]], x[[2, 4]], rtol=1e-3)


def test_pages_with_scales_are_tested() -> None:
    assert [has_scales(torch.empty(0, dtype=dtype)) for dtype in DTYPES] == [False, False, True]
