"""HelperThreads: a few threads that help a caller to copy and hash bytes. numpy's copies, hashes and system calls run
without the GIL."""

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

_MAX_COPY_THREADS = 4
_PIECE_BYTES = 1 << 19


def num_copy_threads() -> int:
    """Return how many threads, the caller included, saturate the machine's memory bandwidth."""
    return min(_MAX_COPY_THREADS, usable_cores())


class HelperThreads:
    """Runs a function over many items on `size` threads, of which the caller is one."""

    def __init__(self, size: int, name: str) -> None:
        self._num_helpers = size - 1
        self._pool = ThreadPoolExecutor(max(1, self._num_helpers), thread_name_prefix=name)

    def each(self, call: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """Call `call` on each item and return the results in order. Each thread takes the next item when it is done
        with one, because submitting every item would cost more. The caller does not wait for helpers that are busy with
        other calls. After `close`, the caller does all items itself."""
        results: dict[int, T] = {}
        left = iter(enumerate(items))

        def work() -> None:
            for i, item in left:
                results[i] = call(item)

        helpers: list[Future[None]] = []
        try:
            with suppress(RuntimeError):
                helpers += (self._pool.submit(work) for _ in range(min(self._num_helpers, len(items) - 1)))
            work()
        finally:
            # Also after an error: a helper may still use memory that the caller is about to release.
            failures = [helper.exception() for helper in helpers if not helper.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure
        return [results[i] for i in range(len(items))]

    def close(self) -> None:
        self._pool.shutdown()


def copy_all(threads: HelperThreads, dsts: Sequence[HostBytes], srcs: Sequence[HostBytes]) -> None:
    """Copy each source into its destination, in pieces that the threads share."""
    pieces = [(i, start) for i, src in enumerate(srcs) for start in range(0, len(src), _PIECE_BYTES)]

    def copy(piece: tuple[int, int]) -> None:
        i, start = piece
        np.copyto(dsts[i][start : start + _PIECE_BYTES], srcs[i][start : start + _PIECE_BYTES])

    threads.each(copy, pieces)
