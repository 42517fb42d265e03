"""Block keys of the gateway's own: a chained hash over token ids, the same whoever's engine holds the block.

Engines hash blocks in their own ways, with their own roots, and some with other block sizes. What they share are the token
ids, so their events and the conversations of clients are all hashed here, into one space of keys for each model. A key is
a hint where to look, never an identity of bytes: 64 bits that are quick to make do.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

_UNSALTED = 0x57_0C_E4


def root_key(salt_hash: str | None) -> int:
    """Where a tenant's chains begin."""
    return xxh3_64_intdigest(salt_hash.encode(), _UNSALTED) if salt_hash else _UNSALTED


def chain_keys(packed: bytes | memoryview, parent: int, stride: int) -> list[int]:
    """The keys of all full blocks of `stride` bytes; each is hashed with the one before it as the seed."""
    view = memoryview(packed)
    key = parent
    return [key := xxh3_64_intdigest(view[at : at + stride], key) for at in range(0, len(view) - stride + 1, stride)]


def token_keys(token_ids: array[int], root: int, block_tokens: int) -> list[int]:
    return chain_keys(memoryview(token_ids).cast("B"), root, token_ids.itemsize * block_tokens)
