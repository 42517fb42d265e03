"""The tiles that `stoker tune` found on this GPU. They take precedence over the tiles that a kernel would choose itself.

Every kernel with tiles can look its own up here: a tile is a list of numbers, whose meaning is the kernel's. The tiles
are set once, before the engine captures its first step. A kernel registers a check of its tiles in `CHECKS`, because
tiles are read from a file (engine/tuning_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, order=True)
class TileKey:
    """What a tile depends on."""

    kernel: str  # "dense", or the name of a kernel for experts
    kind: str  # how the weight is stored: bf16, fp8, blocks, int4
    rows: int  # the largest number of rows (for experts: tokens) that the tile is for
    outs: int
    ins: int
    experts: int = 0
    top_k: int = 0


Numbers = tuple[int, ...]  # the fields of a tile; none means that the library is faster than the kernel

# By kernel: is this a tile that the kernel can run for this matmul?
CHECKS: dict[str, Callable[[TileKey, Numbers], bool]] = {}

_TUNED: dict[TileKey, Numbers] = {}
_CACHES: list[Any] = []


def cached_choice(function: Function) -> Function:
    """Cache a function that chooses tiles, until other tuned tiles are set."""
    cached: Any = cache(function)
    _CACHES.append(cached)
    return cached  # type: ignore[no-any-return]


def tuned_tile(key: TileKey) -> Numbers | None:
    """Return the numbers of the tuned tile, or None if this matmul was not tuned."""
    return _TUNED.get(key)


def use_tuned_tiles(tiles: Mapping[TileKey, Numbers]) -> None:
    """Use these tiles from now on, and no others."""
    _TUNED.clear()
    _TUNED.update(tiles)
    for cached in _CACHES:
        cached.cache_clear()
