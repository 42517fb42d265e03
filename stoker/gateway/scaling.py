"""Runs the autoscaler on the gateway's fleet: samples, decides, logs every decision with its numbers, and carries it out.

Roles change through `Duties`. Workers start and stop through a `WorkerPlacement`. The gateway itself starts no process: it lists
what it wants under `/admin/scale`, where `stoker up` or another placement engine reads it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from stoker.autoscale.autoscaler import Autoscaler
from stoker.autoscale.decision import Action, Decision, Flip, Keep, Start, Stop
from stoker.autoscale.placement import WorkerPlacement
from stoker.autoscale.sample import FleetSample, WorkerSample
from stoker.autoscale.settings import AutoscaleSettings
from stoker.base.errors import StokerError
from stoker.base.histogram import Histogram
from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import Role
from stoker.gateway.duties import Duties
from stoker.proto.admin_api import ScaleDecision, ScaleWishes, StartWish

_KEPT_DECISIONS = 50
_MAX_WISHES = 64

log = EventLog("autoscale")


class ScaleBoard:
    """The workers that are wanted and those that may stop, until the fleet shows that it has happened."""

    def __init__(self, clock: Callable[[], float], name: str) -> None:
        self._clock = clock
        self.name = name  # of this process's wishes: their numbers begin again after a restart
        self._starts: deque[tuple[StartWish, float]] = deque(maxlen=_MAX_WISHES)
        self._stops: dict[WorkerId, None] = {}
        self._count = 0

    def start(self, role: Role) -> None:
        self._count += 1
        self._starts.append((StartWish(number=self._count, role=role.value), self._clock()))

    def stop(self, worker_id: WorkerId) -> None:
        if len(self._stops) < _MAX_WISHES:
            self._stops[worker_id] = None

    def forget(self, fleet: Fleet, start_s: float) -> None:
        """Drop wishes that are fulfilled or too old."""
        self._stops = {worker_id: None for worker_id in self._stops if fleet.member(worker_id) is not None}
        while self._starts and self._clock() - self._starts[0][1] >= start_s:
            self._starts.popleft()

    def joined(self) -> None:
        """Note that a worker has joined: the oldest wish is fulfilled."""
        if self._starts:
            self._starts.popleft()

    @property
    def starts(self) -> list[StartWish]:
        return [wish for wish, _ in self._starts]

    @property
    def stops(self) -> list[WorkerId]:
        return list(self._stops)


class WaitingRequests(Protocol):
    """The queue in which requests wait for a worker."""

    @property
    def num_waiting(self) -> int: ...


@dataclass(slots=True, eq=False)
class FleetSampler:
    """Reads the fleet for the autoscaler. Rates and percentiles are those since the last sample."""

    fleet: Fleet
    load_book: LoadBook
    admission: WaitingRequests
    ttft_s: Histogram
    warm_s: float = 0.0
    _last: tuple[float, int, int] | None = None  # time, arrived tokens and requests
    _ttft_counts: list[int] = field(default_factory=list)

    def sample(self, now: float) -> FleetSample:
        tokens, requests = self.load_book.arrived_tokens, self.load_book.arrived_requests
        last_s, last_tokens, last_requests = self._last or (now, tokens, requests)
        self._last = (now, tokens, requests)
        mean_tokens = (tokens - last_tokens) / max(1, requests - last_requests)
        return FleetSample(
            workers=[self._worker(member, now) for member in self.fleet.members() if self._serves(member, now)],
            waiting_tokens=self.admission.num_waiting * mean_tokens,
            arrived_tokens_per_s=(tokens - last_tokens) / max(now - last_s, 1e-3),
            ttft_s=self._percentile(),
        )

    def _serves(self, member: Member, now: float) -> bool:
        return bool(member.models) and (member.health.draining or self.fleet.in_service(member, now))

    def _worker(self, member: Member, now: float) -> WorkerSample:
        report = member.report
        load = self.load_book.load(member.worker_id, now, self.fleet.prefill_rate(member))
        return WorkerSample(
            worker_id=member.worker_id,
            role=member.spec.role,
            age_s=now - member.joined_at,
            queued_tokens=max(load.queued_tokens, float(report.waiting_tokens if report else 0)),
            prefill_tokens_per_s=member.rates.prefill_tokens_per_s,
            running=max(load.decoding, report.running_sequences if report else 0),
            step_s=member.rates.step_s,
            kv_used=member.kv_used,
            draining=member.health.draining,
        )

    def _percentile(self) -> float | None:
        """Return the 90th percentile of the time to the first token since the last sample, as the bound of its bucket."""
        counts, before = self.ttft_s.cumulative(), self._ttft_counts
        self._ttft_counts = counts
        new = [count - old for count, old in zip(counts, before or [0] * len(counts), strict=True)]
        if new[-1] < 1:
            return None
        bucket = next(i for i, count in enumerate(new) if count >= 0.9 * new[-1])
        return self.ttft_s.bounds[min(bucket, len(self.ttft_s.bounds) - 1)]


class Scaling:
    """The autoscaler's loop in the gateway."""

    def __init__(
        self,
        settings: AutoscaleSettings,
        sampler: FleetSampler,
        duties: Duties,
        placement: WorkerPlacement,
        board: ScaleBoard,
        clock: Callable[[], float],
        errors: TaskErrors | None = None,
    ) -> None:
        self._errors = errors or TaskErrors()
        self._settings = settings
        self._sampler = sampler
        self._duties = duties
        self._placement = placement
        self._board = board
        self._clock = clock
        self._scaler = Autoscaler(settings)
        self._decisions: deque[tuple[float, Decision]] = deque(maxlen=_KEPT_DECISIONS)
        self._known: set[WorkerId] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._settings.mode != "off":
            self._task = asyncio.create_task(repeat("autoscale", self._turn, self._errors), name="autoscale")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wishes(self) -> ScaleWishes:
        """Return what a placement engine should do, and the latest decisions."""
        now = self._clock()
        return ScaleWishes(
            mode=self._settings.mode,
            board=self._board.name,
            starts=self._board.starts,
            stops=list(self._board.stops),
            counted=sorted(self._known or ()),
            decisions=[
                ScaleDecision(
                    age_s=round(now - at_s, 1),
                    action=decision.action.describe(),
                    reason=decision.reason,
                    numbers=decision.numbers,
                )
                for at_s, decision in reversed(self._decisions)
            ],
        )

    async def _turn(self) -> None:
        await asyncio.sleep(self._settings.interval_s)
        await self.step()

    async def step(self) -> Decision:
        """Decide once, and carry it out unless this is a dry run."""
        now = self._clock()
        sample = self._sampler.sample(now)
        self._follow(sample)
        decision = self._scaler.decide(sample, now)
        self._decisions.append((now, decision))
        is_real = self._settings.mode == "on"
        log.event(
            "decision",
            action=decision.action.describe(),
            dry_run=not is_real,
            reason=decision.reason,
            **decision.numbers,
        )
        if is_real and not isinstance(decision.action, Keep):
            try:
                await self._carry_out(decision.action)
            except StokerError as refused:
                log.warning("decision_refused", action=decision.action.describe(), reason=refused.message)
                return decision
        self._scaler.carried_out(decision.action, sample, now)
        return decision

    def _follow(self, sample: FleetSample) -> None:
        ids = {one.worker_id for one in sample.workers}
        if self._known is not None and ids - self._known:
            self._board.joined()
        self._known = ids
        self._board.forget(self._sampler.fleet, self._settings.start_s)

    async def _carry_out(self, action: Action) -> None:
        match action:
            case Flip(worker_id=worker_id, role=role):
                await self._duties.set_role(self._member(worker_id), role, move=True)
            case Start(role=role):
                self._placement.start(role)
            case Stop(worker_id=worker_id):
                await self._duties.drain(self._member(worker_id), move=True)
                self._placement.stop(worker_id)

    def _member(self, worker_id: WorkerId) -> Member:
        member = self._sampler.fleet.member(worker_id)
        if member is None:
            raise StokerError(f"worker {worker_id} has left the fleet")
        return member
