"""ScaleFollower: decides which workers `stoker up` starts and ends, so that the fleet follows its gateway's autoscaler.

It does no I/O and takes the time as an argument. The gateway publishes numbered wishes. One worker is started for each wish of one
gateway process, once. A gateway that was restarted begins again with number 1. It does not know which workers are on their way, and
learns of the others one by one, when they register. So its first wishes are taken as those for the workers that no decision of
it has counted yet.

A worker that could not start is tried again after a pause that doubles, as long as the wish is there. A worker is ended after it
was drained, and when its requests have moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.base.backoff import BackoffLimits, RestartBackoff
from stoker.proto.admin_api import ScaleWishes, StartWish
from stoker.up.supervisor import Phase

_BACKOFF = BackoffLimits(first_s=5.0, longest_s=300.0)
_REGISTER_S = 60.0  # all healthy workers have registered with a new gateway by then


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker that `stoker up` runs or could run."""

    name: str
    role: str
    phase: Phase
    worker: str = ""  # its name at the gateway, HOST:PORT; empty until it is known
    start_failures: int = 0
    start_failure: str = ""


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker as the gateway sees it."""

    requests: int = 0  # requests that run or wait there
    draining: bool = False


@dataclass(frozen=True, slots=True)
class BringWorker:
    """Start a worker."""

    name: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """End a worker that is drained."""

    name: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the operator."""

    text: str


ScaleStep = BringWorker | ReleaseWorker | Tell


@dataclass(slots=True, eq=False)
class _Retry:
    """The time at which a worker of one role may be started again after failures."""

    backoff: RestartBackoff
    after_s: float = 0.0


@dataclass(slots=True, eq=False)
class ScaleFollower:
    """Follows one gateway. Carry out the steps that `follow` returns before the next call."""

    backoff: BackoffLimits = _BACKOFF
    drain_s: float = 600.0  # a drained worker is ended after this time, even if requests still run there
    _board: str = ""
    _given: dict[int, str] = field(default_factory=dict)  # the worker that was started for a wish
    # Workers that the autoscaler has not counted yet, and until when one that does not start any more is awaited.
    _coming: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _retries: dict[str, _Retry] = field(default_factory=dict)  # by role
    _leaving: dict[str, float] = field(default_factory=dict)  # since when it is known that a worker shall end
    _released: set[str] = field(default_factory=set)  # addresses of workers that were ended, as long as they shall end
    _told: set[str] = field(default_factory=set)

    def follow(
        self, wishes: ScaleWishes, slots: Sequence[WorkerSlot], seen: Mapping[str, SeenWorker], now: float
    ) -> list[ScaleStep]:
        """Return what to do. `seen` are the gateway's workers by name."""
        if wishes.board != self._board:
            self._board, self._given = wishes.board, {}
            self._told.clear()
            for slot in slots:
                if slot.phase not in (Phase.UNUSED, Phase.STOPPING, Phase.STOPPED):
                    self._coming.setdefault(slot.name, now + _REGISTER_S)
        steps: list[ScaleStep] = []
        counted = seen.keys() if wishes.counted is None else wishes.counted
        for slot in slots:
            steps += self._see(slot, counted, now)
        numbers = {wish.number for wish in wishes.starts}
        self._given = {number: name for number, name in self._given.items() if number in numbers}
        for wish in wishes.starts:
            if wish.number not in self._given:
                steps += self._start(wish, slots, now)
        return steps + self._end(wishes.stops, slots, seen, now)

    # ---- workers that start

    def _see(self, slot: WorkerSlot, counted: Collection[str], now: float) -> list[ScaleStep]:
        """Notice that a worker could not start, or that the autoscaler has counted it."""
        if slot.name not in self._coming:
            self._failures[slot.name] = slot.start_failures
            return []
        if slot.phase is Phase.READY and slot.worker in counted:
            self._retries.pop(slot.role, None)
            del self._coming[slot.name]
            return []
        if slot.phase is not Phase.STARTING and now >= self._coming[slot.name]:
            del self._coming[slot.name]
            return []
        if slot.phase is not Phase.UNUSED:
            return []
        del self._coming[slot.name]
        if slot.start_failures == self._failures.get(slot.name, 0):
            return []
        self._failures[slot.name] = slot.start_failures
        self._given = {number: name for number, name in self._given.items() if name != slot.name}
        retry = self._retries.setdefault(slot.role, _Retry(RestartBackoff(self.backoff)))
        pause_s = retry.backoff.pause_s(None)
        retry.after_s = now + pause_s
        return [
            Tell(
                f"{slot.name}: the autoscaler wanted it, but {slot.start_failure}; the next try is not before {pause_s:g} s"
            )
        ]

    def _start(self, wish: StartWish, slots: Sequence[WorkerSlot], now: float) -> list[ScaleStep]:
        taken = set(self._given.values())
        coming = [slot for slot in slots if slot.name in self._coming and slot.name not in taken]
        if (slot := next((one for one in coming if one.role == wish.role), None)) is not None:
            self._given[wish.number] = slot.name
            return []
        retry = self._retries.get(wish.role)
        if retry is not None and now < retry.after_s:
            return []
        unused = [slot for slot in slots if slot.phase is Phase.UNUSED and slot.name not in taken]
        slot = next((one for one in unused if one.role == wish.role), None)
        if slot is None:
            return self._tell_once(
                f"start {wish.number}",
                f"the autoscaler wants another {wish.role} worker, but all that fleet.toml allows are in use; "
                f'raise max_count of [[workers]] with role = "{wish.role}"',
            )
        self._given[wish.number] = slot.name
        self._coming[slot.name] = math.inf
        return [Tell(f"{slot.name}: wanted by the autoscaler"), BringWorker(slot.name)]

    # ---- workers that end

    def _end(
        self, stops: Sequence[str], slots: Sequence[WorkerSlot], seen: Mapping[str, SeenWorker], now: float
    ) -> list[ScaleStep]:
        steps: list[ScaleStep] = []
        running = {slot.worker: slot for slot in slots if slot.worker and slot.phase is not Phase.UNUSED}
        self._released &= set(stops)  # the gateway lists a worker that has left until its next decision
        known_addresses = {slot.worker for slot in slots} | self._released
        for worker in stops:
            if worker not in running and worker not in known_addresses:
                steps += self._tell_once(
                    f"stop {worker}", f"the autoscaler wants {worker} to end, which is no worker of this fleet"
                )
            self._leaving.setdefault(worker, now)
        for worker, since_s in list(self._leaving.items()):
            slot, known = running.get(worker), seen.get(worker)
            # A gateway that was restarted does not list it any more, but the worker itself reports that it drains.
            if slot is None or (known is not None and not known.draining):
                del self._leaving[worker]
            elif slot.phase is not Phase.STOPPING and (
                not known or not known.requests or now - since_s >= self.drain_s
            ):
                left = f" although {known.requests} requests run there" if known and known.requests else ""
                steps += self._tell_once(
                    f"end {worker}", f"{slot.name}: the autoscaler does not need it; ending it{left}"
                )
                steps.append(ReleaseWorker(slot.name))
                self._released.add(worker)
        self._told -= {f"end {slot.worker}" for slot in slots if slot.worker not in self._leaving}
        return steps

    def _tell_once(self, subject: str, text: str) -> list[ScaleStep]:
        if subject in self._told:
            return []
        self._told.add(subject)
        return [Tell(text)]
