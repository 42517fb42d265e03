"""Reads through Mooncake's Transfer Engine that do not busy-wait, and the environment of Mooncake's libraries.

The engine's blocking calls poll without a pause until the last byte has arrived. That occupies a core, which is missing
for the transfer itself if there are few: on two cores, a read that sleeps between polls takes two thirds of the time.
The status of a job with one request can be polled without blocking, so this module polls it at intervals.

A request cannot be cancelled. A request to a peer that hangs ends after some seconds, requests behind it on the same
connection end that much later, and until then the engine may write into the buffers. So only a few requests are in
flight at a time.
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

# Preferred size of a request. The engine's few connections take one request each. Larger requests would all end at the
# same time, and their bytes would then be checksummed while the network is idle.
REQUEST_BYTES = 2 << 20

_MAX_IN_FLIGHT = 8
_POLL_INTERVAL_S = 0.0002
_ENDED = 1  # result of transfer_check_status; 0: not yet
_ENVIRONMENT = {
    "GLOG_minloglevel": "2",  # its log lines for every transfer add nothing to our events
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",  # default 30 s; applies to a master that hangs
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # default 60 s; applies to a worker that hangs
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
}


def configure_environment(extra: Mapping[str, str] | None = None) -> None:
    """Set the environment variables that Mooncake's libraries read when they are loaded and set up. Variables that the
    user has set are kept."""
    for name, value in (_ENVIRONMENT | dict(extra or {})).items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class RemoteRanges:
    """Byte ranges to read from one peer: local addresses, remote addresses, lengths."""

    segment: str
    ours: list[int]
    theirs: list[int]
    lengths: list[int]


def read_in_order(engine: Any, all_runs: Iterable[RemoteRanges]) -> Generator[bool]:
    """Read all ranges, and yield for each in order whether its bytes arrived, while the next ones are in flight.

    After a failure nothing more is read from the same segment. Closing the iterator early waits for the reads in
    flight.
    """
    in_flight: deque[_PendingRead] = deque()
    failed: set[str] = set()

    def arrived(read: _PendingRead) -> bool:
        is_whole = read.wait()
        if not is_whole:
            failed.add(read.segment)
        return is_whole

    try:
        for runs in all_runs:
            in_flight.append(_PendingRead(engine, runs, is_reachable=runs.segment not in failed))
            if len(in_flight) == _MAX_IN_FLIGHT:
                yield arrived(in_flight.popleft())
        while in_flight:
            yield arrived(in_flight.popleft())
    finally:
        for read in in_flight:
            read.wait()


class _PendingRead:
    """One read as two jobs: all requests but the last one, and the last one. The engine processes them in order, so
    that little is left to wait for when the last one has ended."""

    def __init__(self, engine: Any, runs: RemoteRanges, *, is_reachable: bool) -> None:
        self.segment = runs.segment
        self._engine = engine
        self._jobs = [
            engine.batch_transfer_async_read(runs.segment, runs.ours[part], runs.theirs[part], runs.lengths[part])
            for part in (slice(-1), slice(-1, None))
            if is_reachable and runs.ours[part]
        ]

    def wait(self) -> bool:
        """Wait until the read has ended. Returns True if all bytes arrived."""
        if not self._jobs:
            return False
        *others, last = self._jobs
        status = 0 if last > 0 else -1
        while status == 0:
            _block_if_exiting()
            status = self._engine.transfer_check_status(last)
            if status == 0:
                time.sleep(_POLL_INTERVAL_S)
        arrived = [job > 0 and self._engine.get_batch_transfer_status([job]) == 0 for job in others]
        return status == _ENDED and all(arrived)


_exiting = threading.Event()


@atexit.register
def _mark_exiting() -> None:
    _exiting.set()
    time.sleep(5 * _POLL_INTERVAL_S)


def _block_if_exiting() -> None:
    """Block forever if the process is exiting. A thread that returns from the engine's code after the interpreter is
    gone would crash the process."""
    if _exiting.is_set():
        threading.Event().wait()
