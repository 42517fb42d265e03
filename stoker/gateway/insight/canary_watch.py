"""CanaryWatch: compares the requests of each canary with those of the model that it shall replace, and stops it if it is worse.

A stopped canary gets no more requests, until the gateway is restarted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.canary import CanaryLimits, CanaryVerdict, RequestGroup, judge
from stoker.base.log import EventLog
from stoker.gateway.records.usage_row import UsageRow
from stoker.proto.admin_api import CanaryList, CanaryStatus

_KEPT = 1000  # requests of a canary; of the rest as many more as its share is larger
_MOST_KEPT = 10_000
_EVERY = 10  # a canary is judged again after this many of its requests
_OK, _CLIENT_LEFT, _SERVER_ERROR = 200, 499, 500

log = EventLog("canary")


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """A share of a name's requests that goes to another model."""

    model: str
    rest: str  # the model that the other requests get, as far as it is known before the first one
    share: float


class _Sample(NamedTuple):
    """What counts of one request."""

    time_s: float
    has_failed: bool
    ttft_ms: float | None
    itl_ms: float | None

    @classmethod
    def of(cls, row: UsageRow) -> _Sample:
        # A stream that breaks has an error and the status of its beginning.
        if row.status >= _SERVER_ERROR or (row.status == _OK and row.error is not None):
            return cls(row.time_s, True, None, None)
        if row.ttft_ms is None:
            # A client that gave up has waited at least as long.
            return cls(row.time_s, False, row.e2e_ms if row.status == _CLIENT_LEFT else None, None)
        itl_ms = None
        if row.completion_tokens > 1 and row.e2e_ms > row.ttft_ms:
            itl_ms = (row.e2e_ms - row.ttft_ms) / (row.completion_tokens - 1)
        return cls(row.time_s, False, row.ttft_ms, itl_ms)


class _Latest:
    """The latest requests of a canary, or of the rest of its name."""

    def __init__(self, most: int) -> None:
        self.samples: deque[_Sample] = deque(maxlen=most)
        self.model = ""
        self.new = 0

    def group(self, since_s: float) -> RequestGroup:
        taken = [one for one in self.samples if one.time_s >= since_s]
        return RequestGroup(
            len(taken),
            sum(one.has_failed for one in taken),
            tuple(one.ttft_ms for one in taken if one.ttft_ms is not None),
            tuple(one.itl_ms for one in taken if one.itl_ms is not None),
        )


class _Canary:
    """A canary and the rest of its name, as they were seen."""

    def __init__(self, share: CanaryShare) -> None:
        self.share = share
        self.canary = _Latest(_KEPT)
        self.rest = _Latest(min(_MOST_KEPT, math.ceil(_KEPT / share.share)))
        self.verdict = CanaryVerdict(reason="not judged yet")

    def ended(self, row: UsageRow) -> None:
        latest = self.canary if row.model == self.share.model else self.rest
        latest.samples.append(_Sample.of(row))
        latest.model = row.model
        latest.new += 1

    def groups(self) -> tuple[RequestGroup, RequestGroup]:
        """Return both groups over the same time: an incident that only one of them remembers says nothing."""
        both = self.canary.samples, self.rest.samples
        since_s = max((samples[0].time_s for samples in both if samples), default=0.0)
        return self.canary.group(since_s), self.rest.group(since_s)


class CanaryWatch:
    """Watches the canaries of one gateway process. `stop` takes the requests of a name from its canary."""

    def __init__(self, shares: Mapping[str, CanaryShare], limits: CanaryLimits, stop: Callable[[str], None]) -> None:
        self._canaries = {name: _Canary(share) for name, share in shares.items()}
        self._limits = limits
        self._stop = stop

    def ended(self, name: str | None, row: UsageRow) -> None:
        """Take a request that has ended. The client asked for the model `name`: requests that name a canary's own model
        are not part of its share. What no worker got says nothing about it either."""
        if name is not None and row.worker and (found := self._canaries.get(name)) is not None:
            found.ended(row)

    def judge(self) -> None:
        """Judge the canaries that have had enough new requests, and stop those that are worse than the rest."""
        for name, one in self._canaries.items():
            if one.canary.new < _EVERY or one.verdict.stop:
                continue
            one.canary.new %= _EVERY
            one.verdict = judge(*one.groups(), self._limits)
            if one.verdict.stop:
                self._stop(name)
                log.error(
                    "canary_stopped",
                    alias=name,
                    model=one.share.model,
                    rest=one.rest.model or one.share.rest,
                    reason=one.verdict.reason,
                    numbers=one.verdict.numbers,
                )

    def report(self) -> CanaryList:
        return CanaryList(canaries=[self._describe(name, one) for name, one in self._canaries.items()])

    @staticmethod
    def _describe(name: str, one: _Canary) -> CanaryStatus:
        return CanaryStatus(
            name=name,
            model=one.share.model,
            rest=one.rest.model or one.share.rest,
            share=one.share.share,
            stopped=one.verdict.stop,
            reason=one.verdict.reason,
            numbers=one.verdict.numbers,
        )


def no_canaries() -> CanaryWatch:
    """Return the watch of a gateway without canaries."""
    return CanaryWatch({}, CanaryLimits(), lambda name: None)
