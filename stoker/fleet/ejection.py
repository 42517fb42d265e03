"""Which workers of a pool are in service, when circuit breakers have taken some of them out.

Failed requests are weak evidence against a worker: a client, a network or a shared dependency may be their cause, and then
they hit every worker. So there are two limits, like those of Envoy's outlier detection:

- Breakers take at most `max_ejected_share` of the reachable workers out of service. Those whose breakers opened first stay
  out, and the others get requests as if their breakers were closed.
- If less than `panic_share` of all workers would be in service, every reachable worker gets requests.

A worker that is known to be down, by a probe or by a refused connection, is never brought back here. Prefill workers are a
pool of their own, because they cannot replace the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stoker.fleet.health import HealthSettings, WorkerHealth


class HasHealth(Protocol):
    @property
    def health(self) -> WorkerHealth: ...


def brought_back(pool: Sequence[HasHealth], settings: HealthSettings, now: float) -> list[WorkerHealth]:
    """Return the workers of one pool that get requests although their breakers do not allow it."""
    present = [member.health for member in pool if not member.health.draining]
    num_usable = sum(health.usable(now) for health in present)
    if num_usable == len(present):
        return []
    reachable = [health for health in present if health.reachable]
    ejected = sorted((health for health in reachable if not health.usable(now)), key=lambda health: health.opened_at)
    back = ejected[int(settings.max_ejected_share * len(reachable)) :]
    if num_usable + len(back) < settings.panic_share * len(present):
        return ejected
    return back
