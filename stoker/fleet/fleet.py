"""Fleet: the workers that the gateway knows, with their health, speed and last report.

Workers come from the configuration or register themselves. The fleet does no I/O: the gateway's watchers probe the
workers and call the `saw_…` methods. The router calls `pool` for every request, so pools are cached until a worker
changes, or until the time at which a worker's health changes by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from stoker.base.ids import WorkerId
from stoker.fleet.ejection import brought_back
from stoker.fleet.health import HealthSettings, WorkerHealth
from stoker.fleet.rates import Rates
from stoker.fleet.spec import LoadReport, Role, WorkerSpec

_ALL = frozenset(Role)


@dataclass(slots=True, eq=False)
class Member:
    """One worker and everything the fleet knows about it. Only the fleet modifies it."""

    spec: WorkerSpec
    health: WorkerHealth
    models: frozenset[str]
    joined_at: float
    rates: Rates = field(default_factory=Rates)
    report: LoadReport | None = None
    reported_at: float = 0.0
    seen_at: float = 0.0  # when it was added, or last sent a heartbeat
    share: float = 1.0  # slow start: fraction of its full speed, updated when a pool is built
    weight: float = 1.0  # share of the work: the configured weight times `share`
    tokens_per_s: float = 1.0  # prefill speed: its own if known, else the fleet's average; reduced in slow start
    step_s: float = 1.0  # seconds per decode step, estimated the same way
    kv_used: float = 0.0  # fraction of its KV memory in use, 0 to 1, as last reported

    @property
    def worker_id(self) -> WorkerId:
        return self.spec.worker_id


@dataclass(frozen=True, slots=True)
class FleetSettings:
    health: HealthSettings = field(default_factory=HealthSettings)
    prefill_tokens_per_s: float = 8_000.0  # assumed until a worker's rate is known
    step_s: float = 0.02  # assumed until a worker's step time is known


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """The workers that may get a request for a model, valid until `until` or until a worker changes."""

    members: list[Member]
    plain: bool  # every member is a unified worker, and all are in one cluster
    until: float


class Fleet:
    """The set of known workers. See the module docstring."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._members: dict[WorkerId, Member] = {}
        self._pools: dict[tuple[str, frozenset[Role]], CandidatePool] = {}
        self._all_known = False  # the rates of all workers are known

    # ---- membership

    def add(self, spec: WorkerSpec, now: float) -> Member:
        """Add a worker, or refresh a known one (a heartbeat or a changed spec). Its health and rates are kept."""
        member = self._members.get(spec.worker_id)
        if member is not None:
            member.seen_at = now
            if member.spec != spec:
                member.spec = spec
                member.models = frozenset(spec.models) or member.models
                self._invalidate()
            return member
        # The first workers of a fleet skip the slow start: there is no other worker to take the load meanwhile.
        first = not any(now - other.joined_at > self._settings.health.slow_start_s for other in self._members.values())
        health = WorkerHealth(self._settings.health, now, warm=first)
        member = Member(spec, health, frozenset(spec.models), joined_at=now, seen_at=now)
        self._members[spec.worker_id] = member
        self._update_rates()
        self._invalidate()
        return member

    def remove(self, worker_id: WorkerId, now: float) -> None:
        if self._members.pop(worker_id, None) is not None:
            self._invalidate()

    def drain(self, worker_id: WorkerId, now: float, on: bool = True) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            member.health.drain(on, now)
            self._invalidate()

    def set_role(self, worker_id: WorkerId, role: Role, now: float) -> None:
        """Give a worker another role. The next request sees it."""
        member = self._members.get(worker_id)
        if member is not None:
            member.spec = replace(member.spec, role=role)
            self._invalidate()

    def expire(self, now: float, silent_s: float) -> list[WorkerId]:
        """Remove self-registered workers whose last heartbeat is older than `silent_s`, and return their ids."""
        lost = [m.worker_id for m in self._members.values() if not m.spec.from_config and now - m.seen_at > silent_s]
        for worker_id in lost:
            self.remove(worker_id, now)
        return lost

    def member(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def members(self) -> list[Member]:
        return list(self._members.values())

    def models(self) -> dict[str, list[Member]]:
        """Return every served model with its workers, whether they are usable now or not."""
        found: dict[str, list[Member]] = {}
        for member in self._members.values():
            for model in sorted(member.models):
                found.setdefault(model, []).append(member)
        return found

    # ---- observations

    def saw_probe(self, worker_id: WorkerId, *, live: bool, ready: bool, now: float) -> None:
        member = self._members.get(worker_id)
        # Every worker is probed every second. A large pool is built again only if a probe shows something new.
        if member is not None and member.health.saw_probe(live, ready, now):
            self._invalidate()

    def saw_models(self, worker_id: WorkerId, names: Sequence[str]) -> None:
        member = self._members.get(worker_id)
        if member is not None and not member.spec.models and member.models != frozenset(names):
            member.models = frozenset(names)
            self._invalidate()

    def saw_report(self, worker_id: WorkerId, report: LoadReport, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None:
            report = report.plausible()
            member.report, member.reported_at, member.kv_used = report, now, report.kv_used
            had_rates = member.rates.are_known
            member.rates.reported(report.prefill_tokens_per_s, report.step_s)
            # Once every worker's rates are known, no worker needs the average, and a report changes only its own worker.
            if had_rates and self._all_known:
                self._apply_rates(member, 0.0, 0.0)
            else:
                self._update_rates()

    def saw_prefill(self, worker_id: WorkerId, tokens: int, seconds: float) -> None:
        """Record a prefill: `seconds` from sending to the first token, on a worker with no other prompt in its queue."""
        member = self._members.get(worker_id)
        if member is not None:
            member.rates.measured(tokens, seconds)
            self._update_rates()

    def saw_first_token(self, worker_id: WorkerId, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None and member.health.saw_first_token(now):
            self._invalidate()

    def saw_success(self, worker_id: WorkerId, now: float) -> None:
        member = self._members.get(worker_id)
        if member is not None and member.health.saw_success(now):
            self._invalidate()

    def saw_failure(self, worker_id: WorkerId, now: float, kind: str, began_s: float | None = None) -> None:
        """Record a request that failed because of the worker. `kind` is connect, lost, status5xx, timeout, invalid,
        too_large or busy.

        If `began_s` is given, and the worker has done well with another request since then, the failure does not count.
        """
        member = self._members.get(worker_id)
        if member is not None:
            member.health.saw_failure(kind, now, began_s)
            self._invalidate()

    def begin_request(self, member: Member, now: float) -> None:
        """Record that a request is sent to the worker; it may be a circuit breaker's trial request."""
        if member.health.begin_request(now):
            self._invalidate()

    # ---- queries

    def candidates(self, model: str, roles: Collection[Role], now: float) -> list[Member]:
        """Return the workers that may get a request for the model now.

        A worker that has just answered "busy" is left out, unless all workers that could do the same work did so.
        """
        return list(self.pool(model, now, roles if isinstance(roles, frozenset) else frozenset(roles)).members)

    def pool(self, model: str, now: float, roles: frozenset[Role] = _ALL) -> CandidatePool:
        """Return the workers of `candidates` as a pool. Pools are cached, so the caller must not modify them."""
        pool = self._pools.get((model, roles))
        if pool is None or now >= pool.until:
            pool = self._build_pool(model, roles, now)
            if pool.members:  # clients can invent any number of model names: cache only those that are served
                self._pools[model, roles] = pool
        return pool

    def in_service(self, member: Member, now: float) -> bool:
        """Return True if the worker may get requests now: its health allows it, or its pool has too few others."""
        if not member.models:
            return member.health.usable(now)
        return any(member in self.pool(model, now).members for model in member.models)

    def usable_in_s(self, model: str, now: float) -> float | None:
        """Return the seconds until a worker of the model becomes usable by itself, or None if that is not known."""
        times = [m.health.usable_at(now) for m in self._members.values() if model in m.models]
        known = [time for time in times if time is not None]
        return max(0.0, min(known) - now) if known else None

    def prefill_rate(self, member: Member) -> float:
        return member.tokens_per_s

    def step_s(self, member: Member) -> float:
        return member.step_s

    def _update_rates(self) -> None:
        """Estimate each worker's speed. Unmeasured workers get the fleet's average; slow start reduces all rates."""
        members, settings = self._members.values(), self._settings
        rates = [m.rates.prefill_tokens_per_s for m in members if m.rates.prefill_tokens_per_s is not None]
        steps = [m.rates.step_s for m in members if m.rates.step_s is not None]
        mean_rate = sum(rates) / len(rates) if rates else settings.prefill_tokens_per_s
        mean_step_s = sum(steps) / len(steps) if steps else settings.step_s
        self._all_known = all(member.rates.are_known for member in members)
        for member in members:
            self._apply_rates(member, mean_rate, mean_step_s)

    def _apply_rates(self, member: Member, mean_rate: float, mean_step_s: float) -> None:
        """Set a worker's speed. The means are used for what is not known of it."""
        weight, rate, step_s = member.spec.weight, member.rates.prefill_tokens_per_s, member.rates.step_s
        member.weight = weight * member.share
        member.tokens_per_s = (mean_rate * weight if rate is None else rate) * member.share
        member.step_s = (mean_step_s / weight if step_s is None else step_s) / member.share

    def _build_pool(self, model: str, roles: frozenset[Role], now: float) -> CandidatePool:
        members = [m for m in self._members.values() if model in m.models and m.spec.role in roles]
        back = self._brought_back(members, now)
        usable = [m for m in members if m.health.usable(now) or m.health in back]
        for member in usable:
            member.share = member.health.share(now)
        self._update_rates()
        # A free prefill worker cannot replace a busy decode or unified worker, nor the other way round.
        free = {m.spec.role is Role.PREFILL for m in usable if not m.health.busy(now)}
        chosen = [m for m in usable if not m.health.busy(now) or (m.spec.role is Role.PREFILL) not in free]
        plain = all(m.spec.role is Role.UNIFIED for m in chosen) and len({m.spec.cluster for m in chosen}) < 2
        return CandidatePool(chosen, plain, min((m.health.changes_at(now) for m in members), default=float("inf")))

    def _brought_back(self, members: Sequence[Member], now: float) -> list[WorkerHealth]:
        settings = self._settings.health
        prefilling = [m for m in members if m.spec.role is Role.PREFILL]
        answering = [m for m in members if m.spec.role is not Role.PREFILL]
        return brought_back(prefilling, settings, now) + brought_back(answering, settings, now)

    def _invalidate(self) -> None:
        self._pools.clear()
