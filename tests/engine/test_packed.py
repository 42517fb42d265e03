"""A step's packed inputs: in any shape, they contain the plan, and the rest is padding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stoker.base.ids import Row
from stoker.engine.gpu_steps import step_shapes
from stoker.engine.packed import StepData, StepInputs, StepShape
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.paged import Cutter, SpanForm
from stoker.sched.draft_tape import MAX_DRAFTS
from stoker.sched.plan import ON_DEVICE, Span, StepPlan

CUTTER = Cutter(num_kv_heads=8, tile_tokens=32, block_tokens=64)
VERIFYING = Cutter(8, 32, 64, SpanForm(4, guarded=True))
EXACT = ExactCutter(8, 32, 64, SpanForm(4, guarded=True, exact=True), max_blocks=400, total_blocks=13_000)


def random_plan(rng: random.Random) -> StepPlan:
    rows = rng.sample(range(512), rng.randrange(1, 60))
    spans, token_ids = [], []
    for row in rows:
        count = rng.choice([1, 1, 1, rng.randrange(2, 60)])
        spans.append(Span(Row(row), rng.choice([0, rng.randrange(20_000)]), count, rng.random() < 0.8))
        token_ids += [ON_DEVICE if count == 1 else rng.randrange(1000) for _ in range(count)]
        if count == 1 and spans[-1].samples and rng.random() < 0.5:
            spans[-1].num_drafts = rng.randrange(1, MAX_DRAFTS + 1)
            spans[-1].count += spans[-1].num_drafts
            token_ids += [ON_DEVICE - 1 - j for j in range(spans[-1].num_drafts)]
    return StepPlan(spans, token_ids, num_drafts=sum(span.num_drafts for span in spans))


def inputs_of(plan: StepPlan, shape: StepShape, data: StepData, samples: bool = True) -> StepInputs:
    packed = torch.zeros(sum(shape.sizes), dtype=torch.int64)
    data.pack(packed.numpy(), shape, samples)
    return StepInputs.of(packed, shape)


def seen_blocks(pieces: torch.Tensor) -> dict[int, int]:
    """Return how many blocks of keys each token's pieces cover."""
    seen: dict[int, int] = {}
    for first, count, begin, end, _group, _parts in pieces.tolist():
        for token in range(first, first + count):
            seen[token] = seen.get(token, 0) + end - begin
    return seen


