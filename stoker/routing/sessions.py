"""Sessions: which sessions are alive on which worker, for the policies that place them.

A session is alive until it has been silent for longer than sessions here usually are: the mean pause and four times its mean
deviation, as TCP waits for an acknowledgement. A session that ends says nothing, so this is also how an end is noticed.

This is one gateway's private memory, and a hint: where it is lost or incomplete, conversations are still found by their
blocks, and new sessions go where they would have gone in a fleet without any.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.base.ids import WorkerId

_MOST_ON_A_WORKER = 16_384
_FIRST_PATIENCE_S = 300.0  # until a pause was seen
_NEW_SHARE = 1 / 32  # of a new pause, in the mean
_LONG_AGO = 100_000  # requests


class Sessions:
    def __init__(self) -> None:
        self._last_seen: dict[WorkerId, dict[str, float]] = {}  # the longest silent first
        self._pause_s: float | None = None
        self._deviation_s = 0.0
        self._requests = 0  # of sessions, and how many sessions these were
        self._begun = 0

    @property
    def patience_s(self) -> float:
        if self._pause_s is None:
            return _FIRST_PATIENCE_S
        return self._pause_s + max(4 * self._deviation_s, self._pause_s / 2)

    @property
    def mean_requests(self) -> float:
        """That a session had so far."""
        return self._requests / self._begun if self._begun else 1.0

    def alive(self, worker_id: WorkerId, now: float) -> int:
        there = self._last_seen.get(worker_id)
        if not there:
            return 0
        silent_since = now - self.patience_s
        ended: list[str] = []
        for session, last in there.items():
            if last >= silent_since and len(there) - len(ended) <= _MOST_ON_A_WORKER:
                break
            ended.append(session)
        for session in ended:
            del there[session]
        return len(there)

    def home(self, session: str, workers: Iterable[WorkerId]) -> WorkerId | None:
        """Where it was last, if it is alive."""
        return next((worker for worker in workers if session in self._last_seen.get(worker, ())), None)

    def placed(self, session: str, chosen: WorkerId, workers: Iterable[WorkerId], now: float) -> None:
        """A request of the session went to `chosen`, and might have gone to any of `workers`."""
        last = None
        for worker in workers:
            there = self._last_seen.get(worker)
            if there is not None:
                last = there.pop(session, last)
        if chosen not in self._last_seen:
            self._forget_silent(now)
            self._last_seen[chosen] = {}
        self._last_seen[chosen][session] = now
        self._requests += 1
        if self._requests > _LONG_AGO:  # what was long ago counts half
            self._requests, self._begun = self._requests // 2, max(1, self._begun // 2)
        if last is None:
            self._begun += 1
        else:
            self._saw_pause(now - last)

    def _forget_silent(self, now: float) -> None:
        """Workers without a living session are as good as unknown: also those who left the fleet, for whom nobody asks."""
        silent_since = now - self.patience_s
        for worker, there in list(self._last_seen.items()):
            if next(reversed(there.values()), silent_since) <= silent_since:
                del self._last_seen[worker]

    def _saw_pause(self, pause_s: float) -> None:
        if self._pause_s is None:
            self._pause_s, self._deviation_s = pause_s, pause_s / 2
            return
        self._deviation_s += _NEW_SHARE * (abs(pause_s - self._pause_s) - self._deviation_s)
        self._pause_s += _NEW_SHARE * (pause_s - self._pause_s)
