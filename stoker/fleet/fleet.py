"""Fleet: who is there. Members come from the configuration or register themselves; what is heard of them is kept here.

Nothing is asked here: the gateway's watchers do the asking and call `saw_…`. Routers ask `candidates`, which is on the
path of every request: its answers are kept until something changes, or until a member's health changes by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.fleet.health import HealthSettings, WorkerHealth
from stoker.fleet.rates import Rates
from stoker.fleet.spec import LoadReport, Role, WorkerSpec

_ALL = frozenset(Role)


@dataclass(slots=True, eq=False)
class Member:
    """One worker, as the fleet knows it. The fleet alone changes it."""

    spec: WorkerSpec
    health: WorkerHealth
    models: frozenset[str]
    joined_at: float
    rates: Rates = field(default_factory=Rates)
    report: LoadReport | None = None
    reported_at: float = 0.0
    seen_at: float = 0.0  # the last time it was added, or registered again
    share: float = 1.0  # of a settled worker's speed; as of the last `candidates`
    weight: float = 1.0  # its part of the work, against a settled worker of weight 1
    tokens_per_s: float = 1.0  # of prefill, as far as known: its own, else the others' average; less in slow start
    step_s: float = 1.0
    kv_used: float = 0.0

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id


@dataclass(frozen=True, slots=True)
class FleetSettings:
    health: HealthSettings = field(default_factory=HealthSettings)
    prefill_tokens_per_s: float = 8_000.0  # until somebody's rate is known
    step_s: float = 0.02


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """Who may get a request for a model, until something changes."""

    members: list[Member]
    plain: bool  # all unified, all in one cluster
    until: float


class Fleet:
    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._members: dict[WorkerId, Member] = {}
        self._kept: dict[tuple[str, frozenset[Role]], CandidatePool] = {}

    # ---- who is there

    def add(self, spec: WorkerSpec, now: float) -> Member:
        """A new worker, or a known one again: a heartbeat, or a changed spec. What was learnt of it stays."""
        member = self._members.get(spec.worker_id)
        if member is not None:
            member.seen_at = now
            if member.spec != spec:
                member.spec = spec
                member.models = frozenset(spec.models) or member.models
                self._changed()
            return member
        # The first of a fleet have nobody to take their load meanwhile: they need no slow start.
        first = not any(now - other.joined_at > self._settings.health.slow_start_s for other in self._members.values())
        health = WorkerHealth(self._settings.health, now, warm=first)
        member = Member(spec, health, frozenset(spec.models), joined_at=now, seen_at=now)
        self._members[spec.worker_id] = member
        self._settle_rates()
        self._changed()
        return member

    def remove(self, worker_id: WorkerId, now: float) -> None:
        if self._members.pop(worker_id, None) is not None:
            self._changed()

    def drain(self, worker_id: WorkerId, now: float, on: bool = True) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            member.health.drain(on, now)
            self._changed()

    def expire(self, now: float, silent_s: float) -> list[WorkerId]:
        """Removes those who registered themselves and were not heard of for so long."""
        lost = [m.worker_id for m in self._members.values() if not m.spec.from_config and now - m.seen_at > silent_s]
        for worker_id in lost:
            self.remove(worker_id, now)
        return lost

    def member(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def models(self) -> dict[str, list[Member]]:
        """Every model that somebody serves, usable now or not, and who."""
        found: dict[str, list[Member]] = {}
        for member in self._members.values():
            for model in sorted(member.models):
                found.setdefault(model, []).append(member)
        return found

    # ---- what is heard

    def saw_probe(self, worker_id: WorkerId, *, live: bool, ready: bool, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            member.health.saw_probe(live, ready, now)
            self._changed()

    def saw_models(self, worker_id: WorkerId, names: Sequence[str]) -> None:
        member = self._members.get(worker_id)
        if member is not None and not member.spec.models and member.models != frozenset(names):
            member.models = frozenset(names)
            self._changed()

    def saw_report(self, worker_id: WorkerId, report: LoadReport, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            member.report, member.reported_at = report, now
            member.kv_used = min(max(report.kv_used, 0.0), 1.0)
            member.rates.reported(report.prefill_tokens_per_s, report.step_s)
            self._settle_rates()

    def saw_prefill(self, worker_id: WorkerId, tokens: int, seconds: float) -> None:
        """So many tokens took so long, from sending to the first token, on a worker with nothing else to compute."""
        member = self._members.get(worker_id)
        if member is not None:
            member.rates.measured(tokens, seconds)
            self._settle_rates()

    def saw_first_token(self, worker_id: WorkerId, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None and member.health.saw_first_token(now):
            self._changed()

    def saw_success(self, worker_id: WorkerId, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None and member.health.saw_success(now):
            self._changed()

    def saw_failure(self, worker_id: WorkerId, now: float, kind: str) -> None:
        """`kind`: connect, lost, status5xx, timeout or busy."""
        member = self._members.get(worker_id)
        if member is not None:
            member.health.saw_failure(kind, now)
            self._changed()

    def begin_request(self, member: Member, now: float) -> None:
        if member.health.begin_request(now):
            self._changed()

    # ---- what routers ask

    def candidates(self, model: str, roles: Collection[Role], now: float) -> list[Member]:
        """Who may get a request for the model now. Those that just said "busy" only when all who do the same work did."""
        return list(self.pool(model, now, roles if isinstance(roles, frozenset) else frozenset(roles)).members)

    def pool(self, model: str, now: float, roles: frozenset[Role] = _ALL) -> CandidatePool:
        """The same, as it is kept: not to be changed."""
        pool = self._kept.get((model, roles))
        if pool is None or now >= pool.until:
            pool = self._look(model, roles, now)
            if pool.members:  # names that nobody serves are a client's invention, and without end
                self._kept[model, roles] = pool
        return pool

    def usable_in_s(self, model: str, now: float) -> float | None:
        """How long until somebody serves the model again, if nothing is heard; None: nobody knows."""
        times = [m.health.usable_at(now) for m in self._members.values() if model in m.models]
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - now) if known else None

    def prefill_rate(self, member: Member) -> float:
        return member.tokens_per_s

    def step_s(self, member: Member) -> float:
        return member.step_s

    def _settle_rates(self) -> None:
        """Those not measured are thought as fast as the others on average; all are slower while they warm up."""
        members, settings = self._members.values(), self._settings
        rates = [m.rates.prefill_tokens_per_s for m in members if m.rates.prefill_tokens_per_s is not None]
        steps = [m.rates.step_s for m in members if m.rates.step_s is not None]
        mean_rate = sum(rates) / len(rates) if rates else settings.prefill_tokens_per_s
        mean_step_s = sum(steps) / len(steps) if steps else settings.step_s
        for member in members:
            weight, rate, step_s = member.spec.weight, member.rates.prefill_tokens_per_s, member.rates.step_s
            member.weight = weight * member.share
            member.tokens_per_s = (mean_rate * weight if rate is None else rate) * member.share
            member.step_s = (mean_step_s / weight if step_s is None else step_s) / member.share

    def _look(self, model: str, roles: frozenset[Role], now: float) -> CandidatePool:
        there = [m for m in self._members.values() if model in m.models and m.spec.role in roles]
        usable = [m for m in there if m.health.usable(now)]
        for member in usable:
            member.share = member.health.share(now)
        self._settle_rates()
        # A prefill worker cannot make up for one that answers, nor the other way round.
        free = {m.spec.role is Role.PREFILL for m in usable if not m.health.busy(now)}
        found = [m for m in usable if not m.health.busy(now) or (m.spec.role is Role.PREFILL) not in free]
        plain = all(m.spec.role is Role.UNIFIED for m in found) and len({m.spec.cluster for m in found}) < 2
        return CandidatePool(found, plain, min((m.health.changes_at(now) for m in there), default=float("inf")))

    def _changed(self) -> None:
        self._kept.clear()
