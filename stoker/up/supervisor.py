"""The supervisor decides which process of the fleet to start, restart, stop or kill, and when to give up.

It does no I/O and has no clock: its caller reports what happened and the time, and carries out the actions. Parts (processes)
start rank by rank. A rank starts when all parts of the ranks before it have been ready once. A part that exits is restarted
after a pause that doubles each time. A part that no longer answers health checks is killed and restarted. A part that exits
before it was ever ready stops the whole fleet, because a restart would fail in the same way.

A spare part does not run until it is brought in (`bring`), and a part can be let go while the fleet runs (`release`). Such a part
is optional: if it cannot start, it is out of use again, and the fleet goes on without it.

A part that was started with settings which are outdated now is renewed (`renew`): it is drained and started again. Only one such
part is restarted at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from stoker.base.backoff import BackoffLimits, RestartBackoff
from stoker.up.probing import ProbeBook, ProbePolicy


class Phase(StrEnum):
    WAITING = "waiting"  # for the ranks before it to become ready
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"  # it exited and will be restarted
    STOPPING = "stopping"
    STOPPED = "stopped"
    UNUSED = "unused"  # it is not part of the fleet now


class StopMode(IntEnum):
    """How a part is stopped. Each mode is sent at most once to a process, and none after a stronger one."""

    DRAIN = 1  # finish running requests first
    NOW = 2  # abort running requests, but clean up
    KILL = 3


@dataclass(frozen=True, slots=True)
class PartRule:
    """What the supervisor must know about a part."""

    name: str
    start_rank: int
    stop_rank: int
    stop_s: float  # it is killed if it still runs this long after its drain began
    spare: bool = False  # it starts when it is brought in


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses and timeouts. The settings of [up] in fleet.toml explain them."""

    backoff: BackoffLimits = field(default_factory=BackoffLimits)
    probes: ProbePolicy = field(default_factory=ProbePolicy)
    start_s: float = 3600.0  # maximum time until a started part must be ready
    stop_now_s: float = 10.0  # a part that is stopped with StopMode.NOW is killed after this time


@dataclass(frozen=True, slots=True)
class StartPart:
    name: str


@dataclass(frozen=True, slots=True)
class StopPart:
    name: str
    how: StopMode


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why the fleet was given up."""

    name: str
    reason: str


Action = StartPart | StopPart


@dataclass(slots=True, eq=False)
class PartState:
    """The supervisor's view of one part."""

    rule: PartRule
    backoff: RestartBackoff
    phase: Phase = Phase.WAITING
    since_s: float = 0.0  # when the phase began
    timeout_at_s: float = math.inf  # when the phase times out: the part is then restarted or killed
    was_ready: bool = False
    restarts: int = 0
    hangs: int = 0  # how often it was killed because it did not answer
    last_code: int | None = None
    stop_mode: int = 0  # the strongest StopMode that was sent to its process; 0: none
    optional: bool = False  # the fleet goes on if it cannot start
    leaving: bool = False  # it is not restarted
    outdated: bool = False  # it is drained and started again when all other parts run
    start_failures: int = 0  # how often it was brought in and could not start
    start_failure: str = ""  # why, the last time

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)

    def enter(self, phase: Phase, now: float, lasts_s: float = math.inf) -> None:
        self.phase, self.since_s, self.timeout_at_s = phase, now, now + lasts_s


