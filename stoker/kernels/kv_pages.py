# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What a page of the KV cache holds, and how its values are written and read.

src [tokens, kv_heads, head_dim]   pages [pages, values of a page]   index [tokens * kv_heads]: slots, see rope_write.py

A page holds one head's K or V of the tokens of one block, in the model's dtype or a narrower one. A page of 8-bit values,
float8 e4m3 or int8, is an array of bytes: the codes of the values, then one scale per token, the upper half of a float32.
The scale maps the token's largest value to the largest code. In many models, a few channels of K are much larger than
the others and decide the scores. With float8 they are nearly exact, because the largest code is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.kernels.dispatch import tl, triton

LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # for each dtype with scales
_SCALE_BYTES = 2
_MIN_SCALE = 1e-30  # of values that are all zero


def has_scales(pages: Tensor) -> bool:
    return pages.dtype in LARGEST_CODE


def page_tokens(pages: Tensor, head_dim: int) -> int:
    """Return the number of tokens in a page."""
    return pages.shape[1] // (head_dim + _SCALE_BYTES * has_scales(pages))


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes of this dtype, in the shape of x, and their scales (bfloat16), without the last dimension."""
    wide = x.float()
    largest = LARGEST_CODE[dtype]
    scale = (wide.abs().amax(-1) * (1 / largest)).clamp(min=_MIN_SCALE).bfloat16()
    codes = wide * (1 / scale.float())[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def dequantise(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # float16 could not hold the scale of small values.
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scale.to(wide)[..., None]).to(dtype)


def kv_write(src: Tensor, pages: Tensor, index: Tensor, *, may_lack_slots: bool = False) -> Tensor:
    """Write each token's heads into their slots. Return the values as the pages hold them. Slots below zero are on another
    rank."""
    rows, head_dim = src.reshape(-1, src.shape[-1]), src.shape[-1]
    held = (index >= 0).nonzero()[:, 0] if may_lack_slots else slice(None)
    index = index[held]
    if not has_scales(pages):
        if pages.dtype == torch.float16:
            rows = rows.clamp(-65504, 65504)  # a value beyond float16's range would become infinite
        stored = rows.to(pages.dtype)
        pages.view(-1, head_dim).index_put_((index,), stored[held])
        return src if pages.dtype == src.dtype else stored.to(src.dtype).view(src.shape)
    tokens = page_tokens(pages, head_dim)
    codes, scale = quantise(rows, pages.dtype)
    place = index // tokens, index % tokens
    stored_codes, stored_scales = _parts(pages, head_dim)
    stored_codes.index_put_(place, codes[held].view(torch.uint8))
    stored_scales.index_put_(place, scale[held, None].view(torch.uint8))
    return dequantise(codes, scale, src.dtype).view(src.shape)


def kv_read(pages: Tensor, index: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return the values of some pages, [pages of the index, tokens, head_dim]."""
    if not has_scales(pages):
        return pages.index_select(0, index).view(len(index), -1, head_dim).to(dtype)
    found = pages.view(torch.uint8).index_select(0, index).view(pages.dtype)
    codes, scales = _parts(found, head_dim)
    return dequantise(codes.view(pages.dtype), scales.contiguous().view(torch.bfloat16)[..., 0], dtype)


def _parts(pages: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the codes, [pages, tokens, head_dim], and of the scales, [pages, tokens, bytes]."""
    tokens = page_tokens(pages, head_dim)
    codes, scales = pages.view(torch.uint8).split([tokens * head_dim, tokens * _SCALE_BYTES], 1)
    return codes.unflatten(1, (tokens, head_dim)), scales.unflatten(1, (tokens, _SCALE_BYTES))


def kernel_pages(pages: Tensor) -> Tensor:
    """Return the pages as the kernels take them: bytes, if they have scales."""
    return pages.view(torch.uint8) if has_scales(pages) else pages


def page_options(pages: Tensor) -> dict[str, Any]:
    """Return what kernels for 8-bit pages must know of them; empty for other pages."""
    return {"PAGE": pages.shape[1], "INT8": pages.dtype == torch.int8} if has_scales(pages) else {}


@triton.jit
def load_scales(scales, is_there, TOKENS: tl.constexpr):
    """Load the scales of a page; `scales` is the address of the first. They are 0 where `is_there` is False.

    They are loaded in pairs, because Triton only prefetches loads of at least four bytes.
    """
    pairs = tl.load(scales.to(tl.pointer_type(tl.uint32)) + tl.arange(0, TOKENS // 2))
    scale = tl.interleave(pairs << 16, pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(is_there, scale, 0.0)


@triton.jit
def upper_half(scale):
    """Return the upper halves of float32 numbers, rounded to nearest. Triton's interpreter would truncate them."""
    bits = scale.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def to_codes(x, INT8: tl.constexpr):
    """Return float32 values as bytes. They are rounded here, because Triton's interpreter does not round correctly."""
    shift = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer
    if not INT8:
        # the same, times the distance between two codes
        step = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121) + 20
        shift = ((step << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = (x + shift) - shift
    return (rounded.to(tl.int8) if INT8 else rounded.to(tl.float8e4nv)).to(tl.uint8, bitcast=True)


@triton.jit
def from_codes(codes, INT8: tl.constexpr):
    """Return the float32 values of these bytes, without their scales."""
    return (codes.to(tl.int8, bitcast=True) if INT8 else codes.to(tl.float8e4nv, bitcast=True)).to(tl.float32)
