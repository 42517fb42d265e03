"""What every Triton kernel must do, on a CPU in the interpreter (interpreted.py) or on a GPU (tests/gpu). Inputs are
fresh and random, outputs poisoned. Errors are relative, against the reference in float64 on the same inputs."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.activation import silu_mul_ref, silu_mul_triton
from stoker.kernels.attention import SpanShape, group_spans, paged_attention_ref
from stoker.kernels.dense import dense_attention
from stoker.kernels.draft_inputs import draft_rows_ref, draft_rows_triton, next_tokens_ref, next_tokens_triton
from stoker.kernels.draft_steps import PageSizes, draft_step_ref, draft_step_triton, put_draft_ref, put_draft_triton
from stoker.kernels.kv_pages import LARGEST_CODE, kv_read, kv_write
from stoker.kernels.norm import rms_norm_ref, rms_norm_triton
from stoker.kernels.paged import Cutter, PagedSpans, new_counters, paged_attention_triton
from stoker.kernels.pieces import FIELDS, Ints
from stoker.kernels.reach import FULL, Reach
from stoker.kernels.rope_write import HeadNorms, Temperature, rope_write_ref, rope_write_triton
from stoker.kernels.row_tokens import (
    MODEL,
    MODEL_DRAFTS,
    MODEL_START,
    NEXT,
    NO_GUESS,
    TAPE,
    TAPE_START,
    WINDOW,
    pack_guesses,
    pack_row,
)
from stoker.kernels.sample import noise_keys, sample_tokens
from stoker.kernels.sample_rows import new_settings, pack_settings, sample_rows_triton
from stoker.kernels.skinny import few_rows_linear, one_row_linear
from stoker.kernels.step_inputs import step_inputs_ref, step_inputs_triton
from stoker.kernels.tile_model import SkinnyTile
from stoker.kernels.verify import head_lengths_ref, head_lengths_triton, verify_ref, verify_triton
from stoker.kernels.xxh3 import xxh3_ref, xxh3_triton

CPU = torch.device("cpu")
ROUNDING = {torch.float8_e4m3fn: 0.035, torch.int8: 0.012, torch.bfloat16: 0.003, torch.float16: 4e-4}
MOST_ERROR = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def close(found: Tensor, expected: Tensor) -> None:
    wide = found.double()
    assert wide.isfinite().all(), "something was not written, or is not a number"
    error = float((wide - expected).norm() / expected.norm())
    assert error < MOST_ERROR[found.dtype], f"relative error {error:.2e}"


def norm(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[1], device=device).to(dtype)
    close(rms_norm_triton(x, weight, 1e-5), rms_norm_ref(x.double(), weight.double(), 1e-5))


def gated(shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    close(silu_mul_triton(x), silu_mul_ref(x.double()))


def skinny(num_rows: int, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, num_in, device=device).to(dtype)
    weight = (torch.randn(num_out, num_in, device=device) * num_in**-0.5).to(dtype)
    learned = torch.randn(num_in, device=device).to(dtype)
    total = torch.randn(num_rows, num_out, device=device).to(dtype)
    product = x.double() @ weight.double().t()
    close(few_rows_linear(x, weight), product)
    close(few_rows_linear(x, weight, add_to=total.clone()), total.double() + product)
    split = SkinnyTile(outs=32, ins=64, num_warps=4, num_stages=2, splits=3)
    for _ in range(2):  # the second call finds what the first left behind
        close(few_rows_linear(x, weight, add_to=total.clone(), tile=split), total.double() + product)
    if num_rows == 1:
        normed = rms_norm_ref(x.double(), learned.double(), 1e-5) @ weight.double().t()
        close(one_row_linear(x, weight), product)
        close(one_row_linear(x, weight, norm=learned, eps=1e-5), normed)
        close(one_row_linear(x, weight, add_to=total.clone()), total.double() + product)
        both = torch.randn(1, 2 * num_in, device=device).to(dtype)
        product = silu_mul_ref(both.double()) @ weight.double().t()
        close(one_row_linear(both, weight, is_gated=True, add_to=total.clone()), total.double() + product)


def rope(
    num_tokens: int,
    num_heads: int,
    kv_heads: int,
    dim: int,
    has_norm: bool,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    turns: bool = True,
    temperature: Temperature | None = None,
) -> None:
    block_tokens, num_blocks = 16, num_tokens + 1
    heads = torch.randn(num_tokens, num_heads + 2 * kv_heads, dim, device=device).to(dtype)
    half = torch.rand(num_tokens, dim // 2, device=device) * 6
    cos, sin = torch.cat([half.cos(), half.cos()], 1), torch.cat([-half.sin(), half.sin()], 1)
    if not turns:
        cos = sin = None
    positions = torch.randint(0, 1000, (num_tokens,), device=device)
    positions[num_tokens // 2] = -1
    # Any block, any slot in it, no two the same.
    blocks = torch.randperm(num_blocks, device=device)[:num_tokens]
    first = blocks * 2 * kv_heads
    offset = torch.randint(0, block_tokens, (num_tokens, 1), device=device)
    slots = ((first[:, None] + torch.arange(kv_heads, device=device)) * block_tokens + offset).flatten()
    poison = torch.full((num_blocks * 2 * kv_heads, block_tokens * dim), -77.0, device=device)
    norms = wide_norms = None
    if has_norm:
        weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
        norms = HeadNorms(*weights, 1e-6)
        wide_norms = HeadNorms(*(weight.double() for weight in weights), 1e-6)
    real = positions >= 0
    wide = poison.double()
    expected = rope_write_ref(
        heads[real].double(),
        None if cos is None else cos[real].double(),
        None if sin is None else sin[real].double(),
        positions[real],
        wide,
        slots.view(num_tokens, -1)[real].flatten(),
        kv_heads,
        wide_norms,
        temperature,
    )
    pages = new_pages(poison.to(dtype), dim, kv_dtype or dtype)
    empty = pages.clone()
    found = rope_write_triton(heads.clone(), cos, sin, positions, pages, slots, kv_heads, norms, temperature)
    if real.any():
        for part, expected_part, is_rounded in zip(found, expected, (False, True, True), strict=True):
            if not (is_rounded and kv_dtype):
                close(part[real], expected_part)
    assert not found[0][~real].any()
    if kv_dtype is None:
        close(pages, wide)
        assert torch.equal(pages == -77, wide == -77), "something else was overwritten"
        return
    # What the kernel wrote and what it returned is what the reference makes of k and v; rounding again changes nothing.
    index = slots.view(num_tokens, -1)[real].flatten()
    for number, part in enumerate(found[1:]):
        again = kv_write(part[real], empty[number * kv_heads :], index)
        assert torch.equal(again, part[real]), "the values that were returned are not those of the cache"
        error = float((part[real].double() - expected[1 + number]).norm() / expected[1 + number].norm())
        assert error < ROUNDING[kv_dtype], f"relative error {error:.2e}"
    assert torch.equal(read(pages, dim, dtype).nan_to_num(-77), read(empty, dim, dtype).nan_to_num(-77))


def new_pages(values: Tensor, dim: int, kv_dtype: torch.dtype) -> Tensor:
    """Return pages of this dtype that hold these values, as well as they can. NaN stays NaN."""
    if kv_dtype not in LARGEST_CODE:
        return values.to(kv_dtype)
    num_pages, block_tokens = len(values), values.shape[1] // dim
    pages = torch.full((num_pages, block_tokens * (dim + 2)), 255, dtype=torch.uint8, device=values.device).view(
        kv_dtype
    )
    rows = values.view(num_pages * block_tokens, 1, dim)
    index = (~rows.isnan().any(-1)[:, 0]).nonzero()[:, 0]
    kv_write(rows[index], pages, index)
    return pages


def read(pages: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return the values of all pages, [pages, tokens * dim]."""
    return kv_read(pages, torch.arange(len(pages), device=pages.device), dim, dtype).flatten(1)


