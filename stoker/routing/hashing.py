"""Weighted rendezvous hashing.

Gateways that know the same names choose the same name for a key. Adding or removing a name moves only that name's keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from heapq import nsmallest
from math import log
from typing import TypeVar

NameT = TypeVar("NameT", bound=str)


def uniform(*parts: str | bytes | int) -> float:
    """Return a number in (0, 1) that depends only on the parts."""
    return _uniform(b"".join(map(_framed, parts)))


def _framed(part: str | bytes | int) -> bytes:
    data = part if isinstance(part, bytes) else str(part).encode()
    return len(data).to_bytes(4, "little") + data


def _uniform(framed: bytes) -> float:
    return (int.from_bytes(blake2b(framed, digest_size=8).digest(), "little") + 1) / (2**64 + 2)


def rendezvous(key: str | bytes | int, name: str, weight: float = 1.0) -> float:
    """Return the rank of `name` for `key`. The name with the lowest rank is the key's home.

    A name with twice the weight is the home of twice as many keys.
    """
    return -log(uniform(key, name)) / weight


def nearest(key: str | bytes | int, names: Iterable[tuple[NameT, float]], count: int) -> list[NameT]:
    """Return up to `count` of the names, each with its weight, in the order of `rendezvous`."""
    framed = _framed(key)
    ranked = [(-log(_uniform(framed + _framed(name))) / weight, name) for name, weight in names]
    return [name for _, name in nsmallest(count, ranked)]
