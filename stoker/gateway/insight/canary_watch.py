"""CanaryWatch: compares the requests of each canary with those of the model that it shall replace, and stops it if it is worse.

A stopped canary gets no more requests, until the gateway is restarted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker.base.canary import CanaryLimits, CanaryVerdict, RequestGroup, judge
from stoker.base.log import EventLog
from stoker.gateway.records.usage_row import UsageRow
from stoker.proto.admin_api import CanaryList, CanaryStatus

_KEPT = 1000  # requests of each model
_EVERY = 10  # a canary is judged again after this many of its requests
_SERVER_ERROR = 500

log = EventLog("canary")


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """A share of a name's requests that goes to another model."""

    model: str
    rest: str  # the model that the other requests get
    share: float


@dataclass(slots=True, eq=False)
class _Latest:
    """The latest requests of one model: whether each failed, and its latencies."""

    failed: deque[bool] = field(default_factory=lambda: deque(maxlen=_KEPT))
    ttft_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    itl_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    new: int = 0

    def group(self) -> RequestGroup:
        return RequestGroup(len(self.failed), sum(self.failed), tuple(self.ttft_ms), tuple(self.itl_ms))


class CanaryWatch:
    """Watches the canaries of one gateway process. `stop` takes the requests of a name from its canary."""

    def __init__(self, shares: Mapping[str, CanaryShare], limits: CanaryLimits, stop: Callable[[str], None]) -> None:
        self._shares = shares
        self._limits = limits
        self._stop = stop
        self._latest: defaultdict[str, _Latest] = defaultdict(_Latest)
        self._models = {model for one in shares.values() for model in (one.model, one.rest)}
        self._verdicts: dict[str, CanaryVerdict] = {}

    def ended(self, row: UsageRow) -> None:
        """Take a request that has ended."""
        if row.model not in self._models:
            return
        latest = self._latest[row.model]
        latest.new += 1
        has_failed = row.status >= _SERVER_ERROR
        latest.failed.append(has_failed)
        if has_failed or row.ttft_ms is None:
            return
        latest.ttft_ms.append(row.ttft_ms)
        if row.completion_tokens > 1 and row.e2e_ms > row.ttft_ms:
            latest.itl_ms.append((row.e2e_ms - row.ttft_ms) / (row.completion_tokens - 1))

    def judge(self) -> None:
        """Judge the canaries that have had enough new requests, and stop those that are worse than the rest."""
        for name, one in self._shares.items():
            before = self._verdicts.get(name)
            canary = self._latest[one.model]
            if canary.new < _EVERY or (before is not None and before.stop):
                continue
            verdict = judge(canary.group(), self._latest[one.rest].group(), self._limits)
            self._verdicts[name] = verdict
            if verdict.stop:
                self._stop(name)
                log.error(
                    "canary_stopped",
                    alias=name,
                    model=one.model,
                    rest=one.rest,
                    reason=verdict.reason,
                    numbers=verdict.numbers,
                )
        for latest in self._latest.values():
            latest.new %= _EVERY

    def report(self) -> CanaryList:
        return CanaryList(canaries=[self._describe(name, one) for name, one in self._shares.items()])

    def _describe(self, name: str, one: CanaryShare) -> CanaryStatus:
        verdict = self._verdicts.get(name, CanaryVerdict(reason="not judged yet"))
        return CanaryStatus(
            name=name,
            model=one.model,
            rest=one.rest,
            share=one.share,
            stopped=verdict.stop,
            reason=verdict.reason,
            numbers=verdict.numbers,
        )


def no_canaries() -> CanaryWatch:
    """Return the watch of a gateway without canaries."""
    return CanaryWatch({}, CanaryLimits(), lambda name: None)
