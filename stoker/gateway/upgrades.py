"""UpgradeBoard: at most one upgrade of a fleet runs at a time, and the dashboard can ask for one and see how far it is.

The gateway restarts no worker itself. `stoker upgrade` holds the board while it runs, and writes its progress on it. `stoker up`
reads the board, and runs `stoker upgrade` when the dashboard asks for one. A holder that was killed no longer renews, and loses the
board.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.base.errors import Overloaded
from stoker.base.log import EventLog
from stoker.proto.admin_api import UpgradeStatus

_HOLD_S = 30.0  # the holder renews every few seconds
_FOLLOW_S = 15.0  # `stoker up` asks for its tasks every second; after this time without a question, it is gone
_KEPT_LINES = 20
_LINE_CHARS = 500

log = EventLog("upgrade")


@dataclass(slots=True, eq=False)
class UpgradeBoard:
    """The state of the upgrade that runs or ran last. `name` is another one after each restart of the gateway."""

    clock: Callable[[], float]
    name: str
    _number: int = 0
    _workers: Sequence[str] = ()
    _holder: str = ""
    _held_until_s: float = -math.inf
    _followed_until_s: float = -math.inf
    _outcome: str = ""
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def status(self, *, follows: bool = False) -> UpgradeStatus:
        """Return the state. `follows`: the caller carries out wishes."""
        now = self.clock()
        if follows:
            self._followed_until_s = now + _FOLLOW_S
        running = now < self._held_until_s
        was_killed = bool(self._holder) and not running
        return UpgradeStatus(
            board=self.name,
            number=self._number,
            workers=list(self._workers),
            followed=now < self._followed_until_s,
            running=running,
            outcome="interrupted" if was_killed else self._outcome,
            lines=list(self._lines),
        )

    def wish(self, workers: Sequence[str]) -> UpgradeStatus:
        """Ask for an upgrade of these workers, or of all. Raises Overloaded if one runs."""
        self._refuse_second("")
        self._number += 1
        self._workers = tuple(workers)
        return self.status()

    def hold(self, holder: str, line: str) -> UpgradeStatus:
        """Begin an upgrade, or renew the hold of one that runs. Raises Overloaded if another one runs."""
        self._refuse_second(holder)
        now = self.clock()
        if holder != self._holder:
            log.event("upgrade_began", holder=holder)
            self._holder, self._outcome = holder, ""
            self._lines.clear()
        self._held_until_s = now + _HOLD_S
        if line:
            self._lines.append(line[:_LINE_CHARS])
        return self.status()

    def release(self, holder: str, outcome: str) -> UpgradeStatus:
        """End the upgrade of this holder. Nothing happens if another one holds the board by now."""
        if holder == self._holder:
            self._held_until_s, self._holder, self._outcome = -math.inf, "", outcome[:_LINE_CHARS]
            log.event("upgrade_ended", holder=holder, outcome=self._outcome)
        return self.status()

    def _refuse_second(self, holder: str) -> None:
        if holder != self._holder and self.clock() < self._held_until_s:
            last = f" Its last message: {self._lines[-1]}." if self._lines else ""
            raise Overloaded(
                f"Another upgrade of this fleet runs ({self._holder}).{last} Wait until it has ended. If it was killed, this ends "
                f"after {_HOLD_S:g} s.",
                code="upgrade_running",
            )