@dataclass(slots=True, eq=False)
class Supervisor:
    """The state of all parts. `actions` returns what to do next."""

    rules: Iterable[PartRule]
    restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    failure: StartFailure | None = None
    parts: dict[str, PartState] = field(init=False)
    probes: ProbeBook = field(init=False)
    _stop_mode: int = field(init=False, default=0)  # the StopMode of the whole fleet; 0: it is not being stopped

    def __post_init__(self) -> None:
        limits = self.restart_policy.backoff
        self.parts = {rule.name: PartState(rule, RestartBackoff(limits), optional=rule.spare) for rule in self.rules}
        for part in self.parts.values():
            if part.rule.spare:
                part.phase = Phase.UNUSED
        self.probes = ProbeBook(self.restart_policy.probes)

    @property
    def stopping(self) -> bool:
        return self._stop_mode > 0

    @property
    def all_ready(self) -> bool:
        return all(part.phase in (Phase.READY, Phase.UNUSED) for part in self.parts.values())

    @property
    def is_over(self) -> bool:
        return self.stopping and all(part.phase is Phase.STOPPED for part in self.parts.values())

    # ---- events

    def ready(self, name: str, now: float) -> None:
        part = self.parts[name]
        if part.phase is Phase.STARTING:
            part.was_ready = True
            part.enter(Phase.READY, now)
            self.probes.begin(name, now)

    def probed(self, name: str, *, answered: bool, asked_s: float, now: float) -> None:
        """Take in a health check of a part that is ready. It began at `asked_s`."""
        if self.parts[name].phase is Phase.READY:
            self.probes.record(name, answered=answered, asked_s=asked_s, now=now)

    def exited(self, name: str, code: int, now: float) -> None:
        part = self.parts[name]
        part.last_code, part.stop_mode, part.outdated = code, 0, False
        if self.stopping:
            part.enter(Phase.STOPPED, now)
        elif part.leaving:
            part.enter(Phase.UNUSED, now)
        elif not part.was_ready:
            self._cannot_start(part, f"it exited {describe_exit(code)} before it was ready", now)
        else:
            ready_s = now - part.since_s if part.phase is Phase.READY else None
            part.enter(Phase.PAUSED, now, part.backoff.pause_s(ready_s))

    def bring(self, name: str, now: float) -> None:
        """Start a part that is unused."""
        part = self.parts[name]
        if part.phase is Phase.UNUSED:
            part.was_ready, part.leaving = False, False
            part.backoff = RestartBackoff(self.restart_policy.backoff)
            part.enter(Phase.WAITING, now)

    def release(self, name: str, now: float) -> None:
        """Let a part go: it is drained if it runs, and not started again until it is brought in."""
        part = self.parts[name]
        part.optional = part.leaving = True
        if not part.runs:
            part.enter(Phase.UNUSED, now)

    def renew(self, name: str) -> None:
        """Drain a part that runs and start it again, as soon as all other parts run."""
        part = self.parts[name]
        part.outdated = part.runs

    def stop(self) -> None:
        """Stop the fleet. The first call drains it in order, the second one stops it now, the third one kills all parts."""
        self._stop_mode = min(self._stop_mode + 1, StopMode.KILL)

    def _cannot_start(self, part: PartState, reason: str, now: float) -> None:
        if not part.optional:
            part.enter(Phase.STOPPED, now)
            self._give_up(part, reason)
            return
        part.start_failures += 1
        part.start_failure = reason
        part.enter(Phase.UNUSED, now)

    def _give_up(self, part: PartState, reason: str) -> None:
        self.failure = self.failure or StartFailure(part.rule.name, reason)
        self._stop_mode = max(self._stop_mode, StopMode.NOW)

    # ---- actions

    def actions(self, now: float) -> list[Action]:
        """Return the actions to carry out now. Each is returned once, so the caller must carry out all of them."""
        actions: list[Action] = []
        if not self.stopping:
            actions += self._keep_up(now)
        if self.stopping:  # _keep_up may have given up
            actions += self._bring_down(now)
        return actions

    def next_timeout_s(self) -> float:
        """Return the time of the next timeout. While the fleet stops, parts are killed at their timeouts, but not restarted."""
        parts = (part for part in self.parts.values() if not self.stopping or part.phase is Phase.STOPPING)
        return min((part.timeout_at_s for part in parts), default=math.inf)

    def _keep_up(self, now: float) -> list[Action]:
        actions: list[Action] = []
        renewed = self._renewed()
        for part in self.parts.values():
            if part.runs and (part.leaving or part is renewed):
                actions += self._let_go(part, now)
                continue
            if part.phase is Phase.STARTING and now >= part.timeout_at_s:
                part.timeout_at_s = math.inf
                if not part.was_ready and not part.optional:
                    self._give_up(part, f"it was not ready after {self.restart_policy.start_s:g} s")
                    return actions
                actions += self._stop_part(part, StopMode.KILL)
            if part.phase is Phase.READY and not part.stop_mode and self.probes.take_kill(part.rule.name, now):
                part.hangs += 1
                actions += self._stop_part(part, StopMode.KILL)
        late = [
            part.rule.start_rank
            for part in self.parts.values()
            if not part.was_ready and part.phase is not Phase.UNUSED
        ]
        for part in self.parts.values():
            again = part.phase is Phase.PAUSED and now >= part.timeout_at_s
            if again or (part.phase is Phase.WAITING and part.rule.start_rank <= min(late)):
                part.restarts += again
                part.enter(Phase.STARTING, now, self.restart_policy.start_s)
                actions.append(StartPart(part.rule.name))
        return actions

    def _renewed(self) -> PartState | None:
        """Return the outdated part that is to be restarted now: the fleet does without one part at a time."""
        outdated = [part for part in self.parts.values() if part.outdated and not part.leaving]
        going = next((part for part in outdated if part.phase is Phase.STOPPING), None)
        if going is not None or not self.all_ready:
            return going
        return next(iter(outdated), None)

    def _let_go(self, part: PartState, now: float) -> list[Action]:
        """Drain a part that leaves the fleet or is renewed, and kill it if that takes too long."""
        if part.phase is not Phase.STOPPING:
            stops = self._stop_part(part, StopMode.DRAIN)
            part.enter(Phase.STOPPING, now, part.rule.stop_s)
            return stops
        if now < part.timeout_at_s:
            return []
        part.timeout_at_s = math.inf
        return self._stop_part(part, StopMode.KILL)

    def _bring_down(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for rank in sorted({part.rule.stop_rank for part in self.parts.values()}):
            members = [part for part in self.parts.values() if part.rule.stop_rank == rank]
            for part in members:
                if not part.runs:
                    part.enter(Phase.STOPPED, now)
                    continue
                how = (
                    StopMode.KILL
                    if part.phase is Phase.STOPPING and now >= part.timeout_at_s
                    else StopMode(self._stop_mode)
                )
                stops = self._stop_part(part, how)
                if stops:
                    lasts_s = {StopMode.DRAIN: part.rule.stop_s, StopMode.NOW: self.restart_policy.stop_now_s}.get(
                        how, math.inf
                    )
                    part.enter(Phase.STOPPING, now, lasts_s)
                actions += stops
            if self._stop_mode == StopMode.DRAIN and any(part.runs for part in members):
                break  # this rank needs the later ones until it has exited
        return actions

    def _stop_part(self, part: PartState, how: StopMode) -> list[Action]:
        """Return the action that stops the part, or [] if it was already stopped in this way or a stronger one."""
        if how <= part.stop_mode:
            return []
        part.stop_mode = how
        return [StopPart(part.rule.name, how)]


def describe_exit(code: int) -> str:
    """Describe an exit code: `with code 1` or `by signal 9`."""
    return f"by signal {-code}" if code < 0 else f"with code {code}"
