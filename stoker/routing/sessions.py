"""Sessions: which sessions are alive on which worker.

A session is alive until it has been silent for longer than sessions usually are: the mean pause between two requests plus
four times its mean deviation, as in TCP's retransmission timeout. A session does not announce its end, so this is also
how an end is noticed.

This memory is private to one gateway, and it is only a hint. Where it is lost or incomplete, conversations are still
found by their blocks, and new sessions are placed as in a fleet without sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.base.ids import WorkerId

_MAX_PER_WORKER = 16_384
_FIRST_TIMEOUT_S = 300.0  # used until a pause has been measured
_NEW_SHARE = 1 / 32  # weight of a new pause in the moving averages
_MAX_COUNTED = 100_000  # requests; beyond this the counts are halved, so that the mean follows changes


class Sessions:
    """The living sessions of each worker, and the mean pause and length of sessions. Only `placed` changes it."""

    def __init__(self) -> None:
        self._last_seen: dict[WorkerId, dict[str, float]] = {}  # by worker and session, longest silent first
        self._pause_s: float | None = None
        self._deviation_s = 0.0
        self._num_requests = 0
        self._num_sessions = 0

    @property
    def timeout_s(self) -> float:
        """How long a session may be silent before it counts as ended."""
        if self._pause_s is None:
            return _FIRST_TIMEOUT_S
        return self._pause_s + max(4 * self._deviation_s, self._pause_s / 2)

    @property
    def mean_requests(self) -> float:
        """The mean number of requests per session so far."""
        return self._num_requests / self._num_sessions if self._num_sessions else 1.0

    def alive(self, workers: Iterable[WorkerId], now: float) -> list[int]:
        """Return the number of living sessions of each worker."""
        ended_at = now - self.timeout_s
        return [_num_alive(self._last_seen.get(worker), ended_at) for worker in workers]

    def home(self, session: str, workers: Iterable[WorkerId], now: float) -> WorkerId | None:
        """Return which of these workers got the session's last request, or None if the session is new or has ended."""
        ended_at = now - self.timeout_s
        for worker in workers:
            sessions = self._last_seen.get(worker)
            if sessions is not None and sessions.get(session, ended_at) > ended_at:
                return worker
        return None

    def placed(self, session: str, chosen: Sequence[WorkerId], workers: Iterable[WorkerId], now: float) -> None:
        """Record one request of the session on the `chosen` workers, one for each leg. `workers` were the candidates."""
        ended_at = now - self.timeout_s
        last = None
        for worker in workers:
            sessions = self._last_seen.get(worker)
            if sessions:
                last = sessions.pop(session, last)
                _drop_ended(sessions, ended_at)
        for worker in chosen:
            if worker not in self._last_seen:
                self._forget_workers_without_sessions(ended_at)
                self._last_seen[worker] = {}
            self._last_seen[worker][session] = now
        self._num_requests += 1
        if self._num_requests > _MAX_COUNTED:
            self._num_requests, self._num_sessions = self._num_requests // 2, max(1, self._num_sessions // 2)
        if last is None or last <= ended_at:
            self._num_sessions += 1
        else:
            self._add_pause(now - last)

    def _forget_workers_without_sessions(self, ended_at: float) -> None:
        """Drop workers whose sessions have all ended. Among them are the workers that have left the fleet."""
        for worker, sessions in list(self._last_seen.items()):
            if next(reversed(sessions.values()), ended_at) <= ended_at:
                del self._last_seen[worker]

    def _add_pause(self, pause_s: float) -> None:
        if self._pause_s is None:
            self._pause_s, self._deviation_s = pause_s, pause_s / 2
            return
        self._deviation_s += _NEW_SHARE * (abs(pause_s - self._pause_s) - self._deviation_s)
        self._pause_s += _NEW_SHARE * (pause_s - self._pause_s)


def _num_alive(sessions: dict[str, float] | None, ended_at: float) -> int:
    if not sessions:
        return 0
    num_ended = 0
    for last_s in sessions.values():
        if last_s > ended_at:
            break
        num_ended += 1
    return len(sessions) - num_ended


def _drop_ended(sessions: dict[str, float], ended_at: float) -> None:
    ended: list[str] = []
    for session, last_s in sessions.items():
        if last_s > ended_at and len(sessions) - len(ended) <= _MAX_PER_WORKER:
            break
        ended.append(session)
    for session in ended:
        del sessions[session]
