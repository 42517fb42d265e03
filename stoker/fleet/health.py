"""Health of one worker: whether it may get requests now, and its share of the work during slow start.

Health combines three sources:

- **Probes** report *live* (the process answers) and *ready* (it accepts work).
- **Failed requests** drive a circuit breaker. It opens after `failures_to_open` consecutive failures, or at once when
  the connection is refused. After a backoff, which doubles each time, it lets one trial request through. The first token
  of the trial closes the breaker. The worker is then on probation: until a response completes, one more failure opens
  the breaker again. A response that is not streamed sends nothing until its end, which may take minutes. Such a trial
  also passes when it has not failed after `trial_s`, unless timeouts opened the breaker. A worker that probes saw go
  down and come back needs no trial. `ejection.py` limits how many workers of a pool breakers may take out of service.
- **The operator** may drain a worker.

A worker that comes back starts slowly: its share of the work rises from `slow_start_share` to 1 over `slow_start_s`, so
that it does not get a full queue while its cache is cold.

There is no jitter. The same calls give the same states in tests, in simulations and in two gateways.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stoker.base.settings import check_settings, setting


class Breaker(StrEnum):
    """States of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """The circuit breakers, how many workers they may take out of service, and the slow start."""

    failures_to_open: int = setting(3, "Consecutive failures that open a worker's circuit breaker.", ge=1)
    open_s: float = setting(1.0, "First backoff of an open breaker. It doubles with each failed trial.", unit="s", gt=0)
    max_open_s: float = setting(30.0, "Longest backoff of an open breaker.", unit="s", gt=0)
    trial_s: float = setting(10.0, "How long to wait for the outcome of a trial request.", unit="s", gt=0)
    max_ejected_share: float = setting(
        0.5,
        "Largest share of a model's workers that failed requests may take out of service. Beyond it, further workers stay "
        "in service. Workers that refuse connections or fail their health checks do not count.",
        ge=0,
        le=1,
    )
    panic_share: float = setting(
        0.5,
        "If a smaller share of a model's workers is in service, all that pass their health checks get requests again, even "
        "if requests failed there. 0 turns this off.",
        ge=0,
        le=1,
    )
    busy_s: float = setting(
        0.5, "How long a worker that refused a request for load is avoided, if others are free.", unit="s", ge=0
    )
    slow_start_s: float = setting(10.0, "Length of the slow start.", unit="s", ge=0)
    slow_start_share: float = setting(0.1, "Share of the work at the beginning of the slow start.", gt=0, le=1)

    def __post_init__(self) -> None:
        check_settings(self, "health")


_CLOSED = Breaker.CLOSED  # looking up an enum member is slow, and each request does it twice

# Kinds of failure: the worker cannot be reached; it is reached but does not respond; it is healthy but overloaded.
_UNREACHABLE = frozenset({"connect"})
_SILENT = frozenset({"timeout"})
_BUSY = frozenset({"busy"})


