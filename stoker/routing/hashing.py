"""Weighted rendezvous hashing: everybody who knows the same names picks the same one, and a name that comes or goes moves
only its own part."""

from __future__ import annotations

from hashlib import blake2b
from math import log


def uniform(*parts: str | bytes | int) -> float:
    """In (0, 1): a function of the parts and of nothing else."""
    hashed = blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(len(data).to_bytes(4, "little") + data)
    return (int.from_bytes(hashed.digest(), "little") + 1) / (2**64 + 2)


def rendezvous(key: str | bytes | int, name: str, weight: float = 1.0) -> float:
    """The name with the least value is the key's home; a name of twice the weight is home to twice the keys."""
    return -log(uniform(key, name)) / weight
