"""Forecast of the decode load. Pure: the time is an argument.

The load of decode follows the traffic late: each answer decodes for a long time after its request arrived, so the running sequences
still grow while the traffic is already steady. A role change cannot be undone for some time. So it must be decided by the load that
decode will have then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from stoker.autoscale.sample import PoolLoad

_MAX_SAMPLES = 1024


@dataclass(slots=True)
class DecodeForecast:
    """Expects the work of decode to grow in the next `window_s` as much as in the last `window_s`, and never to shrink.

    Growth alone never makes a load higher than `limit`: a sudden rise may be all that comes. Work is the load times the number of
    workers. A role change leaves it the same, so it is not taken for growth.
    """

    window_s: float
    limit: float
    _works: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))

    def expected(self, decode: PoolLoad, now: float) -> PoolLoad:
        """Take in the load of this moment, and return the load to decide by. The time must not go back."""
        if decode.num_cold == decode.num_workers:
            return decode  # nothing is known of the load, which is not growth when the workers are warm
        work = decode.load * decode.num_workers
        while self._works and now - self._works[0][0] > self.window_s:
            self._works.popleft()
        self._works.append((now, work))
        growth = work - self._works[0][1]
        if growth <= 0:
            return decode
        load = (work + growth) / decode.num_workers
        return replace(decode, load=max(decode.load, min(load, self.limit)))
