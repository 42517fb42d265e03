"""What the autoscaler sees of a fleet at one moment, and the load of a pool of workers that follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.autoscale.settings import AutoscaleSettings
from stoker.base.ids import WorkerId
from stoker.fleet.spec import Role

_BUSY = 0.85  # a pool that computes this share of the time is as loaded as it should be
_KV_FULL = 0.9  # share of the KV blocks in use at which a worker is full


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """One worker that serves."""

    worker_id: WorkerId
    role: Role
    age_s: float  # since it joined; a new role does not make it cold
    queued_tokens: float = 0.0  # prompt tokens that it was given and has not computed
    prefill_tokens_per_s: float | None = None  # None: not measured
    running: int = 0  # sequences
    step_s: float | None = None  # time of a decode step; None: not measured
    kv_used: float = 0.0  # fraction of its KV blocks, 0 to 1
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """A fleet of one model. `ttft_s` and `itl_s` are None if no request gave a measurement since the last sample."""

    workers: Sequence[WorkerSample]
    waiting_tokens: float = 0.0  # prompt tokens of requests that no worker has yet
    arrived_tokens_per_s: float = 0.0  # uncached prompt tokens, since the last sample
    ttft_s: float | None = None  # 90th percentile
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load of the workers that prefill, or of those that decode: 1 is as much as the goals allow."""

    num_workers: int
    num_cold: int  # of them; their measurements do not count
    load: float

    def with_more(self, num_workers: int) -> float:
        """Return the load if the pool had this many workers more."""
        return self.load * self.num_workers / max(1, self.num_workers + num_workers)

    def without(self, num_workers: int) -> float:
        """Return the load if the pool had this many workers less."""
        left = self.num_workers - num_workers
        return math.inf if left < 1 else self.load * self.num_workers / left


def prefill_load(sample: FleetSample, settings: AutoscaleSettings) -> PoolLoad:
    """Return the load of prefill: how long a new prompt waits, and how much of the time the workers compute."""
    pool = [one for one in sample.workers if one.role is not Role.DECODE and not one.draining]
    warm = [one for one in pool if one.age_s >= settings.warm_s]
    rates = [one.prefill_tokens_per_s for one in warm if one.prefill_tokens_per_s]
    rate = sum(rates) / len(rates) * len(pool) if rates else 0.0
    queued = sample.waiting_tokens + sum(one.queued_tokens for one in pool)
    load = 0.0
    if rate:
        wait_s = queued / rate
        load = max(wait_s / settings.ttft_s, sample.arrived_tokens_per_s / rate / _BUSY)
    if sample.ttft_s is not None and _finite(sample.ttft_s) and warm and queued:
        load = max(load, sample.ttft_s / settings.ttft_s)
    return PoolLoad(len(pool), len(pool) - len(warm), load)


def decode_load(sample: FleetSample, settings: AutoscaleSettings) -> PoolLoad:
    """Return the load of decode: how long a step takes, and how much of the KV memory is in use."""
    pool = [one for one in sample.workers if one.role is not Role.PREFILL and not one.draining]
    warm = [one for one in pool if one.age_s >= settings.warm_s]
    busy = [one for one in warm if one.running]
    load = 0.0
    if busy:
        # An idle worker beside a busy one has room, so the mean is over all warm workers.
        steps = [one.step_s for one in busy if one.step_s is not None and _finite(one.step_s)]
        load = max(sum(steps) / settings.itl_s, sum(one.kv_used for one in busy) / _KV_FULL) / len(warm)
        if sample.itl_s is not None and _finite(sample.itl_s):
            load = max(load, sample.itl_s / settings.itl_s)
    return PoolLoad(len(pool), len(pool) - len(warm), load)


def _finite(value: float) -> bool:
    return math.isfinite(value) and value >= 0
