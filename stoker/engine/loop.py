"""Engine: the one loop. Requests go in, chunks of tokens come out.

Plans are launched ahead of the device; results are committed behind it. Results of the KV store and of other workers
are taken in between two steps.
"""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue

from stoker.base.clock import Clock
from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.engine.engine_leases import EngineLeases
from stoker.engine.runner import LaunchedStep, StepRunner
from stoker.kv.blocks.transfer import KvTicket
from stoker.kv.store.kv_store import KvStore
from stoker.sched.plan import StepPlan
from stoker.sched.request import Finish, GenerateRequest, TokenChunks, TokenUsage
from stoker.sched.scheduler import Scheduler
from stoker.sched.step_rates import StepRates


class Engine:
    """Scheduler, runner and KV store of one model, driven by `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Clock,
        steps_ahead: int,
        store: KvStore,
        leases: EngineLeases,
        rates: StepRates,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._steps_ahead = steps_ahead
        self._store = store
        self._leases = leases
        self._released: SimpleQueue[str] = SimpleQueue()  # leases that a peer no longer needs
        self._closing: set[str] = set()  # leases to close as soon as no peer reads from them
        self._tickets: dict[RequestId, KvTicket] = {}  # released with the first chunk of their request
        self._load_tickets: dict[int, KvTicket] = {}  # released when their load has ended
        self._launched: deque[LaunchedStep] = deque()
        self._chunks = TokenChunks()  # returned by the next step()
        self.idle = False
        """True if the last step had nothing to do. It stays so until a request, a load or a release arrives."""
        self.num_steps = 0
        self.step_s = 0.0
        self.rates = rates

    @property
    def has_work(self) -> bool:
        return bool(self._chunks) or self._scheduler.has_work

    @property
    def has_leases(self) -> bool:
        return bool(self._scheduler.num_held or self._closing)

    def capture_all_graphs(self) -> None:
        """Capture all CUDA graphs now. The engine process captures them while idle; a script has no idle time."""
        self._runner.capture_all()

    def capture_next_graph(self) -> bool:
        """Capture one CUDA graph, which takes about 0.1 s. Return True if there may be more. Call only while `idle`."""
        return self._runner.capture_next()

    def add(self, request: GenerateRequest, num_stored: int = 0) -> None:
        """Queue a request. A request that cannot run ends at once, with a chunk that carries the error.

        `num_stored` is the number of leading blocks that are worth loading from the store.
        """
        self._note_ticket(request)
        try:
            self._scheduler.add(request, num_stored)
        except InvalidRequest as error:
            self.reject(request, error)

    def reject(self, request: GenerateRequest, error: InvalidRequest) -> None:
        """End a request that was not added, with a chunk that carries the error."""
        self._note_ticket(request)
        finish = Finish("error", error_code=error.code, error_message=error.message)
        self._chunks.add(request.request_id, [], TokenUsage(request.num_prompt, 0, 0), None, finish)

    def cancel(self, request_id: RequestId) -> None:
        self._chunks.extend(self._scheduler.cancel(request_id))

    def hand_off(self, request_id: RequestId, lease_id: str) -> None:
        """Let another worker continue a request. Its last chunk has a ticket for its KV, if it has any."""
        self._keep_passed_on(self._scheduler.hand_off(request_id, lease_id))

    def hand_back(self, request: GenerateRequest) -> None:
        """Let another worker run a request that was not added. It gets the ticket that came with the request."""
        usage = TokenUsage(request.num_prompt, 0, len(request.token_ids) - request.num_prompt)
        self._chunks.add(request.request_id, [], usage, None, Finish("handoff"), request.ticket)

    def release_lease(self, lease_id: str) -> None:
        """Release a lease whose KV the peer has pulled. Can be called from any thread."""
        self._released.put(lease_id)

    def step(self) -> TokenChunks:
        """Launch one plan, if there is anything to compute, and commit finished steps. Return the new chunks.

        At most `steps_ahead` steps stay in flight, and one less than before if nothing was launched.
        """
        now = self._clock.now()
        for result in self._store.take_finished_loads():
            self._scheduler.finish_load(result)
            if (ticket := self._load_tickets.pop(result.load_id, None)) is not None:
                self._store.release(ticket)
        self._chunks.extend(self._scheduler.expire(now))
        plan = self._scheduler.plan()
        self._empty_lost_leases()
        if plan is not None:
            self._launch(plan)
        # Without a plan, the oldest step may bring new work, and the others go on in the meantime.
        if plan is None:
            max_launched = max(0, len(self._launched) - 1)
        else:
            max_launched = 0 if plan.runs_alone else self._steps_ahead
        num_committed = self._commit(max_launched)
        num_copied = self._offer_blocks()
        num_closed = self._update_leases(now)
        self._release_tickets()
        # Copied blocks and closed leases go back to the pool, and a waiting sequence may need them.
        self.idle = plan is None and not (num_committed or num_copied or num_closed or self._chunks)
        chunks, self._chunks = self._chunks, TokenChunks()
        return chunks

    def _empty_lost_leases(self) -> None:
        """Withdraw the blocks of leases whose sequence lost them, before the next plan overwrites those blocks.

        A peer confirms a lease after it has read its blocks. It must not get a confirmation for overwritten blocks.
        """
        self._leases.empty(self._scheduler.take_emptied_leases())

    def _launch(self, plan: StepPlan) -> None:
        self._launched.append(self._runner.launch(plan))
        for load in plan.loads:
            self._store.start_load(load)
            if load.ticket is not None:
                self._load_tickets[load.load_id] = load.ticket

    def _commit(self, max_launched: int) -> int:
        """Wait for the oldest steps until at most `max_launched` are in flight. Return how many were committed."""
        num_committed = 0
        while len(self._launched) > max_launched:
            step = self._launched.popleft()
            result = step.wait()
            if step.plan.spans and not result.is_interrupted:
                self.num_steps += 1
                self.step_s += result.step_s
                self.rates.record(step.plan, result.step_s)
            self._chunks.extend(self._scheduler.commit(result))
            num_committed += 1
        self._keep_passed_on(self._scheduler.end_leaving())
        return num_committed

    def _keep_passed_on(self, leaving: TokenChunks) -> None:
        """Return the last chunks of leaving requests with the next step. A ticket that is passed on is not released."""
        for i, ticket in leaving.tickets.items():
            if self._tickets.get(leaving.request_ids[i]) == ticket:
                del self._tickets[leaving.request_ids[i]]
        self._chunks.extend(leaving)

    def _offer_blocks(self) -> int:
        """Offer new blocks to the store, and release those that it has copied. Return how many were released."""
        self._store.offer(self._scheduler.take_offers())
        copied = self._store.take_copied()
        if copied:
            self._scheduler.end_offers(copied)
        return len(copied)

    def _update_leases(self, now: float) -> int:
        """Publish the leased KV that is ready, and close leases that ended. Return how many were closed."""
        leased, broken = self._scheduler.take_leases()
        self._leases.put(leased)
        self._closing.update(broken)
        while not self._released.empty():
            self._closing.add(self._released.get())
        self._closing.update(self._scheduler.expired_leases(now))
        closed = self._leases.close(self._closing) if self._closing else []
        for lease_id in closed:
            self._closing.discard(lease_id)
            self._scheduler.release_lease(lease_id)
        return len(closed)

    def _note_ticket(self, request: GenerateRequest) -> None:
        """Remember to release the request's ticket with its first chunk, also if that chunk is an error."""
        if request.ticket is not None:
            self._tickets[request.request_id] = request.ticket

    def _release_tickets(self) -> None:
        if self._tickets:
            for request_id in self._chunks.request_ids:
                if (ticket := self._tickets.pop(request_id, None)) is not None:
                    self._store.release(ticket)
