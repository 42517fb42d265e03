# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Samples tokens from logits, each row by its own settings, over many programs.  logits [rows, vocab] -> token ids
[rows]

The function is that of sample.py. If the temperature is 0, it returns the most likely token, the first of equals.
Otherwise it returns the token with the largest quotient of weight and noise(seed, position, token id).

Nothing is sorted. The logit at which top_k or top_p cuts is found in the order of its bits, a few bits per pass over
the logits. A row is cut into chunks, one program each. A pass is one launch, and leaves each chunk's result for the
next pass. Programs with nothing to do, as for greedy rows, exit at once.

Sums and noise are in float64, as in the reference. A weight is exp of the same argument, whose last bit may differ from
torch's. So a result can differ only where two quotients, or a cut, lie within that bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton, wait_for_inputs

_BLOCK = 8192
_SETTINGS = 5
# A pass counts the logits above 15 values, which gives four bits of the cut, and also those above the cut of the search
# before.
_BITS, _COLUMNS = 4, 17
# With more rows than this, a chunk is several blocks: enough programs are busy, and fewer have to exit.
_MANY_ROWS, _REPEATS = 64, 4


def pack_settings(seed: int, top_k: int, temperature: float, top_p: float, min_p: float) -> list[int]:
    """Return a row of the settings table: integers, and the bits of floats."""
    return [seed, top_k, *np.array([temperature, top_p, min_p], dtype=np.float64).view(np.int64).tolist()]


def new_settings(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, _SETTINGS, dtype=torch.int64, device=device)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _read(logits, at, vocab):
    return tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight(x, temperature, top):
    return tl.exp(tl.div_rn(x, temperature) - tl.div_rn(top, temperature))


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Return an integer per logit, in the same order. For bfloat16, the upper half of the float32 bits is enough."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the logit that has this key."""
    bits = (key << SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT << SHIFT))).to(tl.float32, bitcast=True)


@triton.jit
def _temperature(settings, row):
    return tl.load(settings + row * 5 + 2).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _has_k(settings, row, vocab):
    top_k = tl.load(settings + row * 5 + 1)
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def _top_p(settings, row):
    return tl.load(settings + row * 5 + 3).to(tl.float64, bitcast=True)


