"""The time in which all sequences of a batch decode. Prefill, and the time in which only a few are left, are not part of it.

With drafts, sequences of the same length end at different times. The tokens per second over whole answers would depend on the
slowest sequence, and so on the number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench.contract import BenchmarkError

_STARTED_TOKENS = 4  # of each sequence; the last prompt is then computed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DecodeWindow(Generic[T]):
    """What happened between two steps. `before` and `after` are what the caller counted."""

    tokens: int
    seconds: float
    before: T
    after: T


def measure_window(
    steps: Iterable[Mapping[int, int]], batch: int, num_out: int, count: Callable[[], T]
) -> DecodeWindow[T]:
    """Consume all steps, each the number of new tokens by sequence. The window ends with the first answer of `num_out`
    tokens."""
    lengths = [0] * batch
    first: tuple[float, int, T] | None = None
    window: DecodeWindow[T] | None = None
    for new in steps:
        for sequence, num_tokens in new.items():
            lengths[sequence] += num_tokens
        if window is not None or not new:
            continue
        now_s = time.perf_counter()
        if first is None:
            if max(lengths) < num_out and min(lengths) >= _STARTED_TOKENS:
                first = now_s, sum(lengths), count()
        elif max(lengths) >= num_out:
            window = DecodeWindow(sum(lengths) - first[1], now_s - first[0], first[2], count())
    if lengths != [num_out] * batch:
        raise BenchmarkError(f"answers of {min(lengths)} to {max(lengths)} tokens instead of {num_out}")
    if window is None:
        raise BenchmarkError(f"answers of {num_out} tokens are too short for {batch} sequences; use --decode-tokens")
    return window
