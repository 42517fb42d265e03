"""The latency goals that goodput and the bottleneck are judged by. They are those of the autoscaler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyGoals:
    """Goals for the time to the first token and for the mean time between tokens of a request."""

    ttft_ms: float = 2000.0
    itl_ms: float = 100.0
