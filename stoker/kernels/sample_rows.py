# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Logits to tokens in one launch, each row by its own settings.  logits [rows, vocab] -> token ids [rows]

The function is sample.py's: the most likely token, the first of equals, where the temperature is 0; else the one where the
sum of weights passes uniform(seed, position) of the whole. Nothing is sorted: the weight that top_k or top_p cuts at is
found by halving the space of float32's bits. Sums are in float64, as there; a weight is exp of the same argument, whose
last bit may differ from torch's: an answer can differ only where the drawn number, or a cut, lies within that bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.dispatch import tl, triton

_BLOCK = 4096
_SETTINGS = 5


def pack_settings(seed: int, top_k: int, temperature: float, top_p: float, min_p: float) -> list[int]:
    """A row of the settings' table: integers, and the bits of floats."""
    return [seed, top_k, *np.array([temperature, top_p, min_p], dtype=np.float64).view(np.int64).tolist()]


def new_settings(num_rows: int, device: torch.device) -> Tensor:
    return torch.zeros(num_rows, _SETTINGS, dtype=torch.int64, device=device)


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _weights(logits, start, column, vocab, temperature, top):
    x = tl.load(logits + start + column, mask=start + column < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp(tl.div_rn(x, temperature) - tl.div_rn(top, temperature))


@triton.jit
def _cut(logits, vocab, temperature, top, limit, COUNT: tl.constexpr, lowest, BLOCK: tl.constexpr):
    """The least weight v (as bits, from `lowest` on) such that what lies above v has a count, or a sum, below `limit`. Three
    tries a pass."""
    column = tl.arange(0, BLOCK)
    low = lowest
    high = tl.full([], 0x3F800000, tl.int32)  # 1.0, the largest weight: nothing lies above it
    while low < high:
        quarter = (high - low) // 4
        try_1, try_2, try_3 = low + quarter, low + 2 * quarter, low + 3 * quarter
        value_1 = try_1.to(tl.float32, bitcast=True)
        value_2 = try_2.to(tl.float32, bitcast=True)
        value_3 = try_3.to(tl.float32, bitcast=True)
        above_1 = tl.zeros([BLOCK], tl.float64)
        above_2 = tl.zeros([BLOCK], tl.float64)
        above_3 = tl.zeros([BLOCK], tl.float64)
        for start in range(0, vocab, BLOCK):
            weight = _weights(logits, start, column, vocab, temperature, top)
            amount = tl.where(weight > 0, 1.0, 0.0).to(tl.float64) if COUNT else weight.to(tl.float64)
            above_1 += tl.where(weight > value_1, amount, 0.0)
            above_2 += tl.where(weight > value_2, amount, 0.0)
            above_3 += tl.where(weight > value_3, amount, 0.0)
        if tl.sum(above_1) < limit:
            high = try_1
        elif tl.sum(above_2) < limit:
            low = try_1 + 1
            high = try_2
        elif tl.sum(above_3) < limit:
            low = try_2 + 1
            high = try_3
        else:
            low = try_3 + 1
    return low


@triton.jit
def _sums(logits, vocab, temperature, top, cut, BLOCK: tl.constexpr):
    """Of the weights: above `cut`, how many those are, and from `cut` on."""
    column = tl.arange(0, BLOCK)
    above = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.float64)
    kept = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        weight = _weights(logits, start, column, vocab, temperature, top)
        wide = weight.to(tl.float64)
        above += tl.where(weight > cut, wide, 0.0)
        count += tl.where(weight > cut, 1.0, 0.0).to(tl.float64)
        kept += tl.where(weight >= cut, wide, 0.0)
    return tl.sum(above), tl.sum(count), tl.sum(kept)


@triton.jit
def _sample_rows(logits, rows, lengths, settings, last_token, out, vocab, FILTERED: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    length = tl.load(lengths + number)
    if length <= 0:
        return
    row = tl.load(rows + number)
    logits += number.to(tl.int64) * vocab
    seed = tl.load(settings + row * 5)
    top_k = tl.load(settings + row * 5 + 1)
    temperature = tl.load(settings + row * 5 + 2).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(settings + row * 5 + 3).to(tl.float64, bitcast=True)
    min_p = tl.load(settings + row * 5 + 4).to(tl.float64, bitcast=True).to(tl.float32)
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = column
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < vocab, other=float("-inf")).to(tl.float32)
        best_at = tl.where(x > best, start + column, best_at)
        best = tl.maximum(x, best)
    top = tl.max(best)
    token = tl.min(tl.where(best == top, best_at, vocab)).to(tl.int64)
    if temperature > 0:
        cut = tl.full([], 0, tl.int32)
        if FILTERED:
            has_k = (top_k > 0) & (top_k < vocab)
            if has_k:
                cut = _cut(logits, vocab, temperature, top, top_k.to(tl.float64), True, cut, BLOCK)
            if top_p < 1:
                value = cut.to(tl.float32, bitcast=True)
                above, count, whole = _sums(logits, vocab, temperature, top, value, BLOCK)
                if has_k:  # of those that are equal to the cut, as many as make up k
                    whole = above + (top_k.to(tl.float64) - count) * value.to(tl.float64)
                cut = _cut(logits, vocab, temperature, top, top_p * whole, False, cut, BLOCK)
        least = tl.maximum(cut.to(tl.float32, bitcast=True), min_p)
        above, count, whole = _sums(logits, vocab, temperature, top, least, BLOCK)
        mixed = _mix(_mix(seed) + length * -7046029254386353131)
        uniform = ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
        # Never all of it: then no token would pass it.
        target = tl.minimum(uniform, 1.0 - 4.440892098500626e-16) * whole
        before = tl.zeros([], tl.float64)
        found_start = tl.zeros([], tl.int32)
        found_before = tl.zeros([], tl.float64)
        is_found = tl.zeros([], tl.int32)
        for start in range(0, vocab, BLOCK):
            weight = _weights(logits, start, column, vocab, temperature, top)
            mass = tl.sum(tl.where(weight >= least, weight.to(tl.float64), 0.0))
            passes = (is_found == 0) & (before + mass > target)
            found_start = tl.where(passes, start, found_start)
            found_before = tl.where(passes, before, found_before)
            is_found = tl.where(passes, 1, is_found)
            before += mass
        weight = _weights(logits, found_start, column, vocab, temperature, top)
        weight = tl.where(weight >= least, weight.to(tl.float64), 0.0)
        passed = found_before + tl.cumsum(weight) > target
        first = tl.min(tl.where(passed & (weight > 0), column, BLOCK))
        last = tl.max(tl.where(weight > 0, column, 0))
        token = (found_start + tl.where(first < BLOCK, first, last)).to(tl.int64)
    tl.store(out + number, token)
    tl.store(last_token + row, token)


def sample_rows_triton(
    logits: Tensor, rows: Tensor, lengths: Tensor, settings: Tensor, last_token: Tensor, is_filtered: bool
) -> Tensor:
    """`lengths`: tokens before the one that is drawn, 0 for padding. `is_filtered`: some row has a top_k or top_p. What is
    drawn is the rows' last token, too."""
    assert logits.is_contiguous()
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _sample_rows[(len(logits),)](
        logits, rows, lengths, settings, last_token, out, vocab, FILTERED=is_filtered, BLOCK=block, num_warps=8
    )
    return out
