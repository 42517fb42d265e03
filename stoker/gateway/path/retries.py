"""Decides whether and where a request continues after a worker failed. `proxy.py` describes the rules."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from stoker.base.ids import WorkerId
from stoker.base.log import EventLog
from stoker.gateway.path.call import Call
from stoker.gateway.path.errors import LegFailed, LegMoved, StreamBroken, WorkersFailed
from stoker.gateway.path.failure_kinds import CRASHES, MAX_STRIKES, NEEDS_SECOND_OPINION, STRIKES
from stoker.gateway.path.services import ProxyServices
from stoker.gateway.path.suspects import ENOUGH_CRASHES
from stoker.routing.query import ModelNotFound, NoWorker, Route, RouteQuery

_BACK_OFF_S = (0.010, 0.050)
# A stream that has grown by this many tokens since the last failure has passed the place where it failed. Workers compute
# some tokens ahead of those that the client has, so the place is not exact.
_PROGRESS_TOKENS = 32
_MAX_SAVED_RETRIES = 20.0  # the burst of retries that the budget allows when a worker dies

log = EventLog("proxy")


class RetryBudget:
    """Limits retries to a share of all requests: a request adds `share` to the budget, a retry takes 1."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved = _MAX_SAVED_RETRIES if share else 0.0

    def request(self) -> None:
        if self._saved < _MAX_SAVED_RETRIES:
            self._saved += self._share

    def take(self) -> bool:
        if self._saved < 1:
            return False
        self._saved -= 1
        return True


class RetryState:
    """The failures of one request, and the limits on its further attempts."""

    def __init__(
        self,
        call: Call,
        services: ProxyServices,
        budget: RetryBudget,
        choose: Callable[[RouteQuery], Route],
        *,
        resumable: frozenset[str],
        grace_s: float,
        num_crashes: int = 0,
    ) -> None:
        """`num_crashes` says on how many crashed workers the same body was before."""
        self._call = call
        self._services = services
        self._choose = choose
        self._budget = budget
        self._resumable = resumable
        self._grace_s = grace_s
        self._excluded: set[WorkerId] = set()
        self._last: LegFailed | None = None
        self._moved: LegMoved | None = None  # if the last worker did not fail, but handed the request off
        self._known_tokens = 0  # tokens streamed when the previous worker was lost
        self._give_up_at = 0.0
        self._num_earlier_crashes = num_crashes
        self._num_strikes = 0
        self._struck_at_tokens = 0  # tokens streamed at the last strike
        self._doubted: list[LegFailed] = []  # failures that the request may have caused
        self.num_crashes = 0  # workers that this request lost
        self.lost_worker: WorkerId | None = None  # the last of them

    async def next_route(self) -> Route:
        """Choose and reserve the next route; the caller must end it. Waits up to `grace_s` while no worker is usable."""
        assert self._last is not None, "next_route() called before a failure"
        is_resume = self._call.request.started
        dialects = self._resumable if is_resume or self._call.continues else None
        if not is_resume and self._moved is None:
            self._give_up_at = self._services.clock() + self._grace_s
            await asyncio.sleep(random.uniform(*_BACK_OFF_S))
        while True:
            try:
                return self._route(dialects)
            except NoWorker:
                if self._services.clock() >= self._give_up_at:
                    if is_resume:
                        self._give_up(self._last)
                    raise
            self._excluded.clear()  # take the first worker that becomes usable, even the one that failed
            await asyncio.sleep(2 * random.uniform(*_BACK_OFF_S))

    def failed(self, failed: LegFailed) -> None:
        """Record a failure. Returns if the request may continue, else raises the error for the client."""
        self._last, self._moved = failed, None
        self._excluded.add(failed.worker_id)
        if failed.kind in STRIKES:
            self._strike(failed)
        if self._call.request.started:
            self._stream_lost(failed)
        else:
            self._retry(failed)

    def moved(self, moved: LegMoved) -> None:
        """Record that a worker handed the request off. It is no failure, and costs no retry."""
        self._moved = moved
        self._last = LegFailed(moved.worker_id, "lost", moved.message)
        self._excluded = {moved.worker_id}
        self._known_tokens = self._call.memory.num_tokens
        self._give_up_at = self._services.clock() + self._grace_s
        self._services.metrics.moves["with_kv" if moved.has_kv else "without_kv"] += 1

    def completed(self) -> None:
        """Report the workers that failed this request: another one has completed it, so the request was not the cause."""
        for failed in self._doubted:
            self._services.fleet.saw_failure(failed.worker_id, self._services.clock(), failed.kind)

    def _strike(self, failed: LegFailed) -> None:
        """Count a failure that the request may have caused. Raises the client's error if no other worker may get it."""
        has_begun = self._call.request.started
        num_tokens = self._call.memory.num_tokens if has_begun else 0
        if num_tokens - self._struck_at_tokens >= _PROGRESS_TOKENS:
            self._num_strikes = self.num_crashes = 0
        self._struck_at_tokens = num_tokens
        self._num_strikes += 1
        if failed.kind in NEEDS_SECOND_OPINION:
            self._doubted.append(failed)
        if failed.kind in CRASHES:
            self.num_crashes += 1
            self.lost_worker = failed.worker_id
        has_crashed = self.num_crashes and self.num_crashes + self._num_earlier_crashes >= ENOUGH_CRASHES
        if self._num_strikes < MAX_STRIKES and not has_crashed:
            return
        if has_begun:
            self._services.metrics.resumes["failed"] += 1
            raise StreamBroken(failed, "another one failed with this request before") from failed
        message = "Two workers failed while they ran this request, so it was not sent to another one."
        raise failed.refused or WorkersFailed(message) from failed

    def _retry(self, failed: LegFailed) -> None:
        call = self._call
        if call.num_retries >= self._services.settings.retries or not self._budget.take():
            raise failed.refused or failed
        call.num_retries += 1
        self._services.metrics.retries[failed.kind] += 1

    def _stream_lost(self, failed: LegFailed) -> None:
        """Count only workers that added tokens to the stream. For the others, `grace_s` bounds the time they cost."""
        call = self._call
        if call.memory.cached_tokens is None:
            raise StreamBroken(failed, "its streams cannot be continued elsewhere") from failed
        now = self._services.clock()
        num_tokens = call.memory.num_tokens
        if num_tokens > self._known_tokens:
            call.num_resumes += 1
            self._known_tokens = num_tokens
            self._give_up_at = now + self._grace_s
            log.warning("stream_lost", request=call.request_id.decode(), worker=failed.worker_id, reason=failed.detail)
        if call.num_resumes > self._services.settings.resumes or now >= self._give_up_at:
            self._give_up(failed)

    def _give_up(self, failed: LegFailed) -> NoReturn:
        self._services.metrics.resumes["failed"] += 1
        raise StreamBroken(failed, "no other worker could continue the stream") from failed

    def _route(self, dialects: frozenset[str] | None) -> Route:
        query = self._call.query
        num_tokens = query.num_tokens + self._call.memory.num_tokens
        excluded = frozenset(self._excluded)
        holds_kv = self._moved is not None and self._moved.has_kv
        again = replace(
            query,
            num_tokens=num_tokens,
            excluded=excluded,
            needs_dialect=dialects,
            matches=None,
            brings_kv=holds_kv,
        )
        try:
            return self._choose(again)
        except ModelNotFound as gone:  # the model was served when the request arrived; its worker may register again
            raise NoWorker(
                f"the last worker that served model {query.model!r} has left the fleet; retry later"
            ) from gone
