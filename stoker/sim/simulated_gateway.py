"""SimulatedGateway: admission, routing, retries and hand-off of one gateway on the virtual clock.

Fair queue, capacity, router, fleet, load book and prefix index are the real classes. What a request does here follows
docs/request-path.md: it is admitted, routed, sent to its workers, and sent to another worker if one fails. An answer that was
partly sent continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stoker.base.errors import Overloaded
from stoker.base.histogram import Histogram
from stoker.base.ids import BlockKey, RequestId, WorkerId
from stoker.fleet.fleet import Fleet, FleetSettings
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_matches import PrefixMatches
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.capacity import Capacities
from stoker.gateway.admission.fair_queue import ADMITTED, WAITING, FairQueue, Ticket
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.transfer import KvTicket
from stoker.routing.query import Leg, Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router
from stoker.routing.settings import RouterSettings
from stoker.sched.request import GenerateRequest, SamplingParams, TokenUsage
from stoker.sim.calibration import HostCosts
from stoker.sim.event_loop import EventLoop
from stoker.sim.prompt_keys import PromptKeys
from stoker.sim.records import RequestRecords
from stoker.sim.simulated_engine import FINGERPRINT, EngineJob, SimulatedEngine
from stoker.sim.workloads.workload import SimTurn

MODEL = "model"
_EXPIRE_EVERY_S = 0.05  # as in gateway/admission/admission.py
_MAX_ATTEMPTS = 3
_CONNECT_S = 0.001  # a refused connection is noticed at once
_ROOT = root_key(FINGERPRINT)
_TTFT_BOUNDS_S = tuple(0.01 * 1.2**i for i in range(50))


@dataclass(slots=True, eq=False)
class SimCall:
    """One client request on its way."""

    number: int
    turn: SimTurn
    session: str | None
    tenant: str
    started_s: float
    token_ids: list[int]
    keys: list[BlockKey]
    on_end: Callable[[], None]
    ticket: Ticket | None = None
    route: Route | None = None
    excluded: frozenset[WorkerId] = frozenset()
    attempts: int = 0
    num_moves: int = 0  # attempts that ended because the worker got another role
    num_output: int = 0  # tokens that the client has
    first_token_s: float | None = None
    cached_tokens: int | None = None
    jobs: list[tuple[SimulatedEngine, RequestId]] = field(default_factory=list)  # open in engines


@dataclass(slots=True, eq=False)
class LegJob(EngineJob):
    """One leg of a call in an engine."""

    gateway: SimulatedGateway = field(kw_only=True)
    call: SimCall = field(kw_only=True)
    leg: Leg = field(kw_only=True)

    def first_token(self, usage: TokenUsage) -> None:
        self.gateway.leg_first_token(self, usage)

    def ended(self, usage: TokenUsage, ticket: KvTicket | None) -> None:
        self.gateway.leg_ended(self, ticket)

    def failed(self, kind: str) -> None:
        self.gateway.leg_failed(self, kind)

    def moved(self, ticket: KvTicket | None) -> None:
        self.gateway.leg_moved(self, ticket)


class SimulatedGateway:
    """See the module docstring. Add the engines with `add_worker` before the first request."""

    def __init__(
        self,
        loop: EventLoop,
        host: HostCosts,
        block_tokens: int,
        records: RequestRecords,
        router: RouterSettings,
        admission: AdmissionSettings,
        fleet: FleetSettings | None = None,
    ) -> None:
        self.fleet = Fleet(fleet)
        self.load_book = LoadBook()
        self.indexes = PrefixIndexes()
        # Nothing asks for the last decisions. Freeing their reasons much later would take as long as finding them.
        self.router = Router(self.fleet, self.load_book, self.indexes, settings=replace(router, num_explained=0))
        self.engines: dict[WorkerId, SimulatedEngine] = {}
        self.unreachable: set[WorkerId] = set()
        self.ttft_s = Histogram(_TTFT_BOUNDS_S)
        self._loop = loop
        self._host = host
        self._block_tokens = block_tokens
        self._keys = PromptKeys(_ROOT, block_tokens)
        self._records = records
        self._admission = admission
        capacities = Capacities(self.fleet, admission)
        self._queue = FairQueue(admission, lambda now: capacities.capacity(MODEL, now))
        self._index = self.indexes[MODEL]
        self._expiry_is_due = False
        self._num_calls = 0

    def add_worker(self, spec: WorkerSpec, engine: SimulatedEngine) -> None:
        self.engines[spec.worker_id] = engine
        self.fleet.add(spec, self._loop.now_s)
        self._index.set_capacity(spec.worker_id, None)
        engine.report()

    @property
    def num_open(self) -> int:
        """Requests that are queued or in flight. Zero at the end of every run."""
        return self._queue.num_waiting + self._queue.num_in_flight

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has yet."""
        return self._queue.num_waiting

    # ---- from the clients

    def arrive(self, turn: SimTurn, session: str | None, tenant: str, on_end: Callable[[], None]) -> None:
        """Take in a request. `on_end` is called when its answer is complete, or when it is refused."""
        token_ids = turn.token_ids()
        keys = self._keys.of(turn.segments, token_ids)
        self._num_calls += 1
        call = SimCall(self._num_calls, turn, session, tenant, self._loop.now_s, token_ids, keys, on_end)
        self._loop.after(self._host.dispatch_s + self._host.token_s * len(token_ids), lambda: self._admit(call))

    def _admit(self, call: SimCall) -> None:
        now_s = self._loop.now_s
        matches = self._index.match(call.keys)
        cached = matches.most_blocks * self._block_tokens
        uncached = max(1, len(call.token_ids) - cached)
        try:
            ticket = self._queue.offer(call.tenant, 1.0, uncached, 0, now_s, self._admission.queue_s, False)
        except Overloaded as refused:
            self._refuse(call, refused.code)
            return
        call.ticket = ticket
        if ticket.state is ADMITTED:
            self._route(call, matches)
        else:
            ticket.wake = lambda: self._leave_queue(call)
            self._expire_later()

    def _leave_queue(self, call: SimCall) -> None:
        ticket = call.ticket
        assert ticket is not None
        ticket.wake = None  # else ticket and call would keep each other alive
        if ticket.state is ADMITTED:
            self._loop.after(0.0, lambda: self._route(call))
        else:
            assert ticket.refusal is not None
            call.ticket = None
            self._refuse(call, ticket.refusal.code)

    def _expire_later(self) -> None:
        """Look for tickets whose time is over, while there are any."""
        if self._expiry_is_due:
            return
        self._expiry_is_due = True

        def expire() -> None:
            self._expiry_is_due = False
            self._queue.expire(self._loop.now_s)
            self._queue.pump(self._loop.now_s)
            if self._queue.num_waiting:
                self._expire_later()

        self._loop.after(_EXPIRE_EVERY_S, expire)

    # ---- to the workers

    def _route(self, call: SimCall, matches: PrefixMatches | None = None, kv: KvTicket | None = None) -> None:
        query = RouteQuery(
            model=MODEL,
            keys=call.keys,
            block_tokens=self._block_tokens,
            num_tokens=len(call.token_ids),
            max_output_tokens=call.turn.output_tokens,
            session=call.session,
            excluded=call.excluded,
            matches=matches,
            brings_kv=kv is not None,
        )
        call.attempts += 1
        try:
            route = self.router.route(query, self._loop.now_s)
        except Overloaded as refused:
            self._refuse(call, refused.code)
            return
        route.reasons = []
        call.route = route
        if route.prefill is not None:
            self._send(call, route.prefill, lease_id=f"lease-{call.number}-{call.attempts}")
        else:
            self._send(call, route.decode, kv=kv)

    def _send(self, call: SimCall, leg: Leg, lease_id: str | None = None, kv: KvTicket | None = None) -> None:
        """Send a leg's request. The engine has it after the worker's host costs."""
        turn, worker_id = call.turn, leg.worker.worker_id
        token_ids, keys = call.token_ids, call.keys
        if call.num_output:
            token_ids = token_ids + [turn.output_id] * call.num_output
            keys = block_keys(token_ids, _ROOT, self._block_tokens)
        request = GenerateRequest(
            request_id=RequestId(f"{call.number}.{call.attempts}.{len(call.jobs)}"),
            token_ids=token_ids,
            num_prompt=len(call.token_ids),
            sampling=SamplingParams(seed=turn.output_id),
            max_new_tokens=turn.output_tokens,
            lease_id=lease_id,
            ticket=kv,
        )
        job = LegJob(gateway=self, call=call, leg=leg)
        engine, attempt = self.engines[worker_id], call.attempts
        call.jobs.append((engine, request.request_id))

        def accept() -> None:
            if call.attempts != attempt:
                return
            if worker_id in self.unreachable:
                self._loop.after(_CONNECT_S, lambda: self.leg_failed(job, "connect"))
            else:
                engine.submit(request, keys, job)

        self._loop.after(self._host.accept_s, accept)

    # ---- from the workers

    def leg_first_token(self, job: LegJob, usage: TokenUsage) -> None:
        call, now_s = job.call, self._loop.now_s
        route = call.route
        assert route is not None
        self.fleet.saw_first_token(job.leg.worker.worker_id, now_s)
        if call.cached_tokens is None:
            call.cached_tokens = usage.cached_tokens
        if call.first_token_s is None:
            call.first_token_s = now_s + self._host.write_s
            self.ttft_s.observe(call.first_token_s - call.started_s)
            if call.ticket is not None:
                self._queue.first_token(call.ticket, now_s)
        if job.leg is route.decode:
            route.first_token(now_s)

    def leg_ended(self, job: LegJob, kv: KvTicket | None) -> None:
        call, now_s = job.call, self._loop.now_s
        route = call.route
        assert route is not None
        self.fleet.saw_success(job.leg.worker.worker_id, now_s)
        call.num_output += job.num_tokens
        if job.leg is route.prefill and call.num_output < call.turn.output_tokens:
            assert route.prefill is not None
            route.prefill.reservation.end(now_s)
            self._loop.after(self._host.write_s, lambda: self._continue(call, route, kv))
            return
        self._end(call, "ok")

    def _continue(self, call: SimCall, route: Route, kv: KvTicket | None) -> None:
        """Send the decode leg of a hand-off."""
        if call.route is route:
            self._send(call, route.decode, kv=kv)

    def leg_failed(self, job: LegJob, kind: str) -> None:
        """Try another worker, or give up."""
        call, now_s = job.call, self._loop.now_s
        route = call.route
        if route is None or job.leg not in (route.decode, route.prefill):
            return
        worker_id = job.leg.worker.worker_id
        if kind == "refused":
            self._end(call, "too_long")
            return
        call.num_output += job.num_tokens
        self._leave(call)
        self.fleet.saw_failure(worker_id, now_s, kind)
        call.excluded |= {worker_id}
        if call.attempts - call.num_moves >= _MAX_ATTEMPTS:
            self._end(call, "failed")
        elif call.num_output >= call.turn.output_tokens:
            self._end(call, "ok")
        else:
            self._loop.after(0.0, lambda: self._route(call))

    def leg_moved(self, job: LegJob, kv: KvTicket | None) -> None:
        """Continue on another worker. It is no failure."""
        call, route = job.call, job.call.route
        if route is None or job.leg not in (route.decode, route.prefill):
            return
        call.num_output += job.num_tokens
        call.num_moves += 1
        call.excluded = frozenset((job.leg.worker.worker_id,))
        self._leave(call)
        self._loop.after(self._host.write_s, lambda: self._route(call, kv=kv))

    def _leave(self, call: SimCall) -> None:
        """Cancel what the call has open in engines, and return its reservations."""
        for engine, request_id in call.jobs:
            engine.cancel(request_id)
        call.jobs.clear()
        if call.route is not None:
            call.route.end(self._loop.now_s)
            call.route = None

    def _refuse(self, call: SimCall, code: str) -> None:
        self._end(call, code)

    def _end(self, call: SimCall, outcome: str) -> None:
        now_s, turn = self._loop.now_s, call.turn
        if call.route is not None:
            call.route.end(now_s)
            call.route = None
        uncached = None if call.cached_tokens is None else len(call.token_ids) - call.cached_tokens
        if call.ticket is not None and call.ticket.state in (WAITING, ADMITTED):
            self._queue.end(call.ticket, uncached, now_s)
        self._records.add(
            outcome=outcome,
            started_s=call.started_s,
            ttft_s=None if call.first_token_s is None else call.first_token_s - call.started_s,
            ended_s=now_s + self._host.write_s,
            prompt_tokens=len(call.token_ids),
            cached_tokens=call.cached_tokens or 0,
            output_tokens=turn.output_tokens if outcome == "ok" else call.num_output,
        )
        self._loop.after(self._host.write_s, call.on_end)

    # ---- EngineObserver

    def stored(self, worker_id: WorkerId, keys: Sequence[BlockKey], medium: str) -> None:
        self._index.stored(worker_id, keys, medium)

    def removed(self, worker_id: WorkerId, keys: Sequence[BlockKey], medium: str) -> None:
        self._index.removed(worker_id, keys, medium)

    def reported(self, worker_id: WorkerId, report: LoadReport) -> None:
        self.fleet.saw_report(worker_id, report, self._loop.now_s)

    def gap(self, seconds: float, count: int) -> None:
        self._records.gaps.add(seconds, count)

    def gap_run(self, first_s: float, last_s: float, num_steps: int, count: int) -> None:
        self._records.gaps.add_run(first_s, last_s, num_steps, count)

    # ---- operations

    def change_role(self, worker_id: WorkerId, role: Role) -> None:
        """Give a worker another role. Its requests continue on other workers, which pull their KV."""
        self.fleet.set_role(worker_id, role, self._loop.now_s)
        self.engines[worker_id].move_clients()

    # ---- faults

    def lose(self, worker_ids: Iterable[WorkerId], *, memory: bool) -> None:
        """Workers stop answering: their processes end (`memory`), or the network to them is cut."""
        for worker_id in worker_ids:
            engine = self.engines[worker_id]
            self.unreachable.add(worker_id)
            engine.is_reachable = False
            if memory:
                engine.kill()
                self._index.cleared(worker_id)
            else:
                engine.drop_clients()
            self.fleet.saw_probe(worker_id, live=False, ready=False, now=self._loop.now_s)

    def restore(self, worker_ids: Iterable[WorkerId]) -> None:
        """Workers answer again."""
        for worker_id in worker_ids:
            self.unreachable.discard(worker_id)
            self.engines[worker_id].is_reachable = True
            self.fleet.saw_probe(worker_id, live=True, ready=True, now=self._loop.now_s)
