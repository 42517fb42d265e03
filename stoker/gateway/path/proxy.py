"""Runs a request: routes it, runs the route in its workers' dialect, and tries again where that helps and cannot hurt.

One loop does it all. Before the first byte a failed worker costs the client nothing but time, and another one is asked: a
few times, after a short random wait, and only as long as retries stay a small part of all requests, since a fleet that
cannot serve its requests cannot serve them three times either. After the first byte only a worker that can continue exactly
where the stream stands may take over; while there is none, the client is kept waiting for a while. Each try has its own
reservations, and gives them back whatever happens.
"""

from __future__ import annotations

import asyncio

from stoker.fleet.spec import Role
from stoker.gateway.path.call import Call
from stoker.gateway.path.dialects.dialect import DIALECTS, Dialect
from stoker.gateway.path.errors import LegFailed
from stoker.gateway.path.legs import Legs, Tools
from stoker.gateway.path.tries import RetryBudget, Tries
from stoker.gateway.path.upstream import Lifeline
from stoker.routing.query import NoWorker, Route, RouteQuery
from stoker.routing.router import Router


class Proxy:
    def __init__(
        self, router: Router, tools: Tools, *, resume_grace_s: float = 10.0, debug_routes: bool = False
    ) -> None:
        self._router = router
        self._tools = tools
        self._budget = RetryBudget(tools.settings.retry_share)
        self._grace_s = resume_grace_s  # how long a request that lost its worker waits for another
        self._debug_routes = debug_routes
        self._dialects: dict[str, Dialect] = {name: DIALECTS.get(name)() for name in DIALECTS}
        self._resumable = frozenset(name for name, dialect in self._dialects.items() if dialect.resumes)

    async def run(self, call: Call) -> None:
        """Answers `call`. What is raised is the client's to hear: as an answer, or in a stream as its last event."""
        self._budget.request()
        tries: Tries | None = None  # nearly always there is only one, which needs no account
        while True:
            route = self._choose(call.query, call) if tries is None else await tries.next_route()
            try:
                await self._run(call, route)
                if call.num_resumes:
                    self._tools.metrics.resumes["completed"] += 1
                return
            except LegFailed as failed:
                if call.ended:  # nothing was missing but the end of a worker's connection
                    call.request.finish()
                    return
                if tries is None:
                    tries = self._tries(call)
                tries.failed(failed)
            finally:
                route.end(self._tools.clock())

    async def close(self) -> None:
        await self._tools.cleanups.close()
        self._tools.upstreams.close()

    def _tries(self, call: Call) -> Tries:
        return Tries(
            call,
            self._tools,
            self._budget,
            lambda query: self._choose(query, call),
            resumable=self._resumable,
            grace_s=self._grace_s,
        )

    def _choose(self, query: RouteQuery, call: Call) -> Route:
        """Reserved: whoever gets it must end it."""
        began_s = self._tools.clock()
        span = call.trace.begin("route")
        try:
            return self._router.route(query, began_s)
        finally:
            span.end()
            self._tools.metrics.route_s.observe(self._tools.clock() - began_s)

    async def _run(self, call: Call, route: Route) -> None:
        decode = route.decode.worker.spec
        dialect = self._dialects[decode.dialect]
        if not dialect.decodes_alone and route.prefill is None and decode.role is Role.DECODE:
            raise NoWorker(
                f"worker {decode.worker_id} only decodes ({decode.dialect}), and no prefill worker is usable"
            )
        call.policy, call.worker_id = route.policy, decode.worker_id
        if self._debug_routes:
            call.explained = explained(route, call)
        lifeline = Lifeline(call.request.task)
        try:
            with Legs(call, route, self._tools, lifeline) as legs:
                await dialect.run(call, legs)
                if route.prefill is not None:
                    self._tools.metrics.handoffs["done" if legs.has_handed_off else "not_needed"] += 1
        except LegFailed:
            if route.prefill is not None:
                self._tools.metrics.handoffs["failed"] += 1
            raise
        except asyncio.CancelledError:
            if not lifeline.explains_cancel:
                raise
            lost = lifeline.lost_worker
            assert lost is not None
            raise LegFailed(lost, "timeout", f"worker {lost} no longer answers") from None


def explained(route: Route, call: Call) -> bytes:
    """`decode=w2;prefill=p1;policy=cost;cached=1024/2048;w1=0.21s;w2=0.05s`"""
    parts = [f"decode={route.decode.worker.worker_id}"]
    if route.prefill is not None:
        parts.append(f"prefill={route.prefill.worker.worker_id}")
    first = route.prefill or route.decode
    parts += [f"policy={route.policy}", f"cached={first.cached_tokens}/{call.query.num_tokens}"]
    parts += [f"{reason.worker_id}={reason.cost_s:.4g}s" for reason in route.reasons[:16]]
    return ";".join(parts).encode("ascii", "replace")
