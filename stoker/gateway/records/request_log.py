"""The request log: one line per request, written by a background thread. The request path only appends to a queue.

The lines have the format of all other log lines (`base/log.py`). If requests end faster than lines can be written, the excess
lines are dropped and counted: unlike the ledger, a log may have gaps, but it must not delay requests.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from stoker.base.log import EventLog
from stoker.base.log_lines import MAX_LINE_BYTES, log_line
from stoker.base.log_output import line_groups
from stoker.gateway.records.usage_row import UsageRow

_FLUSH_S = 0.25
_MAX_PENDING = 20_000

log = EventLog("requests")


class NoRequestLog:
    """Stands in for RequestLog when the request log is disabled."""

    def record(self, row: UsageRow) -> None:
        pass

    def close(self) -> None:
        pass


class RequestLog:
    """Writes one line per finished request, in the background."""

    def __init__(self, write: Callable[[bytes], object] | None = None, max_pending: int = _MAX_PENDING) -> None:
        self._write = write or _to_stderr
        self._rows: deque[UsageRow] = deque()
        self._max_pending = max_pending
        self._stop = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def record(self, row: UsageRow) -> None:
        if len(self._rows) < self._max_pending:
            self._rows.append(row)
        else:
            self.dropped += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        reported = 0
        lines = LineFormatter()
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_FLUSH_S)
            while self._rows:
                batch = [self._rows.popleft() for _ in range(min(len(self._rows), 1000))]
                self._write_lines(map(lines.line, batch))
            if self.dropped != reported:
                log.warning("request_lines_dropped", lines=self.dropped - reported)
                reported = self.dropped

    def _write_lines(self, lines: Iterable[bytes]) -> None:
        for group in line_groups(lines):
            try:
                self._write(group)
            except (OSError, ValueError):  # full disk or closed stderr: the lines are lost, the thread continues
                self.dropped += group.count(b"\n")


class LineFormatter:
    """Formats rows as log lines: the fields that every log line has, then the fields of the row."""

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode
        self._second = -1
        self._stamp = b""

    def line(self, row: UsageRow) -> bytes:
        end_s = row.time_s + row.e2e_ms * 1e-3
        second = int(end_s)
        if second != self._second:  # most rows of a batch end in the same second
            self._second, self._stamp = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        level = b"info" if row.status < 500 else b"warning"
        fields = (self._stamp, int((end_s - second) * 1000), level, self._encode(row)[1:])
        line = b'{"time":"%b.%03dZ","level":"%b","part":"gateway","event":"request",%b\n' % fields
        if len(line) <= MAX_LINE_BYTES and line.isascii() and b"\x7f" not in line:
            return line
        return log_line(msgspec.json.decode(line))


def _to_stderr(lines: bytes) -> None:
    """Write whole lines. This may wait for the reader of a pipe, which holds up only the request log's own thread."""
    sys.stderr.flush()  # keep the order with lines that were written as text
    while lines:
        lines = lines[os.write(sys.stderr.fileno(), lines) :]
