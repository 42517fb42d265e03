"""Health of one worker: may it get requests now, and how large a share of what a settled worker would get?

Three sources are joined. Probes say *live* (its process answers) and *ready* (it would take work). Requests that went
wrong say what probes do not: a circuit breaker opens after `failures_to_open` failures in a row (at once when the
worker could not even be connected to), lets one trial request through after a back-off that doubles each time, and
closes when a trial brings its first token; until an answer has come to its end, one more failure opens it again. An
answer that is not streamed brings nothing until its end, which may be minutes away: such a trial is also passed when it
has not failed for `trial_s`, unless it was just such silence that opened the breaker. A worker that probes have seen to go
and to come back needs no trial. An operator may drain a worker. One that comes back is warmed up: its share of the work
rises from `slow_start_share` to 1 over `slow_start_s`, so that a cold cache is not met by a full queue.

There is no jitter: the same calls give the same states, in tests, in the simulator and in two gateways.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Breaker(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    failures_to_open: int = 3
    open_s: float = 1.0  # the first back-off
    max_open_s: float = 30.0
    trial_s: float = 10.0  # a trial that says nothing for so long is not waited for
    busy_s: float = 0.5  # a worker that refused for load is passed over for so long, if there are others
    slow_start_s: float = 10.0
    slow_start_share: float = 0.1


_CLOSED = Breaker.CLOSED  # an enum's member is found slowly, and every request asks twice

# Failures that say the worker is not there at all, that it is there and says nothing, and those that say nothing about its
# health.
_GONE = frozenset({"connect"})
_SILENT = frozenset({"timeout"})
_BUSY = frozenset({"busy"})


class WorkerHealth:
    def __init__(self, settings: HealthSettings, now: float, *, warm: bool = True) -> None:
        self._settings = settings
        self._live = True  # innocent until probed: the first request must not wait for the first probe
        self._ready = True
        self._draining = False
        self._breaker = Breaker.CLOSED
        self._opened_by = ""
        self._failures = 0
        self._open_s = settings.open_s
        self._retry_at = 0.0
        self._trial_until: float | None = None
        self._busy_until = now
        self._warm_from = now - settings.slow_start_s if warm else now

    @property
    def draining(self) -> bool:
        return self._draining

    def breaker(self, now: float) -> Breaker:
        if self._breaker is Breaker.OPEN and now >= self._retry_at:
            return Breaker.HALF_OPEN
        return self._breaker

    def usable(self, now: float) -> bool:
        if not (self._live and self._ready) or self._draining:
            return False
        match self.breaker(now):
            case Breaker.CLOSED:
                return True
            case Breaker.OPEN:
                return False
        return self._trial_until is None or now >= self._trial_until

    def busy(self, now: float) -> bool:
        return now < self._busy_until

    def share(self, now: float) -> float:
        """In (0, 1]: how fast the worker is to be thought of, against its settled self."""
        settings = self._settings
        if settings.slow_start_s <= 0:
            return 1.0
        done = (now - self._warm_from) / settings.slow_start_s
        return 1.0 if done >= 1 else settings.slow_start_share + (1 - settings.slow_start_share) * max(0.0, done)

    def usable_at(self, now: float) -> float | None:
        """When it will be usable if nothing more is heard of it; None: only news can help."""
        if not (self._live and self._ready) or self._draining:
            return None
        if self.usable(now):
            return now
        return self._retry_at if self.breaker(now) is Breaker.OPEN else self._trial_until

    def changes_at(self, now: float) -> float:
        """Until then, `usable`, `busy` and `share` stay as they are, unless something is heard; inf: for good."""
        times = [self._busy_until, self._retry_at if self._breaker is Breaker.OPEN else 0.0, self._trial_until or 0.0]
        if now < self._warm_from + self._settings.slow_start_s:
            times.append(now + self._settings.slow_start_s / 50)  # the ramp, in steps
        return min((time for time in times if time > now), default=float("inf"))

    def saw_probe(self, live: bool, ready: bool, now: float) -> None:
        was_up = self._live and self._ready
        self._live, self._ready = live, ready
        if not (live and ready):
            return
        if not was_up:
            self._warm_from = now
        if self._breaker is not Breaker.OPEN:
            return
        # It went, and came back: a process or an engine like any that is new, of which nothing is known. It could not be
        # connected to, and now it answers: try it at once. One that answers probes but fails requests gains nothing by them.
        if not was_up:
            self._trust(now)
        elif self._opened_by in _GONE:
            self._retry_at = min(self._retry_at, now)

    def saw_first_token(self, now: float) -> bool:
        """Whether that changed anything. A trial need not be waited for to its end, which may be minutes away; but a worker
        may die in the middle of every answer, so nothing is forgiven yet."""
        if self._breaker is _CLOSED:
            return False
        self._trust(now)
        return True

    def saw_success(self, now: float) -> bool:
        """An answer came to its end. Whether that changed anything."""
        self._failures, self._open_s = 0, self._settings.open_s
        if self._breaker is _CLOSED:
            return False
        self._close(now)
        return True

    def saw_failure(self, kind: str, now: float) -> None:
        if kind in _BUSY:
            self._busy_until = now + self._settings.busy_s
            self._trial_until = None
            return
        if self._breaker is Breaker.OPEN:
            if now >= self._retry_at:  # the trial, or one of its kind, failed
                self._open_s = min(2 * self._open_s, self._settings.max_open_s)
                self._open(kind, now)
            return
        self._failures += 1
        if kind in _GONE or self._failures >= self._settings.failures_to_open:
            self._open(kind, now)

    def begin_request(self, now: float) -> bool:
        """The router sends a request there. Whether that changed anything: a trial is under way from now on, or the one
        before has passed."""
        if self._breaker is _CLOSED:
            return False
        if self._trial_until is not None and now >= self._trial_until and self._opened_by not in _SILENT:
            self._trust(now)
        else:
            self._trial_until = now + self._settings.trial_s
        return True

    def drain(self, on: bool, now: float) -> None:
        if self._draining and not on:
            self._warm_from = now
        self._draining = on

    def _trust(self, now: float) -> None:
        """On probation: one more failure opens it again, for longer."""
        self._close(now)
        self._failures = self._settings.failures_to_open - 1
        self._open_s = min(2 * self._open_s, self._settings.max_open_s)

    def _close(self, now: float) -> None:
        self._breaker, self._trial_until, self._warm_from = Breaker.CLOSED, None, now

    def _open(self, kind: str, now: float) -> None:
        self._breaker, self._opened_by = Breaker.OPEN, kind
        self._retry_at, self._trial_until = now + self._open_s, None
