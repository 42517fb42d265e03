"""ProbeBook decides from health checks which process of the fleet hangs. It does no I/O and takes the time as an argument.

Only a missing answer counts. A process that answers with an error, or closes the connection, runs. An overloaded machine delays
the answers of healthy processes too, so one process is killed at a time, and a process that was killed gets more time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_LATE_S = 1.0  # a result this late means that `stoker up` itself did not run


@dataclass(frozen=True, slots=True)
class ProbePolicy:
    """How long a process may be silent, and how often it is probed."""

    silent_s: float = 10.0
    longest_silent_s: float = 300.0  # the limit doubles up to this each time a process is killed
    forgiven_s: float = 600.0  # the limit is reset after a process has answered for this time
    between_kills_s: float = 60.0  # no second process is killed within this time

    @property
    def every_s(self) -> float:
        return self.silent_s / 5

    @property
    def answer_s(self) -> float:
        return self.silent_s / 4


@dataclass(slots=True, eq=False)
class _Probes:
    """The health checks of one process."""

    limit_s: float
    last_s: float  # when the last result came
    answers_since_s: float
    silent_since_s: float | None = None


@dataclass(slots=True, eq=False)
class ProbeBook:
    """The health checks of all processes that have been ready."""

    policy: ProbePolicy = field(default_factory=ProbePolicy)
    _probes: dict[str, _Probes] = field(init=False, default_factory=dict)
    _killed_s: float = field(init=False, default=-math.inf)

    def begin(self, name: str, now: float) -> None:
        """The process is ready: count from here."""
        probes = self._probes.setdefault(name, _Probes(self.policy.silent_s, now, now))
        probes.last_s = probes.answers_since_s = now
        probes.silent_since_s = None

    def record(self, name: str, *, answered: bool, asked_s: float, now: float) -> None:
        """Take in the result of a check that began at `asked_s`."""
        policy, probes = self.policy, self._probes[name]
        late = asked_s - probes.last_s > policy.every_s + _LATE_S or now - asked_s > policy.answer_s + _LATE_S
        probes.last_s = now
        if answered or late:
            if probes.silent_since_s is not None:
                probes.silent_since_s, probes.answers_since_s = None, now
            if now - probes.answers_since_s >= policy.forgiven_s:
                probes.limit_s = policy.silent_s
        elif probes.silent_since_s is None:
            probes.silent_since_s = asked_s

    def silent_s(self, name: str) -> float:
        """Return for how long the process has not answered, as of the last check; 0 if it answers."""
        probes = self._probes.get(name)
        return 0.0 if probes is None or probes.silent_since_s is None else probes.last_s - probes.silent_since_s

    def take_kill(self, name: str, now: float) -> bool:
        """Return True if the process must be killed now. The caller must do so."""
        if now - self._killed_s < self.policy.between_kills_s or self.silent_s(name) == 0.0:
            return False
        probes = self._probes[name]
        if self.silent_s(name) < probes.limit_s:
            return False
        self._killed_s = now
        probes.limit_s = min(2 * probes.limit_s, self.policy.longest_silent_s)
        return True
