"""Autoscaler: decides which worker changes its role, starts or stops, from the load of the two pools.

The pools are the workers that prefill and those that decode. The load of a pool is 1 where its latency goal is just met. Above
`high` it needs a worker. It gets one from the other pool, if that stays well below `high` without it; else a new one, if the
budget allows. Before that, a pool with a much higher load than the other one gets a worker of it. A pool that would stay below
`low` without one of its workers gives it up.

The load of decode is that to be expected, because it follows the traffic late (`forecast.py`). A decode pool above `high` also gets
a worker that prefill does not have to spare, if the higher load of the two becomes clearly lower. The opposite does not hold:
decode workers compute prompts too when prefill is busy, but nothing helps decode.

What keeps it calm: several decisions in a row must agree, there is a pause after each change and a longer one before the opposite
change, and measurements of new workers do not count. A worker that was asked for is counted until it joins or its time is over;
then the pause before the next request for one doubles. Each decision changes at most one worker.

A large overload needs several workers. After the first confirmed flip, the next decisions flip further workers without a pause,
as long as the pool is above `high` and the other pool has room. Their number follows from the load, and a pool at most doubles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.autoscale.decision import KEEP, Action, Decision, Flip, Keep, Start, Stop
from stoker.autoscale.forecast import DecodeForecast
from stoker.autoscale.sample import FleetSample, PoolLoad, WorkerSample, decode_load, prefill_load
from stoker.autoscale.settings import AutoscaleSettings
from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role

_IMBALANCE = 3.0  # a pool with this many times the load of the other one gets a worker before it misses its goal
_BALANCE = 0.9  # a worker moves to a pool above its goal if the higher load of both becomes this much lower
_LONGEST_PAUSE_S = 3600.0  # between two requests for a worker that nothing can place


@dataclass(slots=True)
class _PendingStart:
    """A worker that was asked for."""

    until_s: float
    known: frozenset[WorkerId]  # the workers that were there when it was asked for


class Autoscaler:
    """The autoscaler of one model's workers. Call `decide` at a steady interval, and `carried_out` for what was done."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self._settings = settings
        self._agreeing: Action = KEEP
        self._num_agreeing = 0
        self._changed_s = -math.inf
        self._grew: Role | None = None  # the pool that the last change made larger
        self._num_more = 0  # further workers that this pool gets without a pause
        self._pending: _PendingStart | None = None
        self._num_unmet = 0
        self._start_after_s = -math.inf
        self._stopping: set[WorkerId] = set()
        self._forecast = DecodeForecast(settings.reverse_s, settings.high)

    def decide(self, sample: FleetSample, now: float) -> Decision:
        """Return what to do now. The time must not go back."""
        self._follow(sample.workers, now)
        prefill = prefill_load(sample, self._settings)
        decode = self._forecast.expected(decode_load(sample, self._settings), now)
        numbers = self._numbers(sample, prefill, decode)
        more, reason = self._further_flip(sample, prefill, decode, now)
        if isinstance(more, Flip):
            return Decision(more, reason, numbers)
        wanted, reason = self._wanted(sample, prefill, decode, now)
        if isinstance(wanted, Keep):
            self._num_agreeing = 0
            return Decision(KEEP, reason, numbers)
        # Which of several equal workers is named may change between two decisions.
        self._num_agreeing = self._num_agreeing + 1 if _alike(wanted, self._agreeing) else 1
        self._agreeing = wanted
        if self._num_agreeing < self._settings.confirm:
            confirmed = f"{self._num_agreeing} of {self._settings.confirm}"
            return Decision(KEEP, f"{reason}; {wanted.describe()} when confirmed ({confirmed})", numbers)
        return Decision(wanted, reason, numbers)

    def carried_out(self, action: Action, sample: FleetSample, now: float) -> None:
        """Note that an action was carried out, or in a dry run, that it would have been."""
        if isinstance(action, Keep):
            return
        self._changed_s, self._num_agreeing = now, 0
        self._grew = None if isinstance(action, Stop) else action.role
        if isinstance(action, Start):
            known = frozenset(one.worker_id for one in sample.workers)
            self._pending = _PendingStart(now + self._settings.start_s, known)
        elif isinstance(action, Stop):
            self._stopping.add(action.worker_id)
        elif self._num_more:
            self._num_more -= 1
        else:
            load_of = decode_load if action.role is Role.DECODE else prefill_load
            self._num_more = max(0, self._num_missing(load_of(sample, self._settings)) - 1)

    # ---- what happened since

    def _follow(self, workers: Sequence[WorkerSample], now: float) -> None:
        ids = {one.worker_id for one in workers}
        self._stopping &= ids
        if self._pending is None:
            return
        if ids - self._pending.known:
            self._pending, self._num_unmet, self._start_after_s = None, 0, -math.inf
        elif now >= self._pending.until_s:
            self._pending = None
            pause_s = self._settings.start_s * 2.0 ** min(self._num_unmet, 20)
            self._start_after_s = now + min(pause_s, _LONGEST_PAUSE_S)
            self._num_unmet += 1

    # ---- what to do

    def _wanted(self, sample: FleetSample, prefill: PoolLoad, decode: PoolLoad, now: float) -> tuple[Action, str]:
        settings = self._settings
        if now - self._changed_s < settings.hold_s:
            return KEEP, f"the last change was {now - self._changed_s:.1f} s ago, and hold_s is {settings.hold_s:g}"
        loads = f"prefill {prefill.load:.2f}, decode {decode.load:.2f}"
        high, low = settings.high, settings.low
        pools = ((prefill, Role.PREFILL, decode), (decode, Role.DECODE, prefill))
        needy = sorted((one for one in pools if one[0].load > high), key=lambda one: -one[0].load)
        reasons = []
        for pool, role, other in needy:
            action, reason = self._grow(sample, pool, role, other, now)
            if not isinstance(action, Keep):
                return action, f"{loads}: {reason}"
            reasons.append(reason)
        if reasons:
            return KEEP, f"{loads}: {'; '.join(reasons)}"
        for pool, role, other in pools:
            if pool.load > (low + high) / 2 and other.without(1) < pool.load / _IMBALANCE:
                action, reason = self._take(sample, pool, role, other, now)
                return action, f"{loads}: {reason}"
        if prefill.load <= low and decode.load <= low:
            return self._shrink(sample, prefill, decode, now, loads)
        return KEEP, f"{loads}: within the goals"

    def _further_flip(self, sample: FleetSample, prefill: PoolLoad, decode: PoolLoad, now: float) -> tuple[Action, str]:
        """Return the next flip for a large overload. The rest is given up when one is not needed or not possible."""
        if not self._num_more or self._grew is None:
            return KEEP, ""
        pool, other = (decode, prefill) if self._grew is Role.DECODE else (prefill, decode)
        if pool.load > self._settings.high:
            action, reason = self._take(sample, pool, self._grew, other, now)
            if isinstance(action, Flip):
                loads = f"prefill {prefill.load:.2f}, decode {decode.load:.2f}"
                return action, f"{loads}: {reason}; {self._num_more} more in a row"
        self._num_more = 0
        return KEEP, ""

    def _num_missing(self, pool: PoolLoad) -> int:
        """Return how many more workers bring the load of a pool to `high`, at most as many as it has."""
        if pool.load >= 2 * self._settings.high:
            return pool.num_workers
        return math.ceil(pool.num_workers * (pool.load / self._settings.high - 1))

    def _grow(self, sample: FleetSample, pool: PoolLoad, role: Role, other: PoolLoad, now: float) -> tuple[Action, str]:
        """Return how a pool above its goal gets a worker."""
        settings, name = self._settings, role.value
        action, reason = self._take(sample, pool, role, other, now)
        if isinstance(action, Flip) or pool.num_cold or self._reverses(role, now):
            return action, reason
        size = self._size(sample)
        if size >= settings.max_workers:
            return KEEP, f"{name} needs a worker, but {size} of max_workers={settings.max_workers} are in use"
        if self._pending is not None:
            return KEEP, f"{name} needs a worker, and one that was asked for has not joined yet"
        if now < self._start_after_s:
            return (
                KEEP,
                f"{name} needs a worker, but {self._num_unmet} that were asked for did not come; asking again later",
            )
        has_roles = any(one.role is not Role.UNIFIED for one in sample.workers)
        return Start(role if has_roles else Role.UNIFIED), f"{name} is above {settings.high:g}, and no worker is free"

    def _take(self, sample: FleetSample, pool: PoolLoad, role: Role, other: PoolLoad, now: float) -> tuple[Action, str]:
        """Return which worker the other pool gives to this one, if it can spare one."""
        settings, name = self._settings, role.value
        if pool.num_cold:
            return KEEP, f"{name} needs a worker, but it just got one"
        donor_role = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        least = settings.min_decode if donor_role is Role.DECODE else settings.min_prefill
        donors = self._free(sample, donor_role)
        # Donors are counted with the unified workers of their pool, which do the same work.
        if not donors or other.num_workers <= least or other.num_cold:
            return KEEP, f"{name} needs a worker, and {donor_role.value} has none to give"
        has_room = other.without(1) < (settings.low + settings.high) / 2
        if not has_room and not self._balances(pool, role, other):
            return KEEP, f"{name} needs a worker, and {donor_role.value} needs its own"
        if self._reverses(role, now):
            return KEEP, f"{name} needs a worker, but the last change went the other way less than reverse_s ago"
        return Flip(_idlest(donors).worker_id, role), f"{name} needs a worker, and {donor_role.value} has room"

    def _balances(self, pool: PoolLoad, role: Role, other: PoolLoad) -> bool:
        """Return True if a prefill worker that turns to decode lowers the higher load of the two."""
        if role is not Role.DECODE or pool.load <= self._settings.high:
            return False
        return max(pool.with_more(1), other.without(1)) < _BALANCE * pool.load

    def _shrink(
        self, sample: FleetSample, prefill: PoolLoad, decode: PoolLoad, now: float, loads: str
    ) -> tuple[Action, str]:
        """Return which worker of a fleet with little load stops, if any."""
        settings = self._settings
        if not settings.max_workers or len(sample.workers) - len(self._stopping) <= settings.min_workers:
            return KEEP, f"{loads}: little load, and no worker may stop"
        if self._pending is not None:
            return KEEP, f"{loads}: little load, and a worker that was asked for has not joined yet"
        if self._grew is not None and now - self._changed_s < settings.reverse_s:
            return KEEP, f"{loads}: little load, but the fleet grew less than reverse_s ago"
        if prefill.num_cold or decode.num_cold:
            return KEEP, f"{loads}: little load, but a worker is new"
        roles = (
            (Role.PREFILL, prefill, settings.min_prefill),
            (Role.DECODE, decode, settings.min_decode),
            (Role.UNIFIED, decode, settings.min_decode),
        )
        for role, pool, least in sorted(roles, key=lambda one: one[1].load):
            free = self._free(sample, role)
            both = max(prefill.without(1), decode.without(1)) if role is Role.UNIFIED else pool.without(1)
            if free and pool.num_workers > max(1, least) and both < settings.low:
                return Stop(_idlest(free).worker_id), f"{loads}: a {role.value} worker less still keeps the goals"
        return KEEP, f"{loads}: little load, and each pool has its fewest workers"

    def _reverses(self, role: Role, now: float) -> bool:
        """Return True if the last change gave a worker to the other pool, a short time ago."""
        return self._grew is not None and self._grew is not role and now - self._changed_s < self._settings.reverse_s

    def _free(self, sample: FleetSample, role: Role) -> list[WorkerSample]:
        """Return the workers with exactly this role that may change."""
        return [
            one
            for one in sample.workers
            if one.role is role and not one.draining and one.worker_id not in self._stopping
        ]

    def _size(self, sample: FleetSample) -> int:
        """Return how many workers the fleet has, with the one that was asked for, and with those that still stop."""
        return len(sample.workers) + (self._pending is not None)

    def _numbers(self, sample: FleetSample, prefill: PoolLoad, decode: PoolLoad) -> dict[str, float]:
        return {
            "prefill_load": round(prefill.load, 3),
            "decode_load": round(decode.load, 3),
            "prefill_workers": prefill.num_workers,
            "decode_workers": decode.num_workers,
            "workers": len(sample.workers),
            "starting": int(self._pending is not None),
            "stopping": len(self._stopping),
            "waiting_tokens": round(sample.waiting_tokens),
            "queued_tokens": round(sum(one.queued_tokens for one in sample.workers)),
            "arrived_tokens_per_s": round(sample.arrived_tokens_per_s, 1),
            "running": sum(one.running for one in sample.workers),
        }


def _alike(one: Action, other: Action) -> bool:
    return type(one) is type(other) and getattr(one, "role", None) == getattr(other, "role", None)


def _idlest(workers: Sequence[WorkerSample]) -> WorkerSample:
    return min(workers, key=lambda one: (one.running, one.queued_tokens, one.worker_id))
