"""Rolling upgrade: restarts the workers of a fleet one at a time, and stops at the first sign of trouble.

A worker is drained, its requests move to other workers, it is restarted, and gets requests again. Then it is watched for a while
before the next one: its errors, and its errors and latencies compared with those of the other workers. A canary that the gateway
has stopped stops the upgrade too.

The caller provides the gateway, the restart and the clock, so that a test runs it without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stoker.base.canary import CanaryLimits, RequestGroup, judge
from stoker.base.errors import StokerError
from stoker.proto.admin_api import CanaryStatus, WorkerStatus

_POLL_S = 0.2
_WATCH_POLL_S = 1.0
# A worker that was restarted computes what the others have cached, so that some more time is usual.
_CANARY = CanaryLimits(slow_factor=3.0)


class UpgradeStopped(StokerError):
    """The upgrade has stopped. The message says at which worker, why, and what to do."""

    code = "upgrade_stopped"


class FleetControl(Protocol):
    """The part of a gateway's admin API that an upgrade uses."""

    def worker(self, name: str) -> WorkerStatus | None:
        """Return what the gateway knows about a worker, or None if it has left."""

    def drain(self, name: str) -> None:
        """Take a worker out of service and move its requests. Raises StokerError if that is refused."""

    def undrain(self, name: str) -> None: ...

    def num_errors(self) -> int:
        """Return how many requests of clients have failed since the gateway started."""

    def num_failures(self, name: str) -> int:
        """Return how many requests have failed on this worker since the gateway started."""

    def newest_s(self) -> float:
        """Return the Unix time at which the newest request that has ended arrived; 0 if there is none."""

    def groups(self, name: str, after_s: float) -> tuple[RequestGroup, RequestGroup]:
        """Return the ended requests of this worker and those of others with its role. They arrived after this Unix time."""

    def canaries(self) -> Sequence[CanaryStatus]:
        """Return the canaries of the gateway, with those that it has stopped."""


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """How long each stage may take, and how many errors are too many."""

    drain_s: float = 600.0
    ready_s: float = 900.0
    watch_s: float = 30.0
    max_errors: int = 0
    canary: CanaryLimits = _CANARY


@dataclass(slots=True, eq=False)
class RollingUpgrade:
    """One run over the workers of a fleet."""

    control: FleetControl
    restart: Callable[[WorkerStatus], None]  # returns when the old process has ended; raises StokerError if it cannot
    limits: UpgradeLimits
    now: Callable[[], float]
    sleep: Callable[[float], None]
    say: Callable[[str], None]
    has_begun: bool = False

    def run(self, names: Sequence[str]) -> None:
        """Upgrade these workers in order. Raises UpgradeStopped."""
        self._check_canaries()
        errors = self.control.num_errors()
        for number, name in enumerate(names, 1):
            self._upgrade(name, errors)
            self.say(f"{name}: done, {number} of {len(names)}")

    def _upgrade(self, name: str, errors: int) -> None:
        status = self.control.worker(name)
        if status is None:
            raise UpgradeStopped(f"{name} is not a worker of this gateway; nothing was changed there")
        self.has_begun = True
        try:
            self.control.drain(name)
        except StokerError as refused:
            raise UpgradeStopped(f"{name} cannot be drained: {refused.message}") from refused
        self._wait(lambda: self._is_empty(name), self.limits.drain_s, f"{name} still runs requests", name)
        self.say(f"{name}: empty, restarting")
        try:
            self.restart(status)
        except StokerError as failed:
            raise UpgradeStopped(f"{name} was not restarted and stays drained: {failed.message}") from failed
        if self.control.worker(name) is not None:  # one that registers itself may have left, and comes back undrained
            self.control.undrain(name)
        self._wait(lambda: self._is_back(name), self.limits.ready_s, f"{name} does not get ready", name)
        failures, newest_s = self.control.num_failures(name), self.control.newest_s()
        self.say(f"{name}: serves again, watching it for {self.limits.watch_s:g} s")
        self._watch(name, errors, failures, newest_s)

    def _is_empty(self, name: str) -> bool:
        status = self.control.worker(name)
        return status is None or not status.reserved.requests

    def _is_back(self, name: str) -> bool:
        status = self.control.worker(name)
        return status is not None and status.usable and bool(status.models)

    def _wait(self, condition: Callable[[], bool], seconds: float, trouble: str, name: str) -> None:
        until_s = self.now() + seconds
        while not condition():
            if self.now() >= until_s:
                raise UpgradeStopped(
                    f"{trouble} after {seconds:g} s; look at its log, then `stoker drain {name} --undo`"
                )
            self.sleep(_POLL_S)

    def _check_canaries(self) -> None:
        for one in self.control.canaries():
            if one.stopped:
                raise UpgradeStopped(
                    f"the gateway has stopped the canary {one.model} of {one.name}: {one.reason}. Repair it, restart the gateway, "
                    "and begin again"
                )

    def _watch(self, name: str, errors: int, failures: int, newest_s: float) -> None:
        """Wait, and take the worker out of service again if its requests fail, or are much slower than those of the others."""
        until_s = self.now() + self.limits.watch_s
        while True:
            failed = max(self.control.num_errors() - errors, self.control.num_failures(name) - failures)
            if failed > self.limits.max_errors:
                raise UpgradeStopped(
                    f"{failed} requests failed after {name} was upgraded, more than --max-errors {self.limits.max_errors}. "
                    f"{self._drain_again(name)}, and the workers after it were not touched"
                )
            verdict = judge(*self.control.groups(name, newest_s), self.limits.canary)
            if verdict.stop:
                numbers = ", ".join(f"{key}={value:g}" for key, value in verdict.numbers.items())
                raise UpgradeStopped(
                    f"{name} is worse than the other workers after its upgrade: {verdict.reason} ({numbers}). "
                    f"{self._drain_again(name)}, and the workers after it were not touched"
                )
            self._check_canaries()
            if self.now() >= until_s:
                if not self._is_back(name):
                    raise UpgradeStopped(
                        f"{name} was ready after its upgrade, and is not any more; look at its log. The workers after it were not "
                        "touched"
                    )
                if verdict.numbers["canary_requests"] < self.limits.canary.min_requests:
                    self.say(f"{name}: not compared with the other workers: {verdict.reason}")
                return
            self.sleep(min(_WATCH_POLL_S, max(0.0, until_s - self.now())))

    def _drain_again(self, name: str) -> str:
        """Take a worker out of service. Return a sentence about it."""
        try:
            self.control.drain(name)
        except StokerError as refused:
            return f"It could not be drained and still serves ({refused.message})"
        return "It is drained again"