class WorkerHealth:
    """Tracks one worker's health from probes, request outcomes and draining. See the module docstring."""

    def __init__(self, settings: HealthSettings, now: float, *, warm: bool = True) -> None:
        self._settings = settings
        self._live = True  # assumed until the first probe, so that the first request need not wait for it
        self._ready = True
        self._draining = False
        self._breaker = Breaker.CLOSED
        self._opened_by = ""
        self._opened_at = 0.0
        self._failures = 0
        self._good_at = float("-inf")  # when a request last got its first token or completed
        self._open_s = settings.open_s
        self._retry_at = 0.0
        self._trial_until: float | None = None
        self._busy_until = now
        self._slow_start_at = now - settings.slow_start_s if warm else now

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def reachable(self) -> bool:
        """Return True unless the worker is known to be down: by a probe, or because it refused a connection."""
        return self._live and self._ready and not (self._breaker is Breaker.OPEN and self._opened_by in _UNREACHABLE)

    @property
    def opened_at(self) -> float:
        """Return when the breaker opened after having been closed. Failed trials do not change it."""
        return self._opened_at

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
        """Return the worker's share of its full speed, in (0, 1]; below 1 during slow start."""
        settings = self._settings
        if settings.slow_start_s <= 0:
            return 1.0
        done = (now - self._slow_start_at) / settings.slow_start_s
        return 1.0 if done >= 1 else settings.slow_start_share + (1 - settings.slow_start_share) * max(0.0, done)

    def usable_at(self, now: float) -> float | None:
        """Return when the worker becomes usable by itself, or None if that needs a probe or the operator."""
        if not (self._live and self._ready) or self._draining:
            return None
        if self.usable(now):
            return now
        return self._retry_at if self.breaker(now) is Breaker.OPEN else self._trial_until

    def changes_at(self, now: float) -> float:
        """Return the time until which `usable`, `busy` and `share` stay the same without new observations (or inf)."""
        times = [self._busy_until, self._retry_at if self._breaker is Breaker.OPEN else 0.0, self._trial_until or 0.0]
        if now < self._slow_start_at + self._settings.slow_start_s:
            times.append(now + self._settings.slow_start_s / 50)  # the slow start rises in 50 steps
        return min((time for time in times if time > now), default=float("inf"))

    def saw_probe(self, live: bool, ready: bool, now: float) -> bool:
        """Record a probe, and return whether the state changed."""
        was_up, before = self._live and self._ready, (self._live, self._ready)
        self._live, self._ready = live, ready
        changed = (live, ready) != before
        if not (live and ready):
            return changed
        if not was_up:
            self._slow_start_at = now
        if self._breaker is not Breaker.OPEN:
            return changed
        # A worker that went down and came back is a new process: its old failures say nothing about it.
        # A worker that refused connections and now answers is tried at once.
        # A worker that answered all probes while it failed requests must wait for its backoff.
        if not was_up:
            self._close_on_probation(now)
        elif self._opened_by in _UNREACHABLE:
            self._retry_at = min(self._retry_at, now)
        return True

    def saw_first_token(self, now: float) -> bool:
        """Record a first token, and return whether the state changed.

        A trial passes with its first token, because its end may be minutes away. The worker stays on probation, because
        it may fail in the middle of every response.
        """
        self._good_at = now
        if self._breaker is _CLOSED:
            return False
        self._close_on_probation(now)
        return True

    def saw_success(self, now: float) -> bool:
        """Record a completed response, and return whether the state changed."""
        self._failures, self._open_s, self._good_at = 0, self._settings.open_s, now
        if self._breaker is _CLOSED:
            return False
        self._close(now)
        return True

    def saw_failure(self, kind: str, now: float, began_s: float | None = None) -> None:
        """Record a failed request. It does not count if it began at `began_s` and another one did well after that."""
        if began_s is not None and began_s < self._good_at:
            return
        if kind in _BUSY:
            self._busy_until = now + self._settings.busy_s
            self._trial_until = None
            return
        if self._breaker is Breaker.OPEN:
            if now >= self._retry_at:  # a trial request failed
                self._open_s = min(2 * self._open_s, self._settings.max_open_s)
                self._open(kind, now)
            return
        self._failures += 1
        if kind in _UNREACHABLE or self._failures >= self._settings.failures_to_open:
            self._open(kind, now)

    def begin_request(self, now: float) -> bool:
        """Record that a request is sent to the worker, and return whether the state changed.

        The state changes when this request starts a trial, or when the previous trial has passed by now.
        """
        if self._breaker is _CLOSED or now < self._retry_at:
            return False  # before the end of the backoff it is not a trial: the pool has too few other workers
        if self._trial_until is not None and now >= self._trial_until and self._opened_by not in _SILENT:
            self._close_on_probation(now)
        else:
            self._trial_until = now + self._settings.trial_s
        return True

    def drain(self, on: bool, now: float) -> None:
        if self._draining and not on:
            self._slow_start_at = now
        self._draining = on

    def _close_on_probation(self, now: float) -> None:
        """Close the breaker on probation: one more failure opens it again, with a longer backoff."""
        self._close(now)
        self._failures = self._settings.failures_to_open - 1
        self._open_s = min(2 * self._open_s, self._settings.max_open_s)

    def _close(self, now: float) -> None:
        self._breaker, self._trial_until, self._slow_start_at = Breaker.CLOSED, None, now

    def _open(self, kind: str, now: float) -> None:
        if self._breaker is Breaker.CLOSED:
            self._opened_at = now
        self._breaker, self._opened_by = Breaker.OPEN, kind
        self._retry_at, self._trial_until = now + self._open_s, None
