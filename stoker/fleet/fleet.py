"""Fleet: who is there. Members come from the configuration or register themselves; what is heard of them is kept here.

Nothing is asked here: the gateway's watchers do the asking and call `saw_…`. Routers ask `candidates`, which is on the
path of every request: its answers are kept until something changes, or until a member's health changes by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from stoker.base.ids import WorkerId
from stoker.fleet.health import Health, HealthSettings
from stoker.fleet.rates import Rates
from stoker.fleet.spec import Role, WorkerLoad, WorkerSpec


@dataclass(slots=True, eq=False)
class Member:
    """One worker, as the fleet knows it. The fleet alone changes it."""

    spec: WorkerSpec
    health: Health
    models: frozenset[str]
    rates: Rates = field(default_factory=Rates)
    report: WorkerLoad | None = None
    reported_at: float = 0.0
    seen_at: float = 0.0  # the last time it was added, or registered again
    share: float = 1.0  # of a settled worker's speed; as of the last `candidates`
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
class _Kept:
    members: list[Member]
    until: float


class Fleet:
    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._members: dict[WorkerId, Member] = {}
        self._kept: dict[tuple[str, frozenset[Role]], _Kept] = {}
        self._prefill_rate: float | None = None
        self._step_s: float | None = None

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
        first = not any(now - other.seen_at > self._settings.health.slow_start_s for other in self._members.values())
        member = Member(spec, Health(self._settings.health, now, warm=first), frozenset(spec.models), seen_at=now)
        self._members[spec.worker_id] = member
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

    def saw_report(self, worker_id: WorkerId, report: WorkerLoad, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            member.report, member.reported_at = report, now
            member.kv_used = min(max(report.kv_used, 0.0), 1.0)
            member.rates.reported(report.prefill_tokens_per_s, report.step_s)
            self._prefill_rate = self._step_s = None

    def saw_prefill(self, worker_id: WorkerId, tokens: int, seconds: float) -> None:
        """So many tokens took so long, from sending to the first token, on a worker with nothing else to compute."""
        member = self._members.get(worker_id)
        if member is not None:
            member.rates.measured(tokens, seconds)
            self._prefill_rate = None

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
        """Who may get a request for the model now. Those that just said "busy" only when all did. Do not change it."""
        key = (model, roles if isinstance(roles, frozenset) else frozenset(roles))
        kept = self._kept.get(key)
        if kept is None or now >= kept.until:
            kept = self._look(model, key[1], now)
            if kept.members:  # names that nobody serves are a client's invention, and without end
                self._kept[key] = kept
        return kept.members

    def usable_in_s(self, model: str, now: float) -> float | None:
        """How long until somebody serves the model again, if nothing is heard; None: nobody knows."""
        times = [m.health.usable_at(now) for m in self._members.values() if model in m.models]
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - now) if known else None

    def prefill_rate(self, member: Member) -> float:
        """Tokens a second, as far as known: its own, else the others' average, else the setting; less in slow start."""
        rate = member.rates.prefill_tokens_per_s
        if rate is None:
            rate = self._prefill_rate
            if rate is None:
                rates = [m.rates.prefill_tokens_per_s for m in self._members.values()]
                known = [one for one in rates if one is not None]
                rate = self._prefill_rate = sum(known) / len(known) if known else self._settings.prefill_tokens_per_s
            rate *= member.spec.weight
        return rate * member.share

    def step_s(self, member: Member) -> float:
        step_s = member.rates.step_s
        if step_s is None:
            step_s = self._step_s
            if step_s is None:
                known = [m.rates.step_s for m in self._members.values() if m.rates.step_s is not None]
                step_s = self._step_s = sum(known) / len(known) if known else self._settings.step_s
            step_s /= member.spec.weight
        return step_s / member.share

    def _look(self, model: str, roles: frozenset[Role], now: float) -> _Kept:
        there = [m for m in self._members.values() if model in m.models and m.spec.role in roles]
        usable = [m for m in there if m.health.usable(now)]
        for member in usable:
            member.share = member.health.share(now)
        found = [m for m in usable if not m.health.busy(now)] or usable
        return _Kept(found, min((m.health.changes_at(now) for m in there), default=float("inf")))

    def _changed(self) -> None:
        self._kept.clear()
