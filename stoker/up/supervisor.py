"""What to start next, what to start again and when, whom to stop first, and when to give up. Pure: it is told what happened
and what time it is, and says what to do; who does it is unknown here.

Parts start rank by rank: a rank when all of those before it have been ready once. A part that ends is started again after a
pause that doubles, unless it never was ready: then the fleet as it was written cannot run, and all of it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Phase(StrEnum):
    WAITING = "waiting"  # for the ranks before it
    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"  # it ended, and will be started again
    STOPPING = "stopping"
    STOPPED = "stopped"


class How(IntEnum):
    """How a part is told to end. Each is said to a part once, and none after a stronger one."""

    ASK = 1  # finish what runs
    INSIST = 2  # now, but tidily
    KILL = 3


@dataclass(frozen=True, slots=True)
class Rule:
    """A part, as far as its supervisor cares."""

    name: str
    start_rank: int
    stop_rank: int
    stop_s: float  # it is killed when it has not ended so long after it was asked


@dataclass(frozen=True, slots=True)
class Patience:
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    healthy_s: float = 60.0  # who was ready for so long begins anew with the first pause
    start_s: float = 3600.0  # until a started part must be ready
    insist_s: float = 10.0  # until who was told to end now is killed


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    name: str
    how: How


@dataclass(frozen=True, slots=True)
class Failure:
    name: str
    reason: str


Action = Start | Stop


@dataclass(slots=True, eq=False)
class PartState:
    rule: Rule
    phase: Phase = Phase.WAITING
    since_s: float = 0.0  # of the phase
    due_s: float = math.inf  # when the phase has lasted long enough: start again, or kill
    pause_s: float = 0.0
    was_ready: bool = False
    restarts: int = 0
    last_code: int | None = None
    told: int = 0

    @property
    def runs(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING)

    def enter(self, phase: Phase, now: float, lasts_s: float = math.inf) -> None:
        self.phase, self.since_s, self.due_s = phase, now, now + lasts_s


@dataclass(slots=True, eq=False)
class Supervisor:
    rules: Iterable[Rule]
    patience: Patience = field(default_factory=Patience)
    failure: Failure | None = None
    parts: dict[str, PartState] = field(init=False)
    _wanted: int = field(init=False, default=0)  # how strongly the end of all is wanted; 0: not at all

    def __post_init__(self) -> None:
        self.parts = {rule.name: PartState(rule, pause_s=self.patience.first_pause_s) for rule in self.rules}

    @property
    def stopping(self) -> bool:
        return self._wanted > 0

    @property
    def all_ready(self) -> bool:
        return all(part.phase is Phase.READY for part in self.parts.values())

    @property
    def is_over(self) -> bool:
        return self.stopping and all(part.phase is Phase.STOPPED for part in self.parts.values())

    # ---- what happened

    def ready(self, name: str, now: float) -> None:
        part = self.parts[name]
        if part.phase is Phase.STARTING:
            part.was_ready = True
            part.enter(Phase.READY, now)

    def exited(self, name: str, code: int, now: float) -> None:
        part = self.parts[name]
        part.last_code, part.told = code, 0
        if self.stopping:
            part.enter(Phase.STOPPED, now)
        elif not part.was_ready:
            part.enter(Phase.STOPPED, now)
            self._give_up(part, f"it ended {ended_how(code)} before it was ready")
        else:
            if part.phase is Phase.READY and now - part.since_s >= self.patience.healthy_s:
                part.pause_s = self.patience.first_pause_s
            part.enter(Phase.PAUSED, now, part.pause_s)
            part.pause_s = min(2 * part.pause_s, self.patience.longest_pause_s)

    def stop(self) -> None:
        """Somebody wants the end. The first time in order; asked again, at once; and again, by force."""
        self._wanted = min(self._wanted + 1, How.KILL)

    def _give_up(self, part: PartState, reason: str) -> None:
        self.failure = self.failure or Failure(part.rule.name, reason)
        self._wanted = max(self._wanted, How.INSIST)

    # ---- what to do

    def actions(self, now: float) -> list[Action]:
        """Each action once: whoever asks carries all of them out."""
        actions: list[Action] = []
        if not self.stopping:
            actions += self._keep_up(now)
        if self.stopping:  # looking after the parts may have ended in giving up
            actions += self._bring_down(now)
        return actions

    def next_look_s(self) -> float:
        """When something is due, if nothing happens before. At the end that is only whom to kill: nobody starts again."""
        parts = (part for part in self.parts.values() if not self.stopping or part.phase is Phase.STOPPING)
        return min((part.due_s for part in parts), default=math.inf)

    def _keep_up(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for part in self.parts.values():
            if part.phase is Phase.STARTING and now >= part.due_s:
                part.due_s = math.inf
                if not part.was_ready:
                    self._give_up(part, f"it was not ready after {self.patience.start_s:g} s")
                    return actions
                actions += self._tell(part, How.KILL)
        late = [part.rule.start_rank for part in self.parts.values() if not part.was_ready]
        for part in self.parts.values():
            again = part.phase is Phase.PAUSED and now >= part.due_s
            if again or (part.phase is Phase.WAITING and part.rule.start_rank <= min(late)):
                part.restarts += again
                part.enter(Phase.STARTING, now, self.patience.start_s)
                actions.append(Start(part.rule.name))
        return actions

    def _bring_down(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for rank in sorted({part.rule.stop_rank for part in self.parts.values()}):
            members = [part for part in self.parts.values() if part.rule.stop_rank == rank]
            for part in members:
                if not part.runs:
                    part.enter(Phase.STOPPED, now)
                    continue
                how = How.KILL if part.phase is Phase.STOPPING and now >= part.due_s else How(self._wanted)
                told = self._tell(part, how)
                if told:
                    lasts_s = {How.ASK: part.rule.stop_s, How.INSIST: self.patience.insist_s}.get(how, math.inf)
                    part.enter(Phase.STOPPING, now, lasts_s)
                actions += told
            if self._wanted == How.ASK and any(part.runs for part in members):
                break  # those behind it are needed until it has ended
        return actions

    def _tell(self, part: PartState, how: How) -> list[Action]:
        if how <= part.told:
            return []
        part.told = how
        return [Stop(part.rule.name, how)]


def ended_how(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
