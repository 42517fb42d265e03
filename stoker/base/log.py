"""Structured logs: each event is one JSON line with an event name and fields."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_ROOT_NAME = "stoker"
LEVELS = ("debug", "info", "warning", "error")


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": record.name.removeprefix("stoker."),
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


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
    """Write events at `level` and above to stderr, as JSON lines. A process calls this once, when it starts."""
    logger = logging.getLogger(_ROOT_NAME)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine())
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
