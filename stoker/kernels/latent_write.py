# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""From MLA's projections to the inputs of attention: the latent's norm, rotary embedding, and the entry of the KV cache.

q [tokens, heads, nope + rope]: the last `rope` values of each head are rotated in place
kv [tokens, latent + rope]   ->  entries, like kv: the normed latent and the rotated key, as the cache holds them
cos, sin [tokens, rope]; positions [tokens], -1 is padding: a query of zeros, no KV
pages: the layer's (latent_pages.py); slots [tokens], below zero: on another rank
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.dispatch import (
    cdiv,
    is_power_of_2,
    next_power_of_2,
    overlaps,
    tl,
    triton,
    use_triton,
    wait_for_inputs,
)
from stoker.kernels.kv_pages import LARGEST_CODE, from_codes, kernel_pages, to_codes, upper_half
from stoker.kernels.latent_pages import entries_write, entry_tokens
from stoker.kernels.linear import Norm
from stoker.kernels.norm import rms_norm
from stoker.kernels.rope import rope

_HEADS_AT_ONCE = 8


def latent_write_ref(
    q: Tensor, kv: Tensor, norm: Norm, cos: Tensor, sin: Tensor, positions: Tensor, pages: Tensor, slots: Tensor
) -> Tensor:
    width = cos.shape[1]
    latent, key = kv.split([kv.shape[1] - width, width], 1)
    q[..., -width:] = rope(q[..., -width:], cos, sin)
    entries = torch.cat([rms_norm(latent, norm.weight, norm.eps), rope(key[:, None], cos, sin)[:, 0]], 1)
    return entries_write(entries, pages, slots, latent.shape[1])


