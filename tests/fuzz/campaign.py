"""Runs a target with mutated inputs until time is up or a bug is found, and makes the input of a bug small.

Inputs that reach new lines of Stoker's code, or a new kind of error, are kept and mutated further. Tracing lines is slow, so only
some executions are traced.
"""

from __future__ import annotations

import gc
import hashlib
import random
import re
import resource
import signal
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import stoker
from tests.fuzz.mutator import ByteMutator
from tests.fuzz.target import FuzzTarget

_PACKAGE = str(Path(stoker.__file__).parent) + "/"
CORPUS = Path(__file__).parent / "corpus"
_TRACED_SHARE, _MEASURED_SHARE = 0.1, 0.02  # of the executions: with line coverage, with tracemalloc
_MAX_POOL = 2000
_MAX_RSS_GROWTH_KIB = 512 << 10
_MINIMIZE_S = 10.0
_DIGITS = re.compile(r"[0-9]+|'[^']*'|b\"[^\"]*\"")


class Hang(BaseException):
    """An execution took too long. Not an Exception, so that no handler of the code under test catches it."""


class TooMuchMemory(AssertionError):
    """An execution took more memory than its input justifies."""


@dataclass(frozen=True)
class Failure:
    """An input and the exception that it caused."""

    data: bytes
    error: BaseException

    @property
    def kind(self) -> str:
        """The exception's type and the line of Stoker's code, or of the target, that raised it."""
        places = []
        trace = self.error.__traceback__
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if name.startswith(_PACKAGE) or "/fuzz/targets/" in name:
                places.append(f"{Path(name).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return f"{type(self.error).__name__} at {places[-1] if places else '?'}"


@dataclass
class CampaignResult:
    """What a campaign did."""

    executions: int
    seconds: float
    pool: int
    failure: Failure | None


def run_input(target: FuzzTarget, data: bytes, measure: bool = False) -> BaseException | None:
    """Execute one input within the target's bounds. Return the declared error that it caused, if any.

    Every other exception is a bug and is raised.
    """
    rng = random.Random(zlib.crc32(data))
    signal.setitimer(signal.ITIMER_REAL, target.max_s)
    if measure:
        tracemalloc.start()
    try:
        target.execute(data, rng)
        caught: BaseException | None = None
    except target.errors as error:
        caught = error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
        tracemalloc.stop()
    allowed = target.base_bytes + target.bytes_per_input_byte * len(data)
    if peak > allowed:
        raise TooMuchMemory(f"{peak} bytes for an input of {len(data)} bytes; at most {allowed} are expected")
    return caught


@contextmanager
def hang_detection() -> Iterator[None]:
    """Raise Hang in the main thread when an execution's time is over."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Hang("the execution took too long")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Campaign:
    """One run of one target."""

    def __init__(self, target: FuzzTarget, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._mutator = ByteMutator(self._rng, target.tokens, target.max_input_bytes, target.mutated_bytes)
        self._pool: list[bytes] = []
        self._features: set[object] = set()
        self._executions = 0
        self._start_rss_kib = 0

    def run(self, seconds: float) -> CampaignResult:
        """Run until the time is up or an input fails."""
        start_s = time.monotonic()
        failure = None
        with hang_detection():
            for data in [*self._target.seeds(), b""]:
                failure = failure or self._try(data, trace=True)
            self._start_rss_kib = _rss_kib()
            while failure is None and time.monotonic() - start_s < seconds:
                data = self._mutator.mutate(self._pool)
                if self._target.repair is not None and self._rng.random() < 0.8:
                    data = self._target.repair(data)
                failure = self._try(data, trace=self._rng.random() < _TRACED_SHARE)
            spent_s = time.monotonic() - start_s
            if failure is not None:
                failure = minimize(self._target, failure)
        return CampaignResult(self._executions, spent_s, len(self._pool), failure)

    def _try(self, data: bytes, trace: bool) -> Failure | None:
        self._executions += 1
        lines: set[object] = set()
        measure = not trace and self._rng.random() < _MEASURED_SHARE
        try:
            with _traced(lines if trace else None):
                caught = run_input(self._target, data, measure)
            grown_kib = _rss_kib() - self._start_rss_kib if self._start_rss_kib else 0
            if grown_kib > _MAX_RSS_GROWTH_KIB:
                raise TooMuchMemory(f"the process has grown by {grown_kib} KiB")
        except (Exception, Hang) as error:
            return Failure(data, error)
        if caught is not None:
            lines.add((type(caught), _DIGITS.sub("#", str(caught))[:80]))
        if not lines <= self._features or not self._pool:
            self._features |= lines
            if len(self._pool) >= _MAX_POOL:
                self._pool[self._rng.randrange(_MAX_POOL)] = data
            else:
                self._pool.append(data)
        return None


def minimize(target: FuzzTarget, failure: Failure) -> Failure:
    """Return a smaller input that fails in the same way. Remove ever smaller parts as long as it still fails."""
    best, until_s = failure, time.monotonic() + _MINIMIZE_S
    if isinstance(failure.error, TooMuchMemory):
        return failure
    step = max(1, len(best.data) // 2)
    while step and time.monotonic() < until_s:
        at, was = 0, len(best.data)
        while at < len(best.data) and time.monotonic() < until_s:
            smaller = _fails(target, best.data[:at] + best.data[at + step :])
            if smaller is not None and smaller.kind == best.kind:
                best = smaller
            else:
                at += step
        if len(best.data) == was or step > 1:
            step //= 2
    return best


def _fails(target: FuzzTarget, data: bytes) -> Failure | None:
    try:
        run_input(target, data)
    except (Exception, Hang) as error:
        return Failure(data, error)
    return None


def save(name: str, failure: Failure, folder: Path = CORPUS) -> Path:
    """Save the input for the corpus tests, which replay it from then on."""
    path = folder / name / f"{hashlib.sha256(failure.data).hexdigest()[:16]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(failure.data)
    return path


def _rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def _traced(lines: set[object] | None) -> Iterator[None]:
    """Collect the executed lines of Stoker's code in this thread.

    Garbage is not collected meanwhile: finalizers of unrelated objects would add lines that depend on when it happens.
    """
    if lines is None:
        yield
        return
    found: set[object] = lines

    def local(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        found.add((frame.f_code, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        return local if frame.f_code.co_filename.startswith(_PACKAGE) else None

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
