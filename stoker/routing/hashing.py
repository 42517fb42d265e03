"""Weighted rendezvous hashing.

Gateways that know the same names choose the same name for a key. Adding or removing a name moves only that name's keys.
"""

from __future__ import annotations

from hashlib import blake2b
from math import log


def uniform(*parts: str | bytes | int) -> float:
    """Return a number in (0, 1) that depends only on the parts."""
    framed = b""
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        framed += len(data).to_bytes(4, "little") + data
    return (int.from_bytes(blake2b(framed, digest_size=8).digest(), "little") + 1) / (2**64 + 2)


def rendezvous(key: str | bytes | int, name: str, weight: float = 1.0) -> float:
    """Return the rank of `name` for `key`. The name with the lowest rank is the key's home.

    A name with twice the weight is the home of twice as many keys.
    """
    return -log(uniform(key, name)) / weight
