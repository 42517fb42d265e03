"""Block keys: the identity of a block in every pool, tier and KV event.

A key is a chained hash: it identifies the block's tokens and all tokens before them. The root of the chain contains
everything else that must be equal before KV may be shared: model, tokenizer, KV layout, dtype and the tenant's salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from stoker.base.ids import BlockKey

_KEY_BYTES = 16
_SALT_DIGITS = 16


def root_key(fingerprint: str, salt: str = "") -> BlockKey:
    """Return the parent key of the first block of a chain. `fingerprint` identifies model, tokenizer, layout and dtype.
    The length prefixes distinguish ("ab", "c") from ("a", "bc")."""
    parts = (fingerprint.encode(), salt.encode())
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return BlockKey(sha256(framed).digest()[:_KEY_BYTES])


def salt_hash(salt: str) -> str | None:
    """Return the hash of a tenant's salt that appears in events and beside stored blocks, or None without a salt. The
    salt itself is never stored or sent."""
    return sha256(salt.encode()).hexdigest()[:_SALT_DIGITS] if salt else None


def next_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of a full block of `token_ids` that follows `parent`."""
    return BlockKey(sha256(parent + array("I", token_ids).tobytes()).digest()[:_KEY_BYTES])


def block_keys(token_ids: Sequence[int], root: BlockKey, block_tokens: int) -> list[BlockKey]:
    """Return the keys of all full blocks of `token_ids`."""
    packed = array("I", token_ids).tobytes()
    stride = 4 * block_tokens
    keys: list[BlockKey] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):
        parent = BlockKey(sha256(parent + packed[start : start + stride]).digest()[:_KEY_BYTES])
        keys.append(parent)
    return keys
