"""Paged attention against its definition, token by token."""

import random

import pytest
import torch

from stoker.kernels.attention import SpanShape, group_spans, paged_attention
from stoker.kernels.attention_rows import RowGroup

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
CPU = torch.device("cpu")


def definition(q, pages, spans, scale):
    out = torch.empty_like(q)
    for span in spans:
        for i in range(span.count):
            seen = span.start + i + 1
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                key = torch.cat([pages[page + kv].view(BLOCK, DIM) for page in span.pages])[:seen]
                value = torch.cat([pages[page + KV_HEADS + kv].view(BLOCK, DIM) for page in span.pages])[:seen]
                out[span.first + i, head] = (key @ q[span.first + i, head] * scale).softmax(0) @ value
    return out


def world(rng, lengths):
    """Spans [(start, count)] over blocks at random places of the cache; unused blocks are NaN."""
    needed = [-(-(start + count) // BLOCK) for start, count in lengths]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    pages = torch.full((len(free) * 2 * KV_HEADS, BLOCK * DIM), float("nan"), dtype=torch.float64)
    spans, first = [], 0
    for (start, count), blocks in zip(lengths, needed, strict=True):
        mine = [free.pop() * 2 * KV_HEADS for _ in range(blocks)]
        for page in mine:
            pages[page : page + 2 * KV_HEADS] = torch.randn(2 * KV_HEADS, BLOCK * DIM, dtype=torch.float64)
        spans.append(SpanShape(first, start, count, mine))
        first += count
    return torch.randn(first, HEADS, DIM, dtype=torch.float64), pages, spans


@pytest.mark.parametrize("seed", range(12))
def test_attention_is_its_definition(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [
        (rng.choice([0, rng.randrange(200)]), rng.choice([1, 1, 1, rng.randrange(2, 9)]))
        for _ in range(rng.randrange(1, 40))
    ]
    q, pages, spans = world(rng, lengths)
    groups = group_spans(spans, KV_HEADS, BLOCK, CPU, torch.float64)
    found = paged_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], pages, groups, 0.3)
    torch.testing.assert_close(found, definition(q, pages, spans, 0.3), rtol=1e-9, atol=1e-12)


def test_many_keys_are_read_in_place():
    torch.manual_seed(0)
    lengths = [(length, 1) for length in (120, 150, 199, 170, 163, 199, 180, 140, 160, 151, 149, 187, 199, 191)]
    q, pages, spans = world(random.Random(0), lengths)
    groups = group_spans(spans, KV_HEADS, BLOCK, CPU, torch.float64)
    assert [type(group) for group in groups] == [RowGroup]
    found = paged_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], pages, groups, 0.3)
    torch.testing.assert_close(found, definition(q, pages, spans, 0.3), rtol=1e-9, atol=1e-12)
