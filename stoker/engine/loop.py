"""Engine: the one loop. Requests in, chunks out; plans are launched ahead of the device, results taken in behind it. What the
store and other workers do meanwhile is taken in between two steps."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue

from stoker.base.clock import Clock
from stoker.base.errors import InvalidRequest
from stoker.base.ids import RequestId
from stoker.engine.rates import StepRates
from stoker.engine.runner import PendingStep, Runner
from stoker.kv.blocks.transfer import KvTicket
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.store.kv_store import KvStore
from stoker.sched.request import Finish, GenerateRequest, TokenChunks, Usage
from stoker.sched.scheduler import Scheduler


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        steps_ahead: int,
        store: KvStore,
        leases: LeaseBook,
        rates: StepRates,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._steps_ahead = steps_ahead
        self._store = store
        self._leases = leases
        self._released: SimpleQueue[str] = SimpleQueue()  # leases that a peer needs no more
        self._closing: set[str] = set()  # leases to be closed once nobody reads them
        self._tickets: dict[RequestId, KvTicket] = {}  # to be given back when their request has begun
        self._launched: deque[PendingStep] = deque()
        self._chunks = TokenChunks()  # made between steps
        self.idle = False
        """Nothing can be done until something new arrives: a request, a load, a release."""
        self.num_steps = 0
        self.step_s = 0.0
        self.rates = rates

    @property
    def has_work(self) -> bool:
        return bool(self._chunks) or self._scheduler.has_work

    @property
    def has_leases(self) -> bool:
        return bool(self._scheduler.num_held or self._closing)

    def prepare(self) -> None:
        """Now, all that is else prepared while it is quiet: scripts have no such time."""
        self._runner.capture_all()

    def prepare_next(self) -> bool:
        """A part of that, of about a tenth of a second; whether there may be more. Only while `idle`."""
        return self._runner.capture_next()

    def add(self, request: GenerateRequest, num_stored: int = 0) -> None:
        """A request that cannot run ends at once, with a chunk that says why. `num_stored`: leading blocks worth loading."""
        self._note_ticket(request)
        try:
            self._scheduler.add(request, num_stored)
        except InvalidRequest as error:
            self.refuse(request, error)

    def refuse(self, request: GenerateRequest, error: InvalidRequest) -> None:
        self._note_ticket(request)
        finish = Finish("error", error_code=error.code, error_message=error.message)
        self._chunks.add(request.request_id, [], Usage(request.num_prompt, 0, 0), None, finish)

    def cancel(self, request_id: RequestId) -> None:
        self._chunks.extend(self._scheduler.cancel(request_id))

    def released(self, lease_id: str) -> None:
        """From any thread: a peer has pulled what it wanted."""
        self._released.put(lease_id)

    def step(self) -> TokenChunks:
        """Launch one plan, if there is anything to compute, and take in what is due."""
        now = self._clock.now()
        for filled in self._store.take_finished_loads():
            self._scheduler.loaded(filled)
        self._chunks.extend(self._scheduler.expire(now))
        plan = self._scheduler.plan()
        # Before the plan's writes: whoever reads the old blocks meanwhile, and asks afterwards, must not take them for the lease's.
        for lease_id in self._scheduler.take_bare_leases():
            if lease_id in self._leases:
                self._leases.put(lease_id, (), (), 0, complete=False)
        if plan is not None:
            self._launched.append(self._runner.launch(plan))
            for load in plan.loads:
                self._store.start_load(load)
        took_in = False
        while self._launched and (plan is None or len(self._launched) > self._steps_ahead):
            step = self._launched.popleft()
            result = step.wait()
            if step.plan.spans:
                self.num_steps += 1
                self.step_s += result.step_s
                self.rates.saw(step.plan, result.step_s)
            self._chunks.extend(self._scheduler.commit(result))
            took_in = True
        gave_back = self._pass_on(now)
        self.idle = plan is None and not (took_in or gave_back or self._chunks)
        chunks, self._chunks = self._chunks, TokenChunks()
        return chunks

    def _note_ticket(self, request: GenerateRequest) -> None:
        """Given back with the request's first chunk, whatever that says."""
        if request.ticket is not None:
            self._tickets[request.request_id] = request.ticket

    def _pass_on(self, now: float) -> bool:
        """New blocks to the store, KV under lease to those who may pull it, and what was lent back into the pool: whether
        there was any of that, which somebody may be waiting for."""
        self._store.offer(self._scheduler.take_offers())
        if copied := self._store.take_copied():
            self._scheduler.end_offer(copied)
        growing, broken = self._scheduler.take_leases()
        for kv in growing:
            self._leases.put(kv.lease_id, kv.keys, kv.blocks, kv.num_ready, kv.complete, kv.names)
        self._closing.update(broken)
        while not self._released.empty():
            self._closing.add(self._released.get())
        self._closing.update(self._scheduler.due_leases(now))
        closed = [lease_id for lease_id in self._closing if self._leases.close(lease_id)]
        for lease_id in closed:
            self._closing.discard(lease_id)
            self._scheduler.release(lease_id)
        if self._tickets:
            for request_id in self._chunks.request_ids:
                if (ticket := self._tickets.pop(request_id, None)) is not None:
                    self._store.release(ticket)
        return bool(copied or closed)