@triton.jit
def _top(tops, number, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr):
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.max(tl.load(tops + number * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf")))


@triton.jit
def _column(sums, at, column, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return one column of a pass, over all chunks."""
    chunk = tl.arange(0, CHUNKS_PADDED)
    return tl.sum(tl.load(sums + (at * CHUNKS + chunk) * COLUMNS + column, mask=chunk < CHUNKS, other=0.0))


@triton.jit
def _narrowed(bounds, sums, at, limit, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where the cut lies after a pass: the smallest key above which there is less than `limit`."""
    low, high = tl.load(bounds + 2 * at), tl.load(bounds + 2 * at + 1)
    chunk, number = tl.arange(0, CHUNKS_PADDED)[:, None], tl.arange(0, 16)[None, :]
    place = sums + (at * CHUNKS + chunk) * COLUMNS + number
    above = tl.sum(tl.load(place, mask=(chunk < CHUNKS) & (number < 15), other=0.0), 0)
    step = (high - low) // 16 + 1
    passed = tl.sum(tl.where(above >= limit, 1, 0)).to(tl.int64)
    return low + passed * step, tl.minimum(low + (passed + 1) * step - 1, high)


@triton.jit
def _limit(
    settings, row, sums, first, has_k, cut, temperature, top,
    SHIFT: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the sum of weights that top_p keeps. `first` marks the first pass for it."""
    whole = _column(sums, first, 15, CHUNKS, CHUNKS_PADDED, COLUMNS)
    if has_k:  # of the tokens equal to the cut, only the number that completes k
        count = _column(sums, first, 16, CHUNKS, CHUNKS_PADDED, COLUMNS)
        top_k = tl.load(settings + row * 5 + 1).to(tl.float64)
        whole += (top_k - count) * _weight(_value(cut, SHIFT), temperature, top).to(tl.float64)
    return tl.maximum(_top_p(settings, row) * whole, 1e-300)


@triton.jit
def _cut_of_k(
    settings, row, bounds, sums, number, count, PASSES: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    top_k = tl.load(settings + row * 5 + 1).to(tl.float64)
    low, _high = _narrowed(bounds, sums, (PASSES - 1) * count + number, top_k, CHUNKS, CHUNKS_PADDED, COLUMNS)
    return low


@triton.jit
def _find_tops(
    logits, lengths, tops, places, vocab, CHUNKS: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find each chunk's largest logit, and the first place where it occurs."""
    wait_for_inputs(OVERLAP)
    number, chunk = tl.program_id(0), tl.program_id(1)
    if tl.load(lengths + number) <= 0:
        return
    logits += number.to(tl.int64) * vocab
    start = chunk * (REPEAT * BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = start + tl.arange(0, BLOCK)
    for repeat in range(REPEAT):
        at = start + repeat * BLOCK + tl.arange(0, BLOCK)
        x = _read(logits, at, vocab)
        best_at = tl.where(x > best, at, best_at)
        best = tl.maximum(x, best)
    top = tl.max(best)
    tl.store(tops + number * CHUNKS + chunk, top)
    tl.store(places + number * CHUNKS + chunk, tl.min(tl.where(best == top, best_at, vocab)))


@triton.jit
def _search(
    logits, rows, lengths, settings, tops, bounds, sums, vocab, turn,
    MASS: tl.constexpr, PASSES: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr,
    REPEAT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One pass of the search for top_k's cut or, with MASS, of the following search for top_p's: how much of a chunk
    lies above each of 15 keys. `turn` is the pass's number, a float because Triton specialises kernels for some
    integers."""
    wait_for_inputs(OVERLAP)
    number, chunk, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if tl.load(lengths + number) <= 0:
        return
    row = tl.load(rows + number)
    temperature, has_k = _temperature(settings, row), _has_k(settings, row, vocab)
    is_wanted = has_k
    if MASS:
        is_wanted = _top_p(settings, row) < 1
    if (temperature == 0) | (is_wanted == 0):
        return
    top = _top(tops, number, CHUNKS, CHUNKS_PADDED)
    this = (tl.zeros([], tl.float32) + turn).to(tl.int32)
    low = tl.full([], -2139095041, tl.int64) >> SHIFT  # minus infinity
    high = _key(top, SHIFT).to(tl.int64)
    cut = low
    limit = tl.load(settings + row * 5 + 1).to(tl.float64)
    if MASS:
        if has_k:
            cut = _cut_of_k(settings, row, bounds, sums, number, count, PASSES, CHUNKS, CHUNKS_PADDED, COLUMNS)
            low = cut
        if this > 0:
            limit = _limit(
                settings, row, sums, PASSES * count + number, has_k, cut, temperature, top,
                SHIFT, CHUNKS, CHUNKS_PADDED, COLUMNS,
            )  # fmt: skip
        this += PASSES
    at_pass = this * count + number
    if turn > 0.0:
        low, high = _narrowed(bounds, sums, at_pass - count, limit, CHUNKS, CHUNKS_PADDED, COLUMNS)
    if chunk == 0:
        tl.store(bounds + 2 * at_pass, low)
        tl.store(bounds + 2 * at_pass + 1, high)
    step = (high - low) // 16 + 1
    logits += number.to(tl.int64) * vocab
    column = tl.arange(0, 32)
    found = tl.zeros([32], tl.float64)
    for repeat in range(REPEAT):
        at = (chunk * REPEAT + repeat) * BLOCK + tl.arange(0, BLOCK)
        x = _read(logits, at, vocab)
        key = _key(x, SHIFT)
        amount = tl.where(at < vocab, 1.0, 0.0).to(tl.float64)
        is_above = (key > cut.to(tl.int32)) | (has_k == 0)  # of what top_k keeps
        num_above = tl.sum(tl.where(is_above, amount, 0.0))
        if MASS:
            amount = _weight(x, temperature, top).to(tl.float64)
        found += tl.where(column == 15, tl.sum(tl.where(is_above, amount, 0.0)), 0.0)
        found += tl.where(column == 16, num_above, 0.0)
        for i in tl.static_range(15):
            least = tl.minimum(low + (i + 1) * step - 1, high).to(tl.int32)
            above = tl.sum(tl.where(key > least, amount, 0.0))
            found += tl.where(column == i, above, 0.0)
    tl.store(sums + (at_pass * CHUNKS + chunk) * COLUMNS + column, found, mask=column < COLUMNS)


@triton.jit
def _least(
    settings, row, bounds, sums, number, count, vocab, temperature, top,
    PASSES: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the smallest weight that is kept."""
    least = tl.load(settings + row * 5 + 4).to(tl.float64, bitcast=True).to(tl.float32)
    has_k, cut = _has_k(settings, row, vocab), tl.full([], 0, tl.int64)
    if has_k:
        cut = _cut_of_k(settings, row, bounds, sums, number, count, PASSES, CHUNKS, CHUNKS_PADDED, COLUMNS)
    if _top_p(settings, row) < 1:
        limit = _limit(
            settings, row, sums, PASSES * count + number, has_k, cut, temperature, top,
            SHIFT, CHUNKS, CHUNKS_PADDED, COLUMNS,
        )  # fmt: skip
        cut, _high = _narrowed(bounds, sums, (2 * PASSES - 1) * count + number, limit, CHUNKS, CHUNKS_PADDED, COLUMNS)
        least = tl.maximum(least, _weight(_value(cut, SHIFT), temperature, top))
    elif has_k:
        least = tl.maximum(least, _weight(_value(cut, SHIFT), temperature, top))
    return least


@triton.jit
def _kept(logits, at, vocab, temperature, top, least):
    weight = _weight(_read(logits, at, vocab), temperature, top)
    return tl.where((weight >= least) & (at < vocab), weight, 0.0).to(tl.float64)


@triton.jit
def _score(
    logits, rows, lengths, settings, tops, bounds, sums, scores, places, vocab,
    PASSES: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, REPEAT: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Find each chunk's largest quotient of weight and noise, and the first place where it occurs. Greedy rows have
    `places` already."""
    wait_for_inputs(OVERLAP)
    number, chunk, count = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    length = tl.load(lengths + number)
    if length <= 0:
        return
    row = tl.load(rows + number)
    temperature = _temperature(settings, row)
    if temperature == 0:
        return
    top = _top(tops, number, CHUNKS, CHUNKS_PADDED)
    least = _least(
        settings, row, bounds, sums, number, count, vocab, temperature, top,
        PASSES, SHIFT, CHUNKS, CHUNKS_PADDED, COLUMNS,
    )  # fmt: skip
    key = _mix(_mix(tl.load(settings + row * 5)) + length * -7046029254386353131)
    logits += number.to(tl.int64) * vocab
    best = tl.full([BLOCK], -1.0, tl.float64)
    best_at = chunk * (REPEAT * BLOCK) + tl.arange(0, BLOCK)
    for repeat in range(REPEAT):
        at = (chunk * REPEAT + repeat) * BLOCK + tl.arange(0, BLOCK)
        mixed = _mix(key + at.to(tl.int64) * -7046029254386353131)
        uniform = (((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
        noise = tl.maximum(-tl.log(1.0 - uniform), 1e-300)
        score = _kept(logits, at, vocab, temperature, top, least) / noise
        best_at = tl.where(score > best, at, best_at)
        best = tl.maximum(score, best)
    largest = tl.max(best)
    tl.store(scores + number * CHUNKS + chunk, largest)
    tl.store(places + number * CHUNKS + chunk, tl.min(tl.where(best == largest, best_at, vocab)))


@triton.jit
def _pick_tokens(
    rows, lengths, settings, tops, scores, places, out, vocab,
    CHUNKS: tl.constexpr, CHUNKS_PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Take the place of the best chunk: by logit for greedy rows, by score for others."""
    wait_for_inputs(OVERLAP)
    number = tl.program_id(0)
    if tl.load(lengths + number) <= 0:
        return
    chunk = tl.arange(0, CHUNKS_PADDED)
    here, is_chunk = number * CHUNKS + chunk, chunk < CHUNKS
    best = tl.load(tops + here, mask=is_chunk, other=float("-inf")).to(tl.float64)
    if _temperature(settings, tl.load(rows + number)) > 0:
        best = tl.load(scores + here, mask=is_chunk, other=-1.0)
    at = tl.load(places + here, mask=is_chunk, other=vocab)
    tl.store(out + number, tl.min(tl.where(best == tl.max(best), at, vocab)).to(tl.int64))


def sample_rows_triton(logits: Tensor, rows: Tensor, lengths: Tensor, settings: Tensor) -> Tensor:
    """Sample one token per row of logits. `rows` are their rows in `settings`, `lengths` the tokens before the sampled one,
    0 for padding."""
    assert logits.is_contiguous()
    num_rows, vocab = logits.shape
    block = min(_BLOCK, next_power_of_2(vocab))
    blocks = cdiv(vocab, block)
    repeat = 1 if num_rows <= _MANY_ROWS else _REPEATS
    chunks = cdiv(blocks, repeat)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    passes = (32 - shift) // _BITS
    found = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    bounds = found.new_empty(2 * passes, num_rows, 2)
    sums = logits.new_empty(2 * passes, num_rows, chunks, _COLUMNS, dtype=torch.float64)
    scores = sums.new_empty(num_rows, chunks)
    tops, places = logits.new_empty(num_rows, chunks, dtype=torch.float32), found.new_empty(num_rows, chunks)
    overlap = overlaps(logits)
    cut = {"CHUNKS": chunks, "REPEAT": repeat, "BLOCK": block}
    common = {
        **cut, "CHUNKS_PADDED": next_power_of_2(chunks), "PASSES": passes, "SHIFT": shift, "COLUMNS": _COLUMNS,
    }  # fmt: skip
    launch = {"OVERLAP": overlap, "num_warps": 8, "launch_pdl": overlap}
    where = (logits, rows, lengths, settings, tops)
    grid = (num_rows, chunks)
    _find_tops[grid](logits, lengths, tops, places, vocab, **cut, **launch)
    for is_mass in (False, True):
        for number in range(passes):
            _search[grid](*where, bounds, sums, vocab, float(number), MASS=is_mass, **common, **launch)
    _score[grid](*where, bounds, sums, scores, places, vocab, **common, **launch)
    _pick_tokens[(num_rows,)](
        rows, lengths, settings, tops, scores, places, found, vocab,
        CHUNKS=chunks, CHUNKS_PADDED=next_power_of_2(chunks), **launch,
    )  # fmt: skip
    return found
