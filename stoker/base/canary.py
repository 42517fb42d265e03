"""Compares requests of a canary, such as a new version, with those of the rest, and says when it must be stopped. Pure.

Both groups need enough requests. A difference counts only if it is large, and if chance would hardly make it: the comparison is
repeated for as long as the canary runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.base.settings import check_settings, setting

_SURE = 3.5  # standard errors; chance alone exceeds this once in 4,300 comparisons
_SLOW = 0.1  # the share of requests beyond the 90th percentile


@dataclass(frozen=True, slots=True)
class CanaryLimits:
    """The limits beyond which a canary, the share of an alias, is stopped."""

    min_requests: int = setting(50, "Requests that a canary and the rest must have before they are compared.", ge=1)
    error_margin: float = setting(
        0.02, "A canary is stopped if its share of failed requests is larger than that of the rest by this.", ge=0, le=1
    )
    slow_factor: float = setting(
        1.5,
        "A canary is stopped if the 90th percentile of its time to the first token, or of its time between tokens, is this many "
        "times that of the rest.",
        gt=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "canary")


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """The latest requests of a canary, or of the rest."""

    requests: int = 0
    failed: int = 0
    ttft_ms: Sequence[float] = ()
    itl_ms: Sequence[float] = ()  # the mean of each request


@dataclass(frozen=True, slots=True)
class CanaryVerdict:
    """The result of comparing a canary with the rest. `numbers` are logged with it."""

    stop: bool = False
    reason: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def judge(canary: RequestGroup, rest: RequestGroup, limits: CanaryLimits) -> CanaryVerdict:
    """Compare a canary with the rest."""
    numbers = _numbers(canary, rest)
    if min(canary.requests, rest.requests) < limits.min_requests:
        return CanaryVerdict(False, f"fewer than {limits.min_requests} requests", numbers)
    bad, usual = canary.failed / canary.requests, rest.failed / rest.requests
    if bad - usual > limits.error_margin and _is_more(canary.failed, canary.requests, rest.failed, rest.requests):
        return CanaryVerdict(
            True,
            f"{canary.failed} of {canary.requests} requests failed ({bad:.1%}), and {usual:.1%} of the rest",
            numbers,
        )
    for name, ours, theirs in (
        ("time to the first token", canary.ttft_ms, rest.ttft_ms),
        ("time between tokens", canary.itl_ms, rest.itl_ms),
    ):
        if min(len(ours), len(theirs)) < limits.min_requests:
            continue
        limit_ms = limits.slow_factor * _percentile90(theirs)
        slow, usual_slow = (sum(one > limit_ms for one in group) for group in (ours, theirs))
        if slow > _SLOW * len(ours) and _is_more(slow, len(ours), usual_slow, len(theirs)):
            p90_ms = _percentile90(ours)
            return CanaryVerdict(
                True,
                f"the 90th percentile of the {name} is {p90_ms:.1f} ms, and {_percentile90(theirs):.1f} ms in the rest",
                numbers,
            )
    return CanaryVerdict(False, "as good as the rest", numbers)


def _numbers(canary: RequestGroup, rest: RequestGroup) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, group in (("canary", canary), ("rest", rest)):
        found |= {f"{name}_requests": group.requests, f"{name}_failed": group.failed}
        for what, values in (("ttft", group.ttft_ms), ("itl", group.itl_ms)):
            if values:
                found[f"{name}_{what}_p90_ms"] = round(_percentile90(values), 3)
    return found


def _percentile90(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def _is_more(count: int, total: int, other_count: int, other_total: int) -> bool:
    """Return True if the share of a group is larger than that of another one, by more than chance explains."""
    pooled = (count + other_count) / (total + other_total)
    error = math.sqrt(pooled * (1 - pooled) * (1 / total + 1 / other_total))
    return count / total - other_count / other_total > _SURE * error
