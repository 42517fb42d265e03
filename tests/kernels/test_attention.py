"""Paged attention against its definition, token by token."""

import random
from dataclasses import replace

import pytest
import torch

from stoker.kernels.attention import SpanShape, group_spans, paged_attention
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.reach import FULL, Reach

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
CPU = torch.device("cpu")


def definition(q, pages, spans, scale, reach=FULL, sinks=None):
    out = torch.empty_like(q)
    for span in spans:
        for i in range(span.count):
            at = span.start + i
            is_seen = [
                key <= at
                and not (reach.window and key <= at - reach.window)
                and not (reach.chunk and key // reach.chunk != at // reach.chunk)
                for key in range(len(span.pages) * BLOCK)
            ]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                key = torch.cat([pages[page + kv].view(BLOCK, DIM) for page in span.pages])[is_seen]
                value = torch.cat([pages[page + KV_HEADS + kv].view(BLOCK, DIM) for page in span.pages])[is_seen]
                weights = (key @ q[span.first + i, head] * scale).exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].exp())
                out[span.first + i, head] = weights / total @ value
    return out


def world(rng, lengths, reach=FULL):
    """Spans [(start, count)] over blocks at random places of the cache. Unused blocks are NaN, and those without a key
    that the span sees are beyond the cache."""
    needed = [-(-(start + count) // BLOCK) for start, count in lengths]
    free = list(range(sum(needed) + 3))
    rng.shuffle(free)
    pages = torch.full((len(free) * 2 * KV_HEADS, BLOCK * DIM), float("nan"), dtype=torch.float64)
    spans, first = [], 0
    for (start, count), blocks in zip(lengths, needed, strict=True):
        mine = [free.pop() * 2 * KV_HEADS for _ in range(blocks)]
        for page in mine:
            pages[page : page + 2 * KV_HEADS] = torch.randn(2 * KV_HEADS, BLOCK * DIM, dtype=torch.float64)
        unseen = reach.first_key(start) // BLOCK
        spans.append(SpanShape(first, start, count, [1 << 40] * unseen + mine[unseen:]))
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


REACHES = [Reach(window=1), Reach(chunk=3), Reach(window=9), Reach(chunk=16), Reach(window=64), Reach(chunk=1000)]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("reach", [*REACHES, FULL], ids=str)
def test_windows_chunks_and_sinks(reach, has_sinks):
    """Also in exact mode, in float32 pages that are converted first, and with drafts, which are computed one by one."""
    rng = random.Random(1)
    torch.manual_seed(1)
    lengths = [(0, 1), (70, 1), (15, 1), (16, 1), (150, 1), (0, 40), (11, 7), (63, 2), (100, 30)]
    q, pages, spans = world(rng, lengths, reach)
    sinks = torch.randn(HEADS, dtype=torch.float64) * 3 if has_sinks else None
    readable = [replace(span, pages=[page if page < len(pages) else 0 for page in span.pages]) for span in spans]
    expected = definition(q, pages, readable, 0.3, reach, sinks)
    assert expected.isfinite().all()
    drafting = [replace(span, num_drafts=span.count - 1 if 1 < span.count < 9 else 0) for span in spans]
    for some, options in (
        (spans, (True, False)),
        (drafting, (True, True)),
        (drafting, (False, True)),
        (spans, (False, False)),
    ):
        groups = group_spans(some, KV_HEADS, BLOCK, CPU, torch.float64, *options, reach)
        found = paged_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], pages, groups, 0.3, sinks)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_verified_token_has_the_bits_of_a_decoded_one_in_a_window():
    torch.manual_seed(0)
    reach, sinks = Reach(window=21), torch.randn(HEADS)
    q, pages, spans = world(random.Random(0), [(50, 6), (90, 5), (3, 1)], reach)
    q, pages = q.float(), pages.float()
    drafting = [replace(span, num_drafts=span.count - 1) for span in spans]
    together = group_spans(drafting, KV_HEADS, BLOCK, CPU, torch.float32, True, True, reach)
    found = paged_attention(q, q[:, :KV_HEADS], q[:, :KV_HEADS], pages, together, 0.3, sinks)
    for span in spans:
        for i in range(span.count):
            alone = SpanShape(0, span.start + i, 1, span.pages)
            groups = group_spans([alone], KV_HEADS, BLOCK, CPU, torch.float32, True, True, reach)
            own = q[span.first + i : span.first + i + 1]
            one = paged_attention(own, own[:, :KV_HEADS], own[:, :KV_HEADS], pages, groups, 0.3, sinks)
            assert torch.equal(one[0], found[span.first + i])
