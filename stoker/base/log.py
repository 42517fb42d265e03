"""Structured logs: each event is one JSON line with an event name and fields.

A client can cause log lines and choose some of their values. So lines have a maximum length (`log_lines.py`), warnings of one event
a maximum rate (`log_limit.py`), and writing never waits (`log_output.py`).
"""

from __future__ import annotations

import logging
import time
from typing import Any

from stoker.base.log_limit import EventLimiter
from stoker.base.log_lines import log_line
from stoker.base.log_output import LogOutput

_ROOT_NAME = "stoker"
LEVELS = ("debug", "info", "warning", "error")


class _JsonLine(logging.Formatter):
    def line(self, record: logging.LogRecord) -> bytes:
        fields: dict[str, Any] = _base_fields(
            record.created, record.levelname.lower(), record.name, record.getMessage()
        )
        fields.update(getattr(record, "fields", {}))
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return log_line(fields)


def _base_fields(time_s: float, level: str, logger: str, event: str) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time_s))
    return {
        "time": f"{stamp}.{int(time_s % 1 * 1000):03d}Z",
        "level": level,
        "part": logger.removeprefix("stoker."),
        "event": event,
    }


class LogHandler(logging.Handler):
    """Writes records as JSON lines. Of warnings and errors with the same event, it writes a limited number per second."""

    def __init__(self, output: LogOutput, limiter: EventLimiter | None = None) -> None:
        super().__init__()
        self._output = output
        self._limiter = limiter or EventLimiter()
        self._json = _JsonLine()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._report(self._limiter.take_suppressed(now))
        if record.levelno >= logging.WARNING and not self._limiter.admit(f"{record.name} {record.msg}"[:200], now):
            return
        try:
            line = self._json.line(record)
        except Exception as error:  # a value whose str() raises must not end the request that logs it
            fields = _base_fields(record.created, record.levelname.lower(), record.name, str(record.msg))
            line = log_line(fields | {"unreadable_fields": type(error).__name__})
        if self._output.write(line) and (dropped := self._output.take_dropped()):
            self._output.write(
                log_line(_base_fields(time.time(), "warning", "log", "lines_dropped") | {"lines": dropped})
            )

    def flush(self) -> None:
        """Report all suppressed lines. Logging calls this when the process ends."""
        self._report(self._limiter.take_suppressed(float("inf")))

    def _report(self, suppressed: list[tuple[str, int]]) -> None:
        for name, lines in suppressed:
            part, _, event = name.partition(" ")
            fields = _base_fields(time.time(), "warning", part, "lines_suppressed")
            self._output.write(log_line(fields | {"suppressed_event": event, "lines": lines}))


class EventLog:
    """Logs the events of one component: `log.event("kv_pulled", request=request_id, blocks=num_blocks)`."""

    def __init__(self, part: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT_NAME}.{part}")

    def event(self, name: str, **fields: Any) -> None:
        self._logger.info(name, extra={"fields": fields})

    def warning(self, name: str, **fields: Any) -> None:
        self._logger.warning(name, extra={"fields": fields})

    def error(self, name: str, *, exc_info: bool | BaseException = False, **fields: Any) -> None:
        self._logger.error(name, exc_info=exc_info, extra={"fields": fields})


def set_up(level: str = "info") -> None:
    """Write events at `level` and above to stderr, as JSON lines. A process calls this once, when it starts.

    Warnings of other libraries (asyncio, aiohttp) become JSON lines too: their texts contain what clients sent.
    """
    handler = LogHandler(LogOutput())
    logger = logging.getLogger(_ROOT_NAME)
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    root = logging.getLogger()
    root.handlers = [*(one for one in root.handlers if not isinstance(one, LogHandler)), handler]