def attention(
    lengths: list[tuple[int, int]],
    num_heads: int,
    kv_heads: int,
    dim: int,
    block_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    reach: Reach = FULL,
    has_sinks: bool = False,
) -> None:
    """`lengths` has the start and count of each span; a count of 0 is a padded row. Blocks without a key that the span
    sees do not exist: the table's entry is a number beyond the cache."""
    rng = random.Random(1)
    table_width = 2 + max(start + count for start, count in lengths) // block_tokens
    free = list(range(sum(-(-(start + count) // block_tokens) for start, count in lengths) + 2))
    rng.shuffle(free)
    layers, layer = 2, 1
    per_block = layers * 2 * kv_heads
    # Unused blocks, and slots behind a sequence's end, are NaN.
    pages = torch.full((len(free) * per_block, block_tokens * dim), float("nan"), device=device)
    table = torch.zeros(len(lengths), table_width, dtype=torch.int64)
    spans, shapes, token_rows, positions = [], [], [], []
    for row, (start, count) in enumerate(lengths):
        num_blocks = -(-(start + count) // block_tokens) if count else 0
        mine = [free.pop() for _ in range(num_blocks)]
        table[row, :num_blocks] = torch.tensor(mine, dtype=torch.int64)
        for number, block in enumerate(mine):
            filled = min(block_tokens, start + count - number * block_tokens)
            first = block * per_block + layer * 2 * kv_heads
            hidden = min(filled, max(0, reach.first_key(start) - number * block_tokens))
            values = torch.randn(2 * kv_heads, (filled - hidden) * dim, device=device)
            pages[first : first + 2 * kv_heads, hidden * dim : filled * dim] = values
        table[row, : reach.first_key(start) // block_tokens] = 1 << 40
        if count:
            spans.append((len(positions), count, start))
        shapes.append(SpanShape(len(positions), start, max(1, count), [block * per_block for block in mine]))
        token_rows += [row] * max(1, count)
        positions += list(range(start, start + count)) or [-1]
    pages = new_pages(pages.to(dtype), dim, kv_dtype or dtype)[layer * 2 * kv_heads :]
    q = torch.randn(len(positions), num_heads, dim, device=device).to(dtype)
    where = (torch.tensor(token_rows, device=device), torch.tensor(positions, device=device))
    finished = new_counters(device)
    cutter = Cutter.of([(num_heads, kv_heads)], block_tokens, dtype)
    singles = np.array([span for span in spans if span[1] == 1]).reshape(-1, 3).T
    longer = np.array([span for span in spans if span[1] > 1]).reshape(-1, 3).T
    num_tiles = cutter.num_tiles(longer[1])
    pieces = (
        cutter.singles(*singles, cutter.max_singles(len(singles[0]))) if singles.size else _no_pieces(),
        cutter.tiles(*longer, cutter.max_tiles(num_tiles)) if num_tiles else _no_pieces(),
    )
    padded = (torch.from_numpy(np.concatenate([some, _no_pieces(), _no_pieces()])).to(device) for some in pieces)
    on_device = PagedSpans(table.to(device), *where, *padded, (), finished, per_block, kv_heads, reach=reach)
    unused = q[:, :kv_heads]
    sinks = torch.randn(num_heads, device=device) * 3 if has_sinks else None
    found = paged_attention_triton(q.clone(), unused, unused, pages, on_device, 0.2, sinks)
    assert not finished.any()
    real = [shape for shape in shapes if shape.pages]
    groups = group_spans(real, kv_heads, block_tokens, device, torch.float64, reach=reach)
    wide = read(pages, dim, torch.float64).nan_to_num()
    expected = paged_attention_ref(q.double(), wide, groups, kv_heads, 0.2, sinks)
    is_real = where[1] >= 0
    close(found[is_real], expected[is_real])
    assert torch.equal(found[~is_real], q[~is_real]), "padding was changed"


def dense(count: int, num_heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
    """Check with k and v in the layout of a fused qkv matmul."""
    heads = torch.randn(count, num_heads + 2 * kv_heads, dim, device=device).to(dtype)
    parts = heads.split([num_heads, kv_heads, kv_heads], 1)
    found = dense_attention(parts[0].contiguous(), *parts[1:], 0.2)
    query, key, value = (part.double().transpose(0, 1) for part in parts)
    key, value = (part.repeat_interleave(num_heads // kv_heads, 0) for part in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2)
    close(found, expected.transpose(0, 1))


def _no_pieces() -> Ints:
    return np.zeros((1, FIELDS), dtype=np.int64)


def random_row_tokens(num_rows: int, max_tokens: int, device: torch.device) -> Tensor:
    """Return rows with random known tokens, and tapes that agree with them, disagree, are too old, or end early. A draft
    model's guesses are new or old."""
    rng, rows = random.Random(num_rows), []
    for _ in range(num_rows):
        token_ids = [rng.randrange(50) for _ in range(rng.randint(1, max_tokens))]
        row = pack_row(token_ids, len(token_ids) + rng.choice([0, 1, 3, 100]))
        row[TAPE_START] = start = max(0, len(token_ids) - rng.choice([0, 0, 5, WINDOW + 2]))
        guesses = token_ids[start:] + [rng.randrange(50) for _ in range(rng.randint(0, WINDOW))]
        for i in rng.sample(range(len(guesses)), rng.choice([0, 0, 1]) if guesses else 0):
            guesses[i] = rng.choice([rng.randrange(50), ~rng.randrange(50)])
        row[TAPE:MODEL] = pack_guesses(guesses[:WINDOW])
        row[MODEL_START] = len(token_ids) - rng.choice([0, 0, 1])
        row[MODEL:NEXT] = [rng.choice([rng.randrange(50), NO_GUESS]) for _ in range(MODEL_DRAFTS)]
        rows.append(row)
    return torch.tensor(rows, device=device)


def inputs(count: int, kv_heads: int, block_tokens: int, device: torch.device) -> None:
    num_rows, width = 2 * count, 9
    step = torch.stack(
        [
            torch.randperm(num_rows)[:count],
            torch.randint(-9, 50, (count,)),
            torch.randint(-1, width * block_tokens, (count,)),
        ]
    ).to(device)
    row_tokens = random_row_tokens(num_rows, width * block_tokens - 20, device)
    table = torch.randint(0, 5000, (num_rows, width), device=device)
    arguments = (step, row_tokens, table, kv_heads, block_tokens, 3 * kv_heads)
    for found, expected in zip(step_inputs_triton(*arguments), step_inputs_ref(*arguments), strict=True):
        assert torch.equal(found, expected)


def drafts(num_spans: int, device: torch.device) -> int:
    """Compare the verification of spans with 0 to 15 drafts with its reference, and then the inputs of a draft model.
    Returns how many drafts were accepted."""
    rng = random.Random(num_spans)
    heads: list[list[int]] = []
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    for row in rng.sample(range(2 * num_spans), num_spans):
        num_drafts, start = rng.choice([0, 0, 1, 3, 15]), rng.choice([-1, 0, 62, 500])
        prefill = rng.choice([0, 0, 7]) if start >= 0 else 0
        num_there, samples = rng.choice([num_drafts, rng.randint(0, num_drafts)]), int(rng.random() < 0.9)
        for j in range(1 + num_drafts):
            heads.append([len(token_ids) + prefill + j, row, samples, -1 if j else num_drafts])
        token_ids += [rng.randrange(3) for _ in range(prefill + 1 + num_drafts)]
        there = range(start, start + prefill + 1 + num_there)
        positions += [*(at if start >= 0 else -1 for at in there), *[-1] * (num_drafts - num_there)]
        first = len(token_ids) - num_drafts
        sampled += [token if rng.random() < 0.7 else rng.randrange(3) for token in [*token_ids[first:], 0]]
        if num_drafts and rng.random() < 0.3:  # a grammar ended before
            sampled[-rng.randint(1, num_drafts)] = -1
    heads += [[0, 0, 0, 0]] * 5  # padding
    sampled += [0] * 5
    arguments = tuple(torch.tensor(part, device=device) for part in (token_ids, positions, sampled))
    packed = torch.tensor(heads, device=device).T.contiguous()
    rows = [random_row_tokens(2 * num_spans, 99, device) for _ in range(2)]
    assert torch.equal(head_lengths_triton(packed, arguments[1]), head_lengths_ref(packed, arguments[1]))
    counts = verify_triton(packed, *arguments, rows[0])
    assert torch.equal(counts, verify_ref(packed, *arguments, rows[1]))
    assert torch.equal(rows[0], rows[1])
    draft_inputs(packed, *arguments, counts, rows)
    return int(counts.sum() - (counts > 0).sum())


def draft_inputs(
    heads: Tensor, token_ids: Tensor, positions: Tensor, sampled: Tensor, counts: Tensor, row_tokens: list[Tensor]
) -> None:
    """Compare the inputs and the outputs of a draft model with their references."""
    device, all_rows = heads.device, len(row_tokens[0])
    token_rows = torch.zeros_like(token_ids)
    token_rows[heads[0].where(heads[3] >= 0, 0)] = heads[1]
    undefined = sampled.where(positions[heads[0]] >= 0, 1 << 40)
    following = (token_rows, token_ids, positions, heads, undefined, row_tokens[0])
    found = next_tokens_triton(*following)
    assert torch.equal(found, next_tokens_ref(*following))
    assert int(found.max()) < 1 << 40, "a token that was not sampled is used"
    table = torch.randint(0, 900, (all_rows + 1, 8), device=device)
    table[:, -1] = torch.randint(0, 8, (all_rows + 1,), device=device)
    padded = [torch.cat([rows, rows[:1]]) for rows in row_tokens]
    for num_rows in {1, int((counts > 0).sum()) or 1, heads.shape[1]}:
        rows = draft_rows_triton(heads, counts, positions, num_rows, all_rows)
        assert torch.equal(rows, draft_rows_ref(heads, counts, positions, num_rows, all_rows))
        for number in (1, 2):
            which = torch.tensor([number], device=device)
            step = (rows, table, which, PageSizes(3, 16, 50), 70)
            made = draft_step_triton(*step)
            for found, expected in zip(made, draft_step_ref(*step), strict=True):
                assert torch.equal(found, expected)
            guesses = torch.randint(-5, 60, (num_rows,), device=device)
            for at, lengths in ((torch.zeros_like(which), rows[2]), (which, made.lengths)):
                put = [
                    function(rows, lengths, guesses, own, at, 50)
                    for function, own in zip((put_draft_triton, put_draft_ref), padded, strict=True)
                ]
                assert torch.equal(*put)
                assert torch.equal(padded[0][:-1], padded[1][:-1]), "the last row is padding"


def sampling(num_rows: int, vocab: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> int:
    """Compare token for token with sample.py on the same logits, on a CPU in float64. Returns how many rows had a
    choice."""
    rng = random.Random(seed)
    logits = (torch.randn(num_rows, vocab) * 3).to(dtype)
    logits[0, vocab // 3 :: 7] = logits[0].amax()  # equal logits: the first of them is the most likely
    logits[-1, : vocab // 2] = float("-inf")
    settings = new_settings(num_rows + 3, device)
    rows = rng.sample(range(num_rows + 3), num_rows)
    columns = []
    for row in rows:
        temperature = rng.choice([0.0, 0.7, 1.0, 1.6])
        top_k, top_p, min_p = (
            rng.choice([0, 1, 5, 40, vocab]),
            rng.choice([1.0, 0.9, 0.5]),
            rng.choice([0.0, 0.0, 0.05]),
        )
        values = (rng.randrange(1 << 62), top_k, temperature, top_p, min_p)
        settings[row] = torch.tensor(pack_settings(*values))
        columns.append((*values, rng.randint(1, 10_000)))
    seeds, top_k, temperature, top_p, min_p, lengths = map(torch.tensor, zip(*columns, strict=True))
    where = (torch.tensor(rows, device=device), lengths.to(device))
    on_device = logits.to(device)
    found = sample_rows_triton(on_device, *where, settings)
    wide = logits.double()
    warm = temperature > 0
    safe = temperature.where(warm, 1.0).double()
    sampled = sample_tokens(wide, safe, top_k, top_p.double(), min_p.double(), noise_keys(seeds, lengths))
    expected = torch.where(warm, sampled, wide.argmax(-1))
    assert found.tolist() == expected.tolist()
    plain = sample_rows_triton(on_device, *where, new_settings(num_rows + 3, device))
    assert plain.tolist() == wide.argmax(-1).tolist()
    return int(warm.sum())


def xxh3(num_blocks: int, num_kib: int, piece_kib: int, device: torch.device) -> None:
    """Integers: every bit counts."""
    blocks = torch.randint(-(2**63), 2**63 - 1, (num_blocks, num_kib, 16, 8)).to(device)
    assert torch.equal(xxh3_triton(blocks, piece_kib), xxh3_ref(blocks, piece_kib))
