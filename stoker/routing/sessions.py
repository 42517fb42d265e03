"""Sessions: which sessions are alive on which worker.

A session is alive until it has been silent for longer than sessions usually are: the mean pause between two requests plus
four times its mean deviation, as in TCP's retransmission timeout. A session does not announce its end, so this is also
how an end is noticed.

This memory is private to one gateway, and it is only a hint. Where it is lost or incomplete, conversations are still
found by their blocks, and new sessions are placed as in a fleet without sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from stoker.base.ids import WorkerId

_MAX_PER_WORKER = 16_384
_FIRST_TIMEOUT_S = 300.0  # used until a pause has been measured
_NEW_SHARE = 1 / 32  # weight of a new pause in the moving averages
_MAX_COUNTED = 100_000  # requests; beyond this the counts are halved, so that the mean follows changes


class Sessions:
    """The living sessions of each worker, and the mean pause and length of sessions. Only `placed` changes it."""

    def __init__(self) -> None:
        self._last_seen: dict[WorkerId, dict[str, float]] = {}  # by worker and session, longest silent first
        self._places: dict[str, tuple[WorkerId, ...]] = {}  # the workers that got each session's last request
        self._seen_on: dict[str, tuple[WorkerId, ...]] = {}  # the workers that remember each session
        self._oldest_s = inf  # no session of any worker was last seen before this time
        self._has_excess = False  # a worker remembers more sessions than the limit
        self._total = 0
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

    def counter(self, now: float) -> Callable[[WorkerId], int]:
        """Return a function that gives the number of living sessions of a worker."""
        ended_at, seen = now - self.timeout_s, self._last_seen.get
        return lambda worker: _num_alive(seen(worker), ended_at)

    @property
    def total(self) -> int:
        """The number of remembered sessions of all workers. Some of them may have ended."""
        return self._total

    @property
    def most(self) -> int:
        """The number of remembered sessions of the worker that has the most."""
        return max(map(len, self._last_seen.values()), default=0)

    def homes(self, session: str, now: float) -> tuple[WorkerId, ...]:
        """Return the workers that got the session's last request. Empty if the session is new or has ended."""
        ended_at = now - self.timeout_s
        places = self._places.get(session, ())
        return tuple(worker for worker in places if self._last_seen.get(worker, {}).get(session, ended_at) > ended_at)

    def home(self, session: str, workers: Iterable[WorkerId], now: float) -> WorkerId | None:
        """Return which of these workers got the session's last request, or None if the session is new or has ended."""
        seen_on = self._seen_on.get(session)
        if seen_on is None:
            return None
        ended_at = now - self.timeout_s
        living = [worker for worker in seen_on if self._last_seen[worker][session] > ended_at]
        return next((worker for worker in workers if worker in living), None) if living else None

    def placed(self, session: str, chosen: Sequence[WorkerId], workers: Sequence[WorkerId], now: float) -> None:
        """Record one request of the session on the `chosen` workers, one for each leg. `workers` were the candidates."""
        ended_at = now - self.timeout_s
        last = self._take_out(session, workers)
        if self._oldest_s <= ended_at or self._has_excess:  # else no worker has anything to forget
            self._forget_ended(workers, ended_at)
        for worker in chosen:
            sessions = self._last_seen.get(worker)
            if sessions is None:
                self._forget_workers_without_sessions(ended_at)
                sessions = self._last_seen[worker] = {}
            if session not in sessions:
                self._seen_on[session] = (*self._seen_on.get(session, ()), worker)
                self._total += 1
            sessions[session] = now
            self._has_excess |= len(sessions) > _MAX_PER_WORKER
        self._oldest_s = min(self._oldest_s, now)
        self._places[session] = tuple(chosen)
        self._num_requests += 1
        if self._num_requests > _MAX_COUNTED:
            self._num_requests, self._num_sessions = self._num_requests // 2, max(1, self._num_sessions // 2)
        if last is None or last <= ended_at:
            self._num_sessions += 1
        else:
            self._add_pause(now - last)

    def _take_out(self, session: str, workers: Sequence[WorkerId]) -> float | None:
        """Remove a session from these workers. Return when the last one that remembers it has seen it, or None."""
        known = [worker for worker in self._seen_on.get(session, ()) if worker in workers]
        if len(known) > 1:
            known.sort(key=workers.index)
        last = None
        for worker in known:
            last = self._last_seen[worker].pop(session)
            self._unlink(session, worker)
        return last

    def _unlink(self, session: str, worker: WorkerId) -> None:
        """Note that a worker does not remember a session any longer."""
        self._total -= 1
        left = tuple(other for other in self._seen_on[session] if other != worker)
        if left:
            self._seen_on[session] = left
        else:
            del self._seen_on[session]

    def _forget_ended(self, workers: Sequence[WorkerId], ended_at: float) -> None:
        """Forget the sessions of these workers that have ended, and the oldest ones beyond the limit."""
        for worker in workers:
            sessions = self._last_seen.get(worker)
            if sessions and (len(sessions) > _MAX_PER_WORKER or next(iter(sessions.values())) <= ended_at):
                for session in _take_ended(sessions, ended_at):
                    self._unlink(session, worker)
                    self._places.pop(session, None)
        if len(workers) < len(self._last_seen):
            return  # candidates of a large fleet: looking at all workers would take longer than looking at these each time
        remembered = [sessions for sessions in self._last_seen.values() if sessions]
        self._oldest_s = min([next(iter(sessions.values())) for sessions in remembered], default=inf)
        self._has_excess = any(len(sessions) > _MAX_PER_WORKER for sessions in remembered)

    def _forget_workers_without_sessions(self, ended_at: float) -> None:
        """Drop workers whose sessions have all ended. Among them are the workers that have left the fleet."""
        for worker, sessions in list(self._last_seen.items()):
            if next(reversed(sessions.values()), ended_at) <= ended_at:
                del self._last_seen[worker]
                for session in sessions:
                    self._unlink(session, worker)
                    self._places.pop(session, None)

    def _add_pause(self, pause_s: float) -> None:
        if self._pause_s is None:
            self._pause_s, self._deviation_s = pause_s, pause_s / 2
            return
        self._deviation_s += _NEW_SHARE * (abs(pause_s - self._pause_s) - self._deviation_s)
        self._pause_s += _NEW_SHARE * (pause_s - self._pause_s)


def _num_alive(sessions: dict[str, float] | None, ended_at: float) -> int:
    if not sessions:
        return 0
    count = len(sessions)
    for last_s in sessions.values():
        if last_s > ended_at:
            break
        count -= 1
    return count


def _take_ended(sessions: dict[str, float], ended_at: float) -> list[str]:
    """Remove the sessions that have ended, and the oldest ones beyond the limit. Return them."""
    ended: list[str] = []
    for session, last_s in sessions.items():
        if last_s > ended_at and len(sessions) - len(ended) <= _MAX_PER_WORKER:
            break
        ended.append(session)
    for session in ended:
        del sessions[session]
    return ended
