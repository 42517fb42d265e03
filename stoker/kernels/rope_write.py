# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""From the fused qkv matmul to the inputs of attention: head norms, rotary embedding, and K and V written to the cache.

heads [tokens, heads + 2 * kv_heads, head_dim], q then k then v
    ->  q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]
cos, sin [tokens, head_dim]: the tables' rows of the tokens' positions; None where the layer does not rotate
positions [tokens], -1 is padding: a query of zeros, no KV
pages: the layer's (kv_pages.py); slots [tokens * kv_heads]: where K goes, counted from the first token of the layer's first page
norms: the weights of q's and k's norm [head_dim], and its epsilon; None where the model has none
temperature: of q; None where the layer has none

The returned k and v are rounded to what the cache holds, so that attention sees the same values whether it reads them
from the cache or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, is_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs
from stoker.kernels.kv_pages import (
    LARGEST_CODE,
    from_codes,
    kernel_pages,
    kv_write,
    page_tokens,
    to_codes,
    upper_half,
)
from stoker.kernels.norm import rms_norm
from stoker.kernels.rope import rope

_HEADS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class HeadNorms:
    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Temperature:
    """Later tokens attend more sharply: q is multiplied by 1 + scale * log(1 + (position + 1) // floor)."""

    scale: float
    floor: int

    def of(self, positions: Tensor) -> Tensor:
        """Return the factors, in float64: rounded to another dtype, they do not depend on a token's place."""
        return ((positions + 1) // self.floor).double().log1p() * self.scale + 1


def rope_write_ref(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    num_kv_heads: int,
    norms: HeadNorms | None,
    temperature: Temperature | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads = heads.shape[1] - 2 * num_kv_heads
    turned, value = heads.split([num_heads + num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        query, key = turned.split([num_heads, num_kv_heads], 1)
        turned = torch.cat([rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)], 1)
    if cos is not None and sin is not None:
        turned = rope(turned, cos, sin)
    query, key = turned.split([num_heads, num_kv_heads], 1)
    if temperature is not None:
        query = query * temperature.of(positions).to(query.dtype)[:, None, None]
    return query, kv_write(key, pages, slots), kv_write(value, pages[num_kv_heads:], slots)


@triton.jit
def _rope_write(
    heads, cos, sin, positions, pages, slots, query, query_norm, key_norm, eps, sharpness,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,
    LARGEST: tl.constexpr, INT8: tl.constexpr, ROUNDS: tl.constexpr, NORM: tl.constexpr, TURNS: tl.constexpr,
    FLOOR: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, DIM // 2)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    out = query + (token * HEADS + head)[:, None] * DIM + column[None, :]
    position = tl.load(positions + token)
    if position < 0:
        nothing = tl.zeros([AT_ONCE, DIM // 2], query.dtype.element_ty)
        tl.store(out, nothing, mask=is_query[:, None])
        tl.store(out + DIM // 2, nothing, mask=is_query[:, None])
        return
    exists = (head < HEADS + 2 * KV_HEADS)[:, None]
    src = heads + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + column[None, :]
    low = tl.load(src, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(src + DIM // 2, mask=exists, other=0.0).to(tl.float32)
    left, right = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        query_low = tl.load(query_norm + column).to(tl.float32)[None, :]
        query_high = tl.load(query_norm + DIM // 2 + column).to(tl.float32)[None, :]
        key_low = tl.load(key_norm + column).to(tl.float32)[None, :]
        key_high = tl.load(key_norm + DIM // 2 + column).to(tl.float32)[None, :]
        left = low * scale * tl.where(is_query[:, None], query_low, key_low)
        right = high * scale * tl.where(is_query[:, None], query_high, key_high)
    if TURNS:
        # Both halves of cos and sin are equal, except for the sign of sin's first half.
        turn_cos = tl.load(cos + token * DIM + column).to(tl.float32)[None, :]
        turn_sin = tl.load(sin + token * DIM + DIM // 2 + column).to(tl.float32)[None, :]
        left, right = left * turn_cos - right * turn_sin, right * turn_cos + left * turn_sin
    if FLOOR > 0:  # a temperature
        factor = 1.0 + sharpness * tl.log(1.0 + ((position + 1) // FLOOR).to(tl.float32))
        left = tl.where(is_query[:, None], left * factor, left)
        right = tl.where(is_query[:, None], right * factor, right)
    left = tl.where(is_value[:, None], low, left).to(query.dtype.element_ty)
    right = tl.where(is_value[:, None], high, right).to(query.dtype.element_ty)
    tl.store(out, left, mask=is_query[:, None])
    tl.store(out + DIM // 2, right, mask=is_query[:, None])
    kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
    is_kv = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
    slot = tl.load(slots + token * KV_HEADS + kv_head, mask=is_kv, other=0)
    page = slot // BLOCK_TOKENS + tl.where(is_value, KV_HEADS, 0)  # a layer's V follows its K
    place = slot % BLOCK_TOKENS
    cached = pages + (page * PAGE + place * DIM)[:, None] + column[None, :]
    is_changed = is_kv[:, None]
    if LARGEST > 0:  # pages with scales
        left, right = left.to(tl.float32), right.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1))
        upper = upper_half(tl.maximum(largest * (1 / LARGEST), 1e-30))
        scales = (pages + page * PAGE + BLOCK_TOKENS * DIM).to(tl.pointer_type(tl.uint16))
        tl.store(scales + place, upper, mask=is_kv)
        scale = (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)[:, None]
        left, right = to_codes(left * tl.div_rn(1.0, scale), INT8), to_codes(right * tl.div_rn(1.0, scale), INT8)
        tl.store(cached, left, mask=is_kv[:, None])
        tl.store(cached + DIM // 2, right, mask=is_kv[:, None])
        left, right = from_codes(left, INT8) * scale, from_codes(right, INT8) * scale
    else:
        if ROUNDS and pages.dtype.element_ty == tl.float16:
            left, right = tl.clamp(left, -65504.0, 65504.0), tl.clamp(right, -65504.0, 65504.0)
        left, right = left.to(pages.dtype.element_ty), right.to(pages.dtype.element_ty)
        tl.store(cached, left, mask=is_kv[:, None])
        tl.store(cached + DIM // 2, right, mask=is_kv[:, None])
        if not ROUNDS:
            is_changed = (is_kv & ~is_value)[:, None]
    tl.store(src, left.to(heads.dtype.element_ty), mask=is_changed)
    tl.store(src + DIM // 2, right.to(heads.dtype.element_ty), mask=is_changed)


def rope_write_triton(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    num_kv_heads: int,
    norms: HeadNorms | None,
    temperature: Temperature | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel. `heads` is reused: k and v stay there, k rotated, both rounded."""
    assert heads.is_contiguous()
    num_tokens, all_heads, head_dim = heads.shape
    overlap = overlaps(heads)
    query = heads.new_empty(num_tokens, all_heads - 2 * num_kv_heads, head_dim)
    _rope_write[(num_tokens, cdiv(all_heads, _HEADS_AT_ONCE))](
        heads, heads if cos is None else cos, heads if sin is None else sin, positions, kernel_pages(pages), slots, query,
        norms.query if norms else heads, norms.key if norms else heads, norms.eps if norms else 0.0,
        temperature.scale if temperature else 0.0,
        HEADS=all_heads - 2 * num_kv_heads, KV_HEADS=num_kv_heads, DIM=head_dim,
        BLOCK_TOKENS=page_tokens(pages, head_dim), PAGE=pages.shape[1],
        LARGEST=LARGEST_CODE.get(pages.dtype, 0.0), INT8=pages.dtype == torch.int8, ROUNDS=pages.dtype != heads.dtype,
        NORM=norms is not None, TURNS=cos is not None, FLOOR=temperature.floor if temperature else 0,
        AT_ONCE=_HEADS_AT_ONCE, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return query, heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]


def rope_write(
    heads: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    num_kv_heads: int,
    norms: HeadNorms | None,
    temperature: Temperature | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    run = rope_write_triton if use_triton(heads) and is_power_of_2(heads.shape[-1]) else rope_write_ref
    return run(heads, cos, sin, positions, pages, slots, num_kv_heads, norms, temperature)
