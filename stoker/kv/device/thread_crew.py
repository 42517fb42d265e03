"""Crew: a few threads that help whoever has bytes to move. numpy's copies, hashes and system calls run without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.base.allowance import usable_cores

S = TypeVar("S")
T = TypeVar("T")

HostBytes = NDArray[np.uint8]

_MOST_COPIERS = 4
_PIECE_BYTES = 1 << 19


def num_copiers() -> int:
    """Threads that fill a machine's memory bandwidth, the caller among them."""
    return min(_MOST_COPIERS, usable_cores())


class Crew:
    """`size` threads, of which the caller is one."""

    def __init__(self, size: int, name: str) -> None:
        self._num_helpers = size - 1
        self._pool = ThreadPoolExecutor(max(1, self._num_helpers), thread_name_prefix=name)

    def each(self, call: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Whoever is done with one takes the next: handing over every single one would cost more. Helpers that are busy with
        somebody else's are not waited for; once it is closed, the caller is alone."""
        results: dict[int, T] = {}
        left = iter(enumerate(items))

        def work() -> None:
            for at, item in left:
                results[at] = call(item)

        helpers: list[Future[None]] = []
        try:
            with suppress(RuntimeError):
                helpers += (self._pool.submit(work) for _ in range(min(self._num_helpers, len(items) - 1)))
            work()
        finally:
            # Also after an error: a helper may still use what the caller is about to give up.
            failures = [helper.exception() for helper in helpers if not helper.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure
        return [results[at] for at in range(len(items))]

    def close(self) -> None:
        self._pool.shutdown()


def copies(crew: Crew, dsts: Sequence[HostBytes], srcs: Sequence[HostBytes]) -> None:
    pieces = [(at, start) for at, src in enumerate(srcs) for start in range(0, len(src), _PIECE_BYTES)]

    def copy(piece: tuple[int, int]) -> None:
        at, start = piece
        np.copyto(dsts[at][start : start + _PIECE_BYTES], srcs[at][start : start + _PIECE_BYTES])

    crew.each(copy, pieces)
