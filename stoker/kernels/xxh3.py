# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""XXH3 (64 bits, no seed) of pieces of whole KiB, on any device: the same value as the xxhash package gives.

blocks [n, num_kib, 16, 8] int64 are KiB of 16 stripes of 8 words each. A piece is up to `piece_kib` of them. Its eight
accumulators are [n, pieces, 8], and `xxh3_digests` makes the hash of them. Integers wrap around, signed or not; a right
shift of a signed integer extends its sign and is masked.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.kernels.dispatch import tl, triton

_STRIPES, _LANES = 16, 8
# XXH3's own constants.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a"
    "51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8f"
    "f8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME_64 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_START = (
    _PRIME_32[2], _PRIME_64[0], _PRIME_64[1], _PRIME_64[2], _PRIME_64[3], _PRIME_32[1], _PRIME_64[4], _PRIME_32[0],
)  # fmt: skip
_LOW = 0xFFFFFFFF


def xxh3_ref(blocks: Tensor, piece_kib: int) -> Tensor:
    pieces = blocks.split(piece_kib, dim=1)
    return torch.stack([_piece_ref(piece) for piece in pieces], dim=1)


def _piece_ref(words: Tensor) -> Tensor:
    table = _table(words.device)
    keys, last_keys, scramble, acc = table[:128].view(16, 8), table[128:256].view(16, 8), table[256:264], table[264:]
    sums = torch.cat([_stripes_ref(words[:, :-1], keys), _stripes_ref(words[:, -1:], last_keys)], dim=1)
    for kib in range(words.shape[1] - 1):
        acc = acc + sums[:, kib]
        acc = (acc ^ ((acc >> 47) & 0x1FFFF) ^ scramble) * _PRIME_32[0]
    return acc + sums[:, -1]


def _stripes_ref(words: Tensor, keys: Tensor) -> Tensor:
    """For each KiB, return what its stripes add to the accumulators: the product of a word's halves, and the
    neighbouring word."""
    mixed = words ^ keys
    products = (mixed & _LOW) * ((mixed >> 32) & _LOW)
    neighbours = words.unflatten(3, (4, 2)).flip(4).flatten(3)
    return (products + neighbours).sum(dim=2)


@triton.jit
def _xxh3(blocks, table, out, num_kib, num_pieces, PIECE_KIB: tl.constexpr, SCRAMBLE: tl.constexpr):
    block, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stripe, lane = tl.arange(0, 16)[:, None], tl.arange(0, 8)
    words = blocks + (block * num_kib + piece * PIECE_KIB) * 128 + stripe * 8
    keys = tl.load(table + stripe * 8 + lane[None, :])
    scramble, acc = tl.load(table + 256 + lane), tl.load(table + 264 + lane)
    last = tl.minimum(num_kib - piece * PIECE_KIB, PIECE_KIB) - 1
    for kib in range(last):
        own = tl.load(words + kib * 128 + lane[None, :]) ^ keys
        next_door = tl.load(words + kib * 128 + (lane ^ 1)[None, :])
        acc += tl.sum((own & 0xFFFFFFFF) * ((own >> 32) & 0xFFFFFFFF) + next_door, axis=0)
        acc = (acc ^ ((acc >> 47) & 0x1FFFF) ^ scramble) * SCRAMBLE
    own = tl.load(words + last * 128 + lane[None, :]) ^ tl.load(table + 128 + stripe * 8 + lane[None, :])
    next_door = tl.load(words + last * 128 + (lane ^ 1)[None, :])
    acc += tl.sum((own & 0xFFFFFFFF) * ((own >> 32) & 0xFFFFFFFF) + next_door, axis=0)
    tl.store(out + (block * num_pieces + piece) * 8 + lane, acc)


def xxh3_triton(blocks: Tensor, piece_kib: int) -> Tensor:
    assert blocks.is_contiguous(), "pieces are read as one run"
    num_blocks, num_kib = blocks.shape[:2]
    num_pieces = -(-num_kib // piece_kib)
    out = torch.empty((num_blocks, num_pieces, _LANES), dtype=torch.int64, device=blocks.device)
    # One warp per piece: the stripes of a KiB are added up without leaving it.
    _xxh3[(num_blocks, num_pieces)](
        blocks, _table(blocks.device), out, num_kib, num_pieces, PIECE_KIB=piece_kib, SCRAMBLE=_PRIME_32[0], num_warps=1
    )
    return out


def xxh3_pieces(data: Tensor, piece_kib: int) -> Tensor:
    """data [n, num_bytes] uint8, contiguous, whole KiB -> accumulators [n, pieces, 8], on the same device."""
    blocks = data.view(torch.int64).view(len(data), -1, _STRIPES, _LANES)
    return xxh3_triton(blocks, piece_kib) if data.is_cuda else xxh3_ref(blocks, piece_kib)


def xxh3_digests(accs: NDArray[np.uint64], num_bytes: int) -> NDArray[np.uint64]:
    """accs [..., 8] of pieces of `num_bytes` each -> their hashes [...]."""
    keys = np.frombuffer(_SECRET, dtype="<u8", count=_LANES, offset=11)
    mixed = accs ^ keys
    start = np.uint64(num_bytes * _PRIME_64[0] & 0xFFFFFFFFFFFFFFFF)
    total = _folded_product(mixed[..., 0::2], mixed[..., 1::2]).sum(axis=-1, dtype=np.uint64) + start
    total ^= total >> np.uint64(37)
    total *= np.uint64(0x165667919E3779F9)
    digests: NDArray[np.uint64] = total ^ (total >> np.uint64(32))
    return digests


def _folded_product(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the XOR of both halves of the 128-bit product."""
    low, half = np.uint64(_LOW), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    cross = (a_low * b_low >> half) + (a_high * b_low & low) + a_low * b_high
    high = (a_high * b_low >> half) + (cross >> half) + a_high * b_high
    folded: NDArray[np.uint64] = (a * b) ^ high
    return folded


@lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """The keys of a KiB's stripes, those of a piece's last KiB (its last stripe has its own), those for scrambling, and
    the initial state."""

    def keys(offset: int) -> NDArray[np.uint64]:
        return np.frombuffer(_SECRET, dtype="<u8", count=_LANES, offset=offset)

    stripes = [keys(8 * stripe) for stripe in range(_STRIPES)]
    rows = [*stripes, *stripes[:-1], keys(len(_SECRET) - 71), keys(len(_SECRET) - 64), np.array(_START, np.uint64)]
    return torch.from_numpy(np.concatenate(rows).view(np.int64)).to(device)
