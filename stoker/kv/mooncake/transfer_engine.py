"""Mooncake's libraries, as they are loaded, and reads of its Transfer Engine that leave the cores to those who move bytes.

The engine's calls that wait ask again and again, without a pause, whether the last byte has come: that takes a core, and where
there are few, one that the bytes needed (on two, a read that rests meanwhile takes two thirds of the time). A job of one request
can be asked without waiting, so that one is asked now and then.

Nothing can be called back: a request to a peer that hangs ends after some seconds, those behind it on the same connection as much
later, and until then the engine may write. So only a few are on their way at a time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Of one request, where there is a choice: the engine's few connections take a request each, and larger ones would all end at the
# same time; what they brought would then be checksummed while the wire has nothing to do.
REQUEST_BYTES = 2 << 20

_AT_A_TIME = 8
_LOOK_EVERY_S = 0.0002
_ENDED = 1  # of transfer_check_status; 0: not yet
_ENVIRONMENT = {
    "GLOG_minloglevel": "2",  # its lines for every transfer, and every failed one, say nothing that our events do not
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",  # a master that hangs: 30 s
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # a worker that hangs: 60 s
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}


def configure_environment(further: Mapping[str, str] | None = None) -> None:
    """Before the libraries are loaded or set up, which is when they read their settings: environment variables alone. What the
    user has set stands."""
    for name, value in (_ENVIRONMENT | dict(further or {})).items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class RemoteRanges:
    """Bytes to read: of whom, addresses here, addresses there, lengths."""

    segment: str
    ours: list[int]
    theirs: list[int]
    lengths: list[int]


def read_in_order(engine: Any, all_runs: Iterable[RemoteRanges]) -> Generator[bool]:
    """For each in turn, when its read is over: True, its bytes came. The next are on their way meanwhile. Of a segment that has
    failed nothing more is asked for. Whoever has heard enough closes the iterator, which waits for what is under way."""
    under_way: deque[_PendingRead] = deque()
    failed: set[str] = set()

    def came(read: _PendingRead) -> bool:
        is_whole = read.wait()
        if not is_whole:
            failed.add(read.segment)
        return is_whole

    try:
        for runs in all_runs:
            under_way.append(_PendingRead(engine, runs, is_tried=runs.segment not in failed))
            if len(under_way) == _AT_A_TIME:
                yield came(under_way.popleft())
        while under_way:
            yield came(under_way.popleft())
    finally:
        for read in under_way:
            read.wait()


class _PendingRead:
    """Two jobs: all requests but the last one, if there are such, and the last one. The engine takes them in their order, so that
    there is little left to wait for when that one has ended."""

    def __init__(self, engine: Any, runs: RemoteRanges, *, is_tried: bool) -> None:
        self.segment = runs.segment
        self._engine = engine
        self._jobs = [
            engine.batch_transfer_async_read(runs.segment, runs.ours[part], runs.theirs[part], runs.lengths[part])
            for part in (slice(-1), slice(-1, None))
            if is_tried and runs.ours[part]
        ]

    def wait(self) -> bool:
        """Until it is over. True: all bytes came."""
        if not self._jobs:
            return False
        *others, last = self._jobs
        status = 0 if last > 0 else -1
        while status == 0:
            _stay_if_the_process_ends()
            status = self._engine.transfer_check_status(last)
            if status == 0:
                time.sleep(_LOOK_EVERY_S)
        came = [job > 0 and self._engine.get_batch_transfer_status([job]) == 0 for job in others]
        return status == _ENDED and all(came)


_process_ends = threading.Event()


@atexit.register
def _end() -> None:
    _process_ends.set()
    time.sleep(5 * _LOOK_EVERY_S)


def _stay_if_the_process_ends() -> None:
    """A thread that comes back from the engine's code when the interpreter is gone takes the process down with it."""
    if _process_ends.is_set():
        threading.Event().wait()