@pytest.mark.parametrize("cutter", [CUTTER, VERIFYING, EXACT], ids=["fast", "verifying", "exact"])
@pytest.mark.parametrize("seed", range(20))
def test_packed_inputs_contain_the_plan_and_padding(seed: int, cutter: Cutter) -> None:
    plan = random_plan(random.Random(seed))
    sampling = [span for span in plan.spans if span.samples]
    data = StepData(plan, cutter)
    first, rest = step_shapes(512, 2048, cutter)
    holding = [shape for shape in (*first, *rest) if shape.holds(data.needed)]
    for shape in (data.exact, *holding[:3]):
        inputs = inputs_of(plan, shape, data)
        token = 0
        seen = seen_blocks(inputs.singles) | seen_blocks(inputs.tiles)
        for span in plan.spans:
            mine = slice(token, token + span.count)
            assert inputs.tokens[0, mine].tolist() == [span.row] * span.count
            assert inputs.tokens[2, mine].tolist() == list(range(span.start, span.start + span.count))
            most = cutter.form.span_tokens if span.num_drafts else cutter.tile_tokens
            for i in range(span.count):
                piece_end = min(span.count, i // most * most + most)
                assert seen[token + i] == -(-(span.start + piece_end) // cutter.block_tokens)
            token += span.count
        assert inputs.tokens[1, :token].tolist() == plan.token_ids
        assert (inputs.tokens[2, token:] == -1).all()
        assert len(seen) == token
        num_heads = len(sampling) + plan.num_drafts
        heads = inputs.heads[:, :num_heads]
        assert heads[1].tolist() == [span.row for span in sampling for _ in range(span.num_drafts + 1)]
        assert heads[2].tolist() == [1] * num_heads
        ends = [(span.start + span.count, span.num_drafts) for span in sampling]
        assert inputs.tokens[2][heads[0]].tolist() == [at for end, n in ends for at in range(end - 1 - n, end)]
        assert heads[3].tolist() == [n for span in sampling for n in (span.num_drafts, *[-1] * span.num_drafts)]
        assert not inputs.heads[2, num_heads:].any()
        assert not inputs_of(plan, shape, data, samples=False).heads[2].any()


def test_leading_tokens_of_supported_lengths_are_left_to_dense_attention() -> None:
    spans = [
        Span(Row(0), 0, 5000, True),
        Span(Row(1), 700, 1, True),
        Span(Row(2), 0, 4096, True),
        Span(Row(3), 64, 4500, True),
    ]
    plan = StepPlan(spans, [1] * sum(span.count for span in spans))
    data = StepData(plan, CUTTER)
    all_tokens = inputs_of(plan, data.exact, data)
    assert sorted(seen_blocks(all_tokens.tiles) | seen_blocks(all_tokens.singles)) == list(range(13597))
    assert data.take_dense_prefixes([2048, 4096]) == ((0, 4096), (5001, 4096))
    inputs = inputs_of(plan, data.exact, data)
    tiles = seen_blocks(inputs.tiles)
    assert sorted(tiles) == [*range(4096, 5000), *range(9097, 13597)]
    assert tiles[4096] == 65
    assert sorted(seen_blocks(inputs.singles)) == [5000]


def test_every_step_of_few_tokens_has_a_shape() -> None:
    first, rest = step_shapes(512, 2048, CUTTER)
    shapes = (*first, *rest)
    for tokens in (1, 2, 17, 500, 1000, 1024):
        rows = min(tokens, 512)
        decode = StepShape(rows, rows + 1, 0, rows)
        assert any(shape.holds(decode) for shape in shapes)
        chunk = StepShape(tokens, 0, CUTTER.num_tiles(np.array([tokens])) + 1, 1)
        assert any(shape.holds(chunk) for shape in shapes)
        assert min(shape.tokens for shape in shapes if shape.holds(chunk)) <= max(16, 1.5 * tokens + 16)


def test_no_shape_is_captured_that_no_step_can_have() -> None:
    first, rest = step_shapes(8, 200, CUTTER)
    shapes = (*first, *rest)
    assert max(shape.tokens for shape in shapes) == 256
    assert max(shape.tokens for shape in shapes if not shape.tiles) == 8
    assert max(shape.tokens for shape in first) == 256  # captured first, so that the others reuse its memory
    chunk = StepShape(200, 0, CUTTER.num_tiles(np.array([200])) + 1, 1)
    assert any(shape.holds(chunk) for shape in shapes)


@pytest.mark.parametrize("seed", range(5))
def test_sizes_and_addresses_are_multiples_of_16(seed: int) -> None:
    """Otherwise Triton would compile kernels again while serving."""
    rng = random.Random(seed)
    for _ in range(20):
        plan = random_plan(rng)
        data = StepData(plan, CUTTER)
        inputs = inputs_of(plan, data.exact, data)
        assert data.exact.holds(data.needed)
        assert data.exact.tokens % 16 == data.exact.heads % 16 == 0
        views = (inputs.tokens, *inputs.tokens, inputs.singles, inputs.tiles, *inputs.heads)
        assert all((view.data_ptr() - inputs.packed.data_ptr()) % 16 == 0 for view in views)


def test_a_chunk_of_one_prompt_token_is_prefill_with_exact_numerics() -> None:
    spans = [
        Span(Row(0), 99, 1, True, in_prompt=True),
        Span(Row(1), 50, 1, True),
        Span(Row(2), 0, 5, True, in_prompt=True),
    ]
    plan = StepPlan(spans, [1] * 7)
    for cutter, singles in ((CUTTER, {0, 1}), (EXACT, {1})):
        data = StepData(plan, cutter)
        inputs = inputs_of(plan, data.exact, data)
        assert set(seen_blocks(inputs.singles)) == singles
        assert set(seen_blocks(inputs.tiles)) == set(range(7)) - singles
