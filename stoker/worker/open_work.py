"""The requests that this worker has accepted and not ended, published to all gateways (`proto/work.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from stoker.proto.work import WorkChange, read_work_header


class OpenWork:
    """The open requests. `publish` is called with every change."""

    def __init__(self) -> None:
        self.publish: Callable[[WorkChange], None] = lambda change: None
        self._open: dict[int, WorkChange] = {}
        self._next = 0

    def accept(self, header: str | None, context_tokens: int, output_tokens: int) -> AcceptedWork:
        """Note a request that begins now. `header` is its gateway's `WORK_HEADER`. The caller must `end` it."""
        known = read_work_header(header)
        gateway, prefill, output, is_flex = ("", context_tokens, output_tokens, False) if known is None else known
        change = WorkChange(self._next, "accept", gateway, prefill, context_tokens, output, is_flex)
        self._next += 1
        self._open[change.number] = change
        self.publish(change)
        return AcceptedWork(self, change)

    def snapshot(self) -> list[WorkChange]:
        """Return all open requests at their latest stage."""
        return list(self._open.values())

    def _advance(self, change: WorkChange) -> None:
        if change.stage == "end":
            if self._open.pop(change.number, None) is None:
                return
        else:
            self._open[change.number] = change
        self.publish(change)


@dataclass(slots=True, eq=False)
class AcceptedWork:
    """One open request."""

    _book: OpenWork
    _change: WorkChange
    _has_token: bool = False

    def first_token(self) -> None:
        if not self._has_token:
            self._has_token = True
            self._book._advance(replace(self._change, stage="first"))

    def end(self) -> None:
        self._book._advance(replace(self._change, stage="end"))
