"""The pieces of attention's work cover all keys of all tokens exactly once, for any spans."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from stoker.kernels.exact_pieces import ExactCutter, part_ends
from stoker.kernels.paged import Cutter, SpanForm
from stoker.kernels.pieces import Ints

BLOCK = 16


def check(pieces: Ints, spans: list[tuple[int, int, int]], most_tokens: int) -> None:
    """`spans` has first token, count and start."""
    seen: dict[int, int] = {}  # blocks by token
    groups: dict[int, list[Ints]] = {}
    for number, piece in enumerate(pieces):
        first, count, begin, end, group, parts = piece
        assert 0 < count <= most_tokens
        assert begin < end
        assert group <= number < group + parts
        groups.setdefault(int(group), []).append(piece)
        for token in range(first, first + count):
            seen[token] = seen.get(token, 0) + int(end - begin)
    for members in groups.values():
        assert len(members) == members[0][5]
        assert members[0][2] == 0
        assert all(a[3] == b[2] and a[0] == b[0] and a[1] == b[1] for a, b in pairwise(members))
    for first, count, start in spans:
        for token in range(first, first + count):
            tile_end = min(count, (token - first) // most_tokens * most_tokens + most_tokens)
            assert seen[token] == -(-(start + tile_end) // BLOCK)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_the_whole_work(seed: int) -> None:
    rng = random.Random(seed)
    cutter = Cutter(rng.choice([1, 3, 8]), rng.choice([8, 32]), BLOCK)
    spans, tokens = [], 0
    for _ in range(rng.randrange(1, 80)):
        count = rng.choice([1, 1, 1, rng.randrange(2, 100)])
        spans.append((tokens, count, rng.choice([0, rng.randrange(50), rng.randrange(30_000)])))
        tokens += count
    singles = [span for span in spans if span[1] == 1]
    longer = [span for span in spans if span[1] > 1]
    if singles:
        first, count, start = np.array(singles).T
        for room in (cutter.max_singles(len(singles)), len(singles) + 1):
            pieces = cutter.singles(first, count, start, room)
            assert len(pieces) <= room
            assert (pieces[:, 5] > 1).sum() <= 2 * 512 // cutter.num_kv_heads
            check(pieces, singles, 1)
    if longer:
        columns = np.array(longer).T
        num_tiles = cutter.num_tiles(columns[1])
        for room in (cutter.max_tiles(num_tiles), num_tiles + 1):
            pieces = cutter.tiles(*columns, room)
            assert len(pieces) <= room
            assert (pieces[:, 5] > 1).sum() <= 2 * 264 // cutter.num_kv_heads
            check(pieces, longer, cutter.tile_tokens)


def test_a_long_context_among_short_ones_is_split() -> None:
    cutter = Cutter(8, 32, 64)
    starts = np.array([1000] * 63 + [100_000])
    pieces = cutter.singles(np.arange(64), np.ones(64, int), starts, cutter.max_singles(64))
    blocks = pieces[:, 3] - pieces[:, 2]
    assert pieces[0, 5] > 30
    assert blocks.max() <= 2 * (starts // 64 + 1).sum() // 64


@pytest.mark.parametrize("seed", range(10))
def test_exact_pieces_end_at_the_same_keys_in_every_batch(seed: int) -> None:
    rng = random.Random(seed)
    max_tokens = 40_000
    cutter = ExactCutter(
        rng.choice([1, 8]), 32, BLOCK, SpanForm(rng.choice([1, 4]), True, True), max_tokens // BLOCK + 1, 4096
    )
    spans, tokens = [], 0
    for _ in range(rng.randrange(1, 40)):
        count = rng.choice([1, 1, rng.randrange(2, 17)])
        spans.append((tokens, count, rng.choice([0, rng.randrange(600), rng.randrange(max_tokens - 16)])))
        tokens += count
    first, count, start = np.array(spans).T
    pieces = cutter.singles(first, count, start, 0)
    assert len(pieces) == cutter.needed_singles(count, start) <= cutter.max_groups(len(spans))
    check(pieces, spans, cutter.form.span_tokens)
    ends = set(part_ends(BLOCK, cutter.max_blocks).tolist())
    for piece in pieces:
        assert piece[3] in ends or piece[4] + piece[5] - 1 == np.flatnonzero((pieces == piece).all(1))[0]
    assert len(part_ends(BLOCK, cutter.max_blocks)) < 2 * cutter.max_blocks**0.5
    tiles = cutter.tiles(first, count, start, 0)
    assert (tiles[:, 5] == 1).all()
    check(tiles, spans, cutter.tile_tokens)


def test_a_captured_decode_step_has_room_for_sequences_that_fill_the_cache() -> None:
    cutter = ExactCutter(8, 32, 64, SpanForm(4, True, True), 2049, 13_000)
    for rows in (1, 2, 8, 64, 256, 512):
        tokens = min(131_072, 13_000 * 64 // rows)
        needed = cutter.needed_singles(np.ones(rows, int), np.full(rows, tokens - 1))
        assert needed <= cutter.max_singles(rows)
        verified = cutter.needed_singles(np.full(rows, 8), np.full(rows, tokens - 8))
        assert verified <= cutter.max_singles(rows, tokens=8)


def test_partial_results_of_a_large_cache_take_little_memory() -> None:
    """The shape of Llama-3.1-8B on a GPU with 110 GB of KV."""
    cutter = ExactCutter.for_model([(32, 8)], 64, torch.bfloat16, max_blocks=2049, total_blocks=13_000)
    assert cutter.form == SpanForm(4, guarded=True, exact=True)
    assert cutter.partial_bytes(512, 4, 128) < 400 << 20
