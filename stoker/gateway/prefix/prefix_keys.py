"""Prefix keys: the keys of the router's prefix index, a chained 64-bit hash over token ids.

A prefix key is not a block's identity. `BlockKey` (`stoker/kv/blocks/keys.py`) identifies a block's bytes in the GPU pool,
the tiers and the KV events of Stoker workers. The router also works with other engines, which hash blocks differently, with
other roots and block sizes. All engines report token ids, so the gateway computes its own key from them, for KV events and
for clients' conversations alike. A prefix key is only a hint which worker may hold a prefix. It never names bytes, so a
collision costs time and not correctness, and 64 bits that are fast to compute are enough.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

_UNSALTED = 0x57_0C_E4


def root_key(salt_hash: str | None) -> int:
    """Return the key that a chain with this cache salt begins with. Different salts never share keys."""
    return xxh3_64_intdigest(salt_hash.encode(), _UNSALTED) if salt_hash else _UNSALTED


def chain_keys(packed: bytes | memoryview, parent: int, stride: int) -> list[int]:
    """Return the prefix keys of all full blocks of `stride` bytes. The seed of each hash is the previous key."""
    view = memoryview(packed)
    key = parent
    return [key := xxh3_64_intdigest(view[at : at + stride], key) for at in range(0, len(view) - stride + 1, stride)]


def token_keys(token_ids: array[int], root: int, block_tokens: int) -> list[int]:
    """Return the prefix keys of all full blocks of `block_tokens` tokens."""
    return chain_keys(memoryview(token_ids).cast("B"), root, token_ids.itemsize * block_tokens)
