"""Runs a request: chooses a route, runs it in its workers' dialect, and retries or resumes after a failure.

- Before the first byte, a failed request is retried on another worker: up to `proxy.retries` times, after a short random
  backoff, and only while retries stay a small share of all requests. An overloaded fleet must not get every request
  several times.
- A worker that drains hands its requests off, and they continue on other workers (`moves.py`). That is no failure.
- After the first byte, only a worker that can continue exactly where the stream stopped may take over. While there is
  none, the client waits for up to `proxy.resume_grace_s`.
- A request on which two workers failed goes to no third one, because it may be the cause. Refused connections and overload
  do not count, nor failures before and after a long part of a stream. `suspects.py` remembers requests that lost workers.
- A worker's 5xx counts against the worker only if another worker then completes the same request. An error of the client
  never counts (`failure_kinds.py`).

Each attempt has its own reservations, and returns them on every path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from stoker.base.errors import StokerError
from stoker.base.log import EventLog
from stoker.fleet.spec import Role
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.dialect import DIALECTS, Dialect
from stoker.gateway.path.errors import LegFailed, LegMoved
from stoker.gateway.path.legs import Legs
from stoker.gateway.path.messages_as_chat import run_as_chat
from stoker.gateway.path.retries import RetryBudget, RetryState
from stoker.gateway.path.services import ProxyServices
from stoker.gateway.path.suspects import SuspectRequests, SuspectTrial
from stoker.gateway.path.upstream import CancelOnLoss
from stoker.routing.query import NoWorker, Route, RouteQuery
from stoker.routing.router import Router

_MESSAGES = EndpointKind.MESSAGES  # faster than enum attribute access

log = EventLog("proxy")


class Proxy:
    """Runs generating requests on workers."""

    def __init__(
        self, router: Router, services: ProxyServices, *, resume_grace_s: float = 10.0, debug_routes: bool = False
    ) -> None:
        self._router = router
        self._services = services
        self._budget = RetryBudget(services.settings.retry_share)
        self._grace_s = resume_grace_s  # how long a request whose worker was lost waits for another one
        self._debug_routes = debug_routes
        self._suspects = SuspectRequests(services.settings.suspect_s)
        self._dialects: dict[str, Dialect] = {name: DIALECTS.get(name)() for name in DIALECTS}
        self._resumable = services.moves.dialects

    def run(self, call: Call) -> Awaitable[None]:
        """Run `call` to its end. Exceptions are sent to the client, as a response or as the last event of a stream."""
        self._budget.request()
        if self._suspects.tenants:
            trial = self._suspects.begin(call, self._services.clock())
            if trial is not None:
                return self._try(call, trial)
        return self._attempts(call)

    async def _try(self, call: Call, trial: SuspectTrial) -> None:
        """Run a request whose body was on crashed workers before."""
        try:
            await self._attempts(call, trial)
            self._suspects.completed(trial)
        finally:
            self._suspects.end(trial)

    async def _attempts(self, call: Call, trial: SuspectTrial | None = None) -> None:
        retries: RetryState | None = None  # created by the first failure
        try:
            while True:
                route = self._choose(self._first(call), call) if retries is None else await retries.next_route()
                try:
                    await self._run(call, route)
                    if retries is not None:
                        self._completed(call, retries)
                    return
                except LegFailed as failed:
                    if call.ended:  # the stream was complete; only the end of the worker's connection was missing
                        call.request.finish()
                        return
                    if retries is None:
                        retries = self._retry_state(call, trial)
                    retries.failed(failed)
                except LegMoved as moved:
                    if retries is None:
                        retries = self._retry_state(call, trial)
                    retries.moved(moved)
                finally:
                    route.end(self._services.clock())
        except StokerError:
            if retries is not None:
                self._remember_crashes(call, retries, trial)
            raise

    def _first(self, call: Call) -> RouteQuery:
        """Return the query of the first attempt. Only some workers can continue a stream that another gateway began."""
        if not call.request.started:
            return call.query
        return replace(call.query, needs_dialect=self._resumable, matches=None)

    def _completed(self, call: Call, retries: RetryState) -> None:
        retries.completed()
        if call.num_resumes:
            self._services.metrics.resumes["completed"] += 1

    def _remember_crashes(self, call: Call, retries: RetryState, trial: SuspectTrial | None) -> None:
        worker_id = retries.lost_worker
        if worker_id is None or not retries.num_crashes:
            return
        now = self._services.clock()
        is_refused = self._suspects.crashed(call, retries.num_crashes, worker_id, trial, now)
        log.warning(
            "suspect_request",
            request=call.request_id.decode(),
            tenant=call.tenant,
            worker=worker_id,
            crashes=retries.num_crashes,
            refused_from_now=is_refused,
        )

    async def close(self) -> None:
        await self._services.cleanups.close()
        self._services.upstreams.close()

    def _retry_state(self, call: Call, trial: SuspectTrial | None) -> RetryState:
        return RetryState(
            call,
            self._services,
            self._budget,
            lambda query: self._choose(query, call),
            resumable=self._resumable,
            grace_s=self._grace_s,
            num_crashes=0 if trial is None else trial.num_crashes,
        )

    def _choose(self, query: RouteQuery, call: Call) -> Route:
        """Choose and reserve a route. The caller must end it."""
        began_s = self._services.clock()
        span = call.trace.begin("route")
        try:
            return self._router.route(query, began_s)
        finally:
            span.end()
            self._services.metrics.route_s.observe(self._services.clock() - began_s)

    async def _run(self, call: Call, route: Route) -> None:
        decode = route.decode.worker.spec
        dialect = self._dialects[decode.dialect]
        if not dialect.decodes_alone and route.prefill is None and decode.role is Role.DECODE:
            raise NoWorker("Only decode workers are usable now, and they need a prefill worker; retry later.")
        call.policy, call.worker_id = route.policy, decode.worker_id
        call.running.note_worker(decode.worker_id)
        if not call.request.started:
            call.route = route
        if self._debug_routes:
            call.explained = explained(route, call)
        loss_guard = CancelOnLoss(call.request.task)
        try:
            with Legs(call, route, self._services, loss_guard) as legs:
                if call.envelope.kind is _MESSAGES and not dialect.speaks_messages:
                    await run_as_chat(dialect, call, legs, self._services.settings.volatile_line)
                else:
                    await dialect.run(call, legs)
                if route.prefill is not None:
                    self._services.metrics.handoffs["done" if legs.has_handed_off else "not_needed"] += 1
        except LegFailed:
            if route.prefill is not None:
                self._services.metrics.handoffs["failed"] += 1
            raise
        except asyncio.CancelledError:
            if not loss_guard.explains_cancel:
                raise
            lost = loss_guard.lost_worker
            assert lost is not None
            raise LegFailed(lost, "lost", f"worker {lost} no longer answers") from None


def explained(route: Route, call: Call) -> bytes:
    """Return the `x-stoker-route` value, such as `decode=w2;prefill=p1;policy=cost;cached=1024/2048;w1=0.21s;w2=0.05s`."""
    parts = [f"decode={route.decode.worker.worker_id}"]
    if route.prefill is not None:
        parts.append(f"prefill={route.prefill.worker.worker_id}")
    first = route.prefill or route.decode
    parts += [f"policy={route.policy}", f"cached={first.cached_tokens}/{call.query.num_tokens}"]
    parts += [f"{reason.worker_id}={reason.cost_s:.4g}s" for reason in route.reasons[:16]]
    return ";".join(parts).encode("ascii", "replace")
