"""When sessions start. In a closed loop a fixed number runs at once; in an open loop each starts at its own time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

from stoker.base.errors import ConfigError

Arrival = Literal["poisson", "constant", "gamma"]
ARRIVALS: tuple[Arrival, ...] = ("poisson", "constant", "gamma")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The times at which sessions start, and how many run at once.

    `rate` is in sessions per second (requests, if a session has one turn). Without a rate a session starts at its trace's
    time, or at once. `slots` limits how many sessions run at a time in every case.
    """

    slots: int | None = None
    rate: float | None = None
    arrival: Arrival = "poisson"
    burstiness: float = 1.0  # of gamma arrivals: 1 is Poisson, below 1 is burstier
    keep_trace_times: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ConfigError(f"--concurrency {self.slots}: must be at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"--rate {self.rate:g}: must be above 0")
        if not 0 < self.burstiness < float("inf"):
            raise ConfigError(
                f"--burstiness {self.burstiness:g}: must be above 0 and finite; use --arrival constant for even arrivals"
            )

    def starts(self) -> Iterator[float | None]:
        """Yield the start time of each session; None: the session's own, from its trace."""
        if self.rate is not None:
            return _arrivals(self.rate, self.arrival, self.burstiness, random.Random(self.seed))
        return repeat(None if self.keep_trace_times else 0.0)


def _arrivals(rate: float, arrival: Arrival, burstiness: float, rng: random.Random) -> Iterator[float]:
    gap_s: dict[Arrival, Callable[[], float]] = {
        "constant": lambda: 1 / rate,
        "poisson": lambda: rng.expovariate(rate),
        "gamma": lambda: rng.gammavariate(burstiness, 1 / (rate * burstiness)),
    }
    start_s = 0.0
    while True:
        yield start_s
        start_s += gap_s[arrival]()
