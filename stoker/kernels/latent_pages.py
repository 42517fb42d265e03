"""What a page of the KV cache holds of latent attention, and how its entries are written and read.

entries [tokens, latent + rope]   pages [pages, values of a page]   index [tokens]: slots, see latent_write.py

A page holds the entries of the tokens of one block, in the model's dtype or a narrower one. A page of 8-bit values,
float8 e4m3 or int8, is an array of bytes with three parts: the codes of the latents, the rotated keys in bfloat16, and
one scale per token, as in kv_pages.py. The scale is that of the latent alone. All heads share the rotated key, and it has
no norm: with the latent's scale, or in 8 bits at all, its error would dominate that of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.kv_pages import dequantise, has_scales, kv_read, kv_write, quantise

SCALE_BYTES = 2
KEY_BYTES = 2  # of a value of the rotated key


def entry_values(pages: Tensor, latent: int, rope: int) -> int:
    """Return how many values of the pages' dtype a token has."""
    return latent + KEY_BYTES * rope + SCALE_BYTES if has_scales(pages) else latent + rope


def entry_tokens(pages: Tensor, latent: int, rope: int) -> int:
    """Return the number of tokens in a page."""
    return pages.shape[1] // entry_values(pages, latent, rope)


def entries_write(entries: Tensor, pages: Tensor, index: Tensor, latent: int) -> Tensor:
    """Write each token's entry into its slot. Return the entries as the pages hold them. Slots below zero are on another
    rank."""
    if not has_scales(pages):
        return kv_write(entries[:, None], pages, index, may_lack_slots=True)[:, 0]
    rope = entries.shape[1] - latent
    tokens = entry_tokens(pages, latent, rope)
    codes, scale = quantise(entries[:, :latent], pages.dtype)
    keys = entries[:, latent:].bfloat16()
    held = (index >= 0).nonzero()[:, 0]
    place = index[held] // tokens, index[held] % tokens
    for stored, values in zip(_parts(pages, latent, rope), (codes, keys, scale[:, None]), strict=True):
        stored.index_put_(place, values[held].view(torch.uint8))
    return torch.cat([dequantise(codes, scale, entries.dtype), keys.to(entries.dtype)], 1)


def entries_read(pages: Tensor, index: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Return the entries of some pages, [pages of the index, tokens, latent + rope]."""
    if not has_scales(pages):
        return kv_read(pages, index, latent + rope, dtype)
    found = pages.view(torch.uint8).index_select(0, index).view(pages.dtype)
    codes, keys, scales = _parts(found, latent, rope)
    scale = scales.contiguous().view(torch.bfloat16)[..., 0]
    latents = dequantise(codes.view(pages.dtype), scale, dtype)
    return torch.cat([latents, keys.contiguous().view(torch.bfloat16).to(dtype)], -1)


def _parts(pages: Tensor, latent: int, rope: int) -> list[Tensor]:
    """Return the bytes of the codes, the rotated keys and the scales, each [pages, tokens, bytes of a token]."""
    tokens, sizes = entry_tokens(pages, latent, rope), (latent, KEY_BYTES * rope, SCALE_BYTES)
    parts = pages.view(torch.uint8).split([tokens * size for size in sizes], 1)
    return [part.unflatten(1, (tokens, size)) for part, size in zip(parts, sizes, strict=True)]