@triton.jit
def _latent_write(
    q, kv, norm, cos, sin, positions, pages, slots, entries, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, LATENT: tl.constexpr, BLOCK_LATENT: tl.constexpr, ROPE: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr, LARGEST: tl.constexpr, INT8: tl.constexpr,
    ROUNDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ROPE // 2)
    position = tl.load(positions + token)
    # Both halves of cos and sin are equal, except for the sign of sin's first half.
    turn_cos = tl.load(cos + token * ROPE + column).to(tl.float32)
    turn_sin = tl.load(sin + token * ROPE + ROPE // 2 + column).to(tl.float32)
    if tl.program_id(1) == 0:
        src = kv + token * (LATENT + ROPE)
        value = tl.arange(0, BLOCK_LATENT)
        inside = value < LATENT
        wide = tl.load(src + value, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / LATENT + eps)
        found = wide * scale * tl.load(norm + value, mask=inside, other=0.0).to(tl.float32)
        found = found.to(kv.dtype.element_ty)
        low = tl.load(src + LATENT + column).to(tl.float32)
        high = tl.load(src + LATENT + ROPE // 2 + column).to(tl.float32)
        left = (low * turn_cos - high * turn_sin).to(kv.dtype.element_ty)
        right = (high * turn_cos + low * turn_sin).to(kv.dtype.element_ty)
        slot = tl.load(slots + token).to(tl.int64)
        is_held = (position >= 0) & (slot >= 0)
        if LARGEST > 0:  # pages with scales
            found, left, right = found.to(tl.float32), left.to(tl.float32), right.to(tl.float32)
            upper = upper_half(tl.maximum(tl.max(tl.abs(found)) * (1 / LARGEST), 1e-30))
            scale = (upper.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
            codes, low, high = to_codes(found * tl.div_rn(1.0, scale), INT8), upper_half(left), upper_half(right)
            page, place = pages + slot // BLOCK_TOKENS * PAGE, slot % BLOCK_TOKENS
            keys = (page + BLOCK_TOKENS * LATENT).to(tl.pointer_type(tl.uint16)) + place * ROPE
            scales = (page + BLOCK_TOKENS * (LATENT + 2 * ROPE)).to(tl.pointer_type(tl.uint16))
            if is_held:
                tl.store(page + place * LATENT + value, codes, mask=inside)
                tl.store(keys + column, low)
                tl.store(keys + ROPE // 2 + column, high)
                tl.store(scales + place, upper)
            found = from_codes(codes, INT8) * scale
            left = (low.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
            right = (high.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            if ROUNDS:
                if pages.dtype.element_ty == tl.float16:
                    found = tl.clamp(found.to(tl.float32), -65504.0, 65504.0)
                    left, right = (
                        tl.clamp(left.to(tl.float32), -65504.0, 65504.0),
                        tl.clamp(right.to(tl.float32), -65504.0, 65504.0),
                    )
                found = found.to(pages.dtype.element_ty)
                left, right = left.to(pages.dtype.element_ty), right.to(pages.dtype.element_ty)
            place = pages + slot * (LATENT + ROPE)
            if is_held:
                tl.store(place + value, found, mask=inside)
                tl.store(place + LATENT + column, left)
                tl.store(place + LATENT + ROPE // 2 + column, right)
        entry = entries + token * (LATENT + ROPE)
        tl.store(entry + value, found.to(entries.dtype.element_ty), mask=inside)
        tl.store(entry + LATENT + column, left.to(entries.dtype.element_ty))
        tl.store(entry + LATENT + ROPE // 2 + column, right.to(entries.dtype.element_ty))
    else:
        head = (tl.program_id(1) - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        exists = (head < HEADS)[:, None]
        mine = q + (token * HEADS + head)[:, None] * DIM + column[None, :]
        if position < 0:
            nothing = tl.zeros([AT_ONCE, ROPE // 2], q.dtype.element_ty)
            for start in tl.static_range(0, DIM, ROPE // 2):
                tl.store(mine + start, nothing, mask=exists & (start + column < DIM)[None, :])
        else:
            turned = mine + (DIM - ROPE)
            low = tl.load(turned, mask=exists, other=0.0).to(tl.float32)
            high = tl.load(turned + ROPE // 2, mask=exists, other=0.0).to(tl.float32)
            left = low * turn_cos[None, :] - high * turn_sin[None, :]
            right = high * turn_cos[None, :] + low * turn_sin[None, :]
            tl.store(turned, left.to(q.dtype.element_ty), mask=exists)
            tl.store(turned + ROPE // 2, right.to(q.dtype.element_ty), mask=exists)


def latent_write_triton(
    q: Tensor, kv: Tensor, norm: Norm, cos: Tensor, sin: Tensor, positions: Tensor, pages: Tensor, slots: Tensor
) -> Tensor:
    assert q.is_contiguous()
    assert kv.is_contiguous()
    (num_tokens, num_heads, head_dim), width, overlap = q.shape, cos.shape[1], overlaps(q)
    latent, entries = kv.shape[1] - width, torch.empty_like(kv)
    _latent_write[(num_tokens, 1 + cdiv(num_heads, _HEADS_AT_ONCE))](
        q, kv, norm.weight, cos, sin, positions, kernel_pages(pages), slots, entries, norm.eps,
        HEADS=num_heads, DIM=head_dim, LATENT=latent, BLOCK_LATENT=next_power_of_2(latent), ROPE=width,
        AT_ONCE=_HEADS_AT_ONCE, BLOCK_TOKENS=entry_tokens(pages, latent, width), PAGE=pages.shape[1],
        LARGEST=LARGEST_CODE.get(pages.dtype, 0.0), INT8=pages.dtype == torch.int8, ROUNDS=pages.dtype != kv.dtype,
        OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return entries


def latent_write(
    q: Tensor, kv: Tensor, norm: Norm, cos: Tensor, sin: Tensor, positions: Tensor, pages: Tensor, slots: Tensor
) -> Tensor:
    run = latent_write_triton if use_triton(q) and is_power_of_2(cos.shape[1]) else latent_write_ref
    return run(q, kv, norm, cos, sin, positions, pages, slots)
