"""SimulatedEngine: one worker's engine on the virtual clock. The scheduler and the block pool are the real classes.

It does what `engine/loop.py` does, with a SimulatedDevice in place of the runner and a SimulatedStore in place of the store.
A request that arrives during a step is planned after it, and `steps_ahead` steps later: their plans were launched before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockKey, RequestId, WorkerId
from stoker.fleet.spec import LoadReport
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import KvLoad, KvTicket, LoadResult, OfferedBlock
from stoker.sched.leases import LeaseTerms
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest, TokenChunks, TokenUsage
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_rates import StepRates
from stoker.sim.calibration import Calibration
from stoker.sim.event_loop import EventLoop, ScheduledEvent
from stoker.sim.simulated_device import RunningStep, SimulatedDevice, Speculation, StepRuns
from stoker.sim.simulated_store import SimulatedStore

FINGERPRINT = "simulated"
_RUN_SHARE = 64  # a run of steps takes at most one in this many of the pool's tokens ahead of time
_MAX_OFFERS = 4096
_REPORT_EVERY_S, _REPORT_AT_MOST_EVERY_S = 0.25, 0.02  # as in worker/report.py
_LEASE_S = 30.0


@dataclass(slots=True, eq=False)
class EngineJob:
    """A sequence in the engine, as its gateway sees it. The gateway derives from it."""

    num_tokens: int = 0  # that the engine has sampled
    last_token_s: float | None = None

    def first_token(self, usage: TokenUsage) -> None:
        """The first token of this engine has been sampled."""

    def ended(self, usage: TokenUsage, ticket: KvTicket | None) -> None:
        """The last token has been sampled. `ticket`: the KV is held for another worker."""

    def failed(self, kind: str) -> None:
        """The engine does not continue. `kind` is one of the kinds of `Fleet.saw_failure`, or refused."""

    def moved(self, ticket: KvTicket | None) -> None:
        """The engine has handed the request off. `ticket`: its KV is held for the worker that continues."""


class EngineObserver(Protocol):
    """Receives what a worker publishes: KV events and load reports."""

    def stored(self, worker_id: WorkerId, keys: Sequence[BlockKey], medium: str) -> None: ...

    def removed(self, worker_id: WorkerId, keys: Sequence[BlockKey], medium: str) -> None: ...

    def reported(self, worker_id: WorkerId, report: LoadReport) -> None: ...

    def gap(self, seconds: float, count: int) -> None:
        """`count` tokens were sampled this long after the one before them."""

    def gap_run(self, first_s: float, last_s: float, num_steps: int, count: int) -> None:
        """The same for `num_steps` steps, whose times rise evenly from the first to the last."""


class _Arrival(NamedTuple):
    """A request that the scheduler does not have yet. It sees it after the engine's first `seen_after` steps."""

    request: GenerateRequest
    keys: list[BlockKey]  # of its full blocks
    seen_after: int


class _PoolEvents:
    """Collects the blocks that a pool names and forgets during a step."""

    def __init__(self) -> None:
        self.named_keys: list[BlockKey] = []
        self.forgotten: list[BlockKey] = []

    def named(self, key: BlockKey, parent: BlockKey, token_ids: Sequence[int], root_salt: str | None) -> None:
        self.named_keys.append(key)

    def forgot(self, key: BlockKey) -> None:
        self.forgotten.append(key)


def calibrated_rates(calibration: Calibration) -> StepRates:
    """Return the rates of a worker that has run before: of whole prefill steps, and of decode-only steps of one row."""
    shape, step, bounds = calibration.shape, calibration.step, calibration.bounds
    num_tokens = max(1, min(shape.step_tokens, bounds.step_tokens))
    rates = StepRates()
    rates.record_prefill(num_tokens, step.seconds(num_tokens, 1, 0, num_tokens * num_tokens / 2), 1)
    rates.record_decode(step.seconds(1, 1, min(num_tokens, bounds.context_tokens), 0.0), 1)
    return rates


class SimulatedEngine:
    """See the module docstring. `observer` gets events, `peers` are the engines that KV can be pulled from, by address."""

    def __init__(
        self,
        worker_id: WorkerId,
        calibration: Calibration,
        store: SimulatedStore,
        loop: EventLoop,
        observer: EngineObserver,
        peers: dict[str, SimulatedEngine],
        seed: int,
    ) -> None:
        self.worker_id = worker_id
        self.device = SimulatedDevice(calibration, seed)
        self.store = store
        self.busy_s = 0.0
        self.is_reachable = True  # by peers; False: pulls from this worker fail
        self._calibration = calibration
        self._loop = loop
        self._observer = observer
        self._peers = peers
        peers[str(worker_id)] = self
        self._reset()

    def _reset(self) -> None:
        """Start with empty memory."""
        shape, calibration = self._calibration.shape, self._calibration
        self._events = _PoolEvents()
        self.pool = BlockPool(shape.kv_blocks, self._events)
        drafts = calibration.speculation.drafts
        pool_tokens = shape.kv_blocks * shape.block_tokens
        self._runs = Speculation(drafts) if drafts else StepRuns(max(1, pool_tokens // _RUN_SHARE))
        config = SchedulerConfig(
            block_tokens=shape.block_tokens,
            step_tokens=shape.step_tokens,
            max_rows=shape.max_rows,
            fingerprint=FINGERPRINT,
            lease=LeaseTerms(str(self.worker_id), str(self.worker_id), _LEASE_S),
            max_offers=_MAX_OFFERS if self.store.tiers else 0,
            target_itl_s=shape.target_itl_s,
            max_tokens=shape.max_model_tokens,
            max_heads=None if drafts else shape.max_rows + shape.step_tokens,
        )
        self.scheduler = Scheduler(config, self.pool, self._runs)
        self.rates = calibrated_rates(self._calibration)
        self._jobs: dict[RequestId, EngineJob] = {}
        self._inbox: deque[_Arrival] = deque()
        self._num_steps = 0  # that have ended
        self._num_prefilling = 0  # sequences in the scheduler without a token
        self._is_blocked = False  # waiting sequences do not fit, and nothing has changed since
        self._all_sampled = True  # the last plan left no prompt half computed
        self._step: RunningStep | None = None
        self._step_event: ScheduledEvent | None = None
        self._loaded: list[LoadResult] = []
        self._tickets: dict[RequestId, KvTicket] = {}
        self._reported_s = float("-inf")
        self._generation = getattr(self, "_generation", 0) + 1

    # ---- requests

    def submit(self, request: GenerateRequest, keys: list[BlockKey], job: EngineJob) -> None:
        """Take in a request, whose full blocks have these keys. Its events are reported to the job."""
        self._jobs[request.request_id] = job
        seen_after = 0
        if self._step is not None:
            current = self._step.current(self._loop.now_s)
            seen_after = self._num_steps + current + 1 + self._calibration.shape.steps_ahead
        self._inbox.append(_Arrival(request, keys, seen_after))
        self._wake()

    def cancel(self, request_id: RequestId) -> None:
        """Drop a request that its client no longer wants."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        self._inbox = deque(one for one in self._inbox if one.request.request_id != request_id)
        if len(self.scheduler.cancel(request_id)) and job.last_token_s is None:
            self._num_prefilling -= 1
        self._release_ticket(request_id)
        self._wake()

    def release_lease(self, lease_id: str) -> None:
        self.scheduler.release_lease(lease_id)
        self._wake()

    def kill(self) -> None:
        """Lose the process: its memory and all requests."""
        lost = list(self._jobs.values())
        if self._step_event is not None:
            self._step_event.cancel()
        self._reset()
        for job in lost:
            job.failed("lost")

    def drop_clients(self) -> None:
        """Lose the connections to all clients. Their requests are cancelled, and the KV stays."""
        lost = list(self._jobs.items())
        for request_id, job in lost:
            self.cancel(request_id)
            job.failed("lost")

    def move_clients(self) -> None:
        """Hand all requests off to other workers, which pull their KV. Prompts that are being computed for one go on here."""
        for request, _, _ in self._inbox:
            self._jobs.pop(request.request_id).moved(request.ticket)
        self._inbox.clear()
        for request_id in list(self._jobs):
            self._hand_over(self.scheduler.hand_off(request_id, f"move-{request_id}"))
        self._wake()

    def _hand_over(self, chunks: TokenChunks) -> None:
        """Give requests that have left the scheduler back to the gateway."""
        for i, request_id in enumerate(chunks.request_ids):
            job, ticket = self._jobs.pop(request_id), chunks.tickets.get(i)
            if job.last_token_s is None:
                self._num_prefilling -= 1
            if ticket is not None and self._tickets.get(request_id) is ticket:
                del self._tickets[request_id]  # the next worker pulls what this one did not
            self._release_ticket(request_id)
            job.moved(ticket)

    @property
    def num_open(self) -> int:
        return len(self._jobs)

    def report(self) -> None:
        """Publish the load now, as a worker does when a gateway subscribes."""
        self._report(0.0)

    # ---- the loop

    def _wake(self) -> None:
        """Plan now if the device is idle. Else end a run of steps soon, because something has changed."""
        self._is_blocked = False
        if self._step is None:
            self._turn()
        elif self._step.stop_after(self._loop.now_s, self._calibration.shape.steps_ahead):
            self._schedule_end()

    def _schedule_end(self) -> None:
        assert self._step is not None
        if self._step_event is not None:
            self._step_event.cancel()
        self._step_event = self._loop.at(self._step.end_s, self._end_step)

    def _turn(self) -> None:
        """Plan until the device has a step, or until there is nothing to compute."""
        now_s, scheduler = self._loop.now_s, self.scheduler
        self._take_inbox()
        for result in self._loaded:
            scheduler.finish_load(result)
        self._loaded.clear()
        scheduler.expire(now_s)
        for lease_id in scheduler.expired_leases(now_s) if scheduler.num_held else ():
            scheduler.release_lease(lease_id)
        while self._step is None:
            self._runs.is_allowed = self._may_run_ahead()
            plan = scheduler.plan()
            scheduler.take_emptied_leases()
            if plan is None:
                break
            self.device.take_rows(plan)
            self._start_loads(plan)
            if plan.spans:
                self._step = self.device.start(plan, now_s)
                self._all_sampled = all(span.samples for span in plan.spans)
                self._is_blocked = plan.num_tokens - plan.num_drafts == len(plan.spans) and scheduler.num_waiting > 0
                self._schedule_end()
            else:
                scheduler.commit(StepResult([], 0.0))
        self._publish()

    def _may_run_ahead(self) -> bool:
        """Return True if the next steps are decode-only until a sequence ends or something arrives."""
        if self._inbox or not self._all_sampled:
            return False
        scheduler = self.scheduler
        return self._is_blocked or (not scheduler.num_waiting and self._num_prefilling == scheduler.num_loading)

    def _take_inbox(self) -> None:
        later: list[_Arrival] = []
        for arrival in self._inbox:
            request, keys, seen_after = arrival
            if seen_after > self._num_steps and self.scheduler.num_running:
                later.append(arrival)
                continue
            try:
                self.scheduler.add(request, self._num_stored(keys), list(keys))
            except InvalidRequest:
                self._jobs.pop(request.request_id).failed("refused")
                continue
            self._num_prefilling += 1
            if request.ticket is not None:
                self._tickets[request.request_id] = request.ticket
        self._inbox = deque(later)

    def _num_stored(self, keys: list[BlockKey]) -> int:
        """Return how many leading blocks are worth loading from the tiers."""
        if not self.store.tiers:
            return 0
        shape = self._calibration.shape
        rate = self.rates.prefill_tokens_per_s
        compute_s = shape.block_tokens / rate if rate else 0.1
        return self.store.num_worth_loading(keys, compute_s)

    def _end_step(self) -> None:
        """Commit the step that has ended, report its tokens, and plan the next one."""
        step, scheduler = self._step, self.scheduler
        assert step is not None
        self._step, self._step_event = None, None
        num_steps, plan = step.num_steps, step.plan
        self._num_steps += num_steps
        busy_s = step.end_s - step.start_s
        self.busy_s += busy_s
        step_s = busy_s / num_steps
        chunks = scheduler.commit(StepResult(self.device.sampled(step), step_s if num_steps == 1 else 0.0))
        if num_steps > 1:
            scheduler.step_size.record(len(plan.spans), len(plan.spans), step_s, count=num_steps)
            self.rates.record_decode(step_s, num_steps)
        else:
            self.rates.record(plan, step_s)
        self._deliver(step, chunks)
        if scheduler.num_leaving:
            self._hand_over(scheduler.end_leaving())
        self._move_kv()
        self._turn()

    def _deliver(self, step: RunningStep, chunks: TokenChunks) -> None:
        """Report the chunks of a step to their jobs, and the gaps between tokens to the observer."""
        ends_s, num_steps, jobs = step.ends_s, step.num_steps, self._jobs
        first_s, last_s = ends_s[0], step.end_s
        gaps: dict[float, int] = {}
        num_rows = 0
        ended: list[tuple[EngineJob, TokenUsage, KvTicket | None]] = []
        for i, (request_id, token_ids) in enumerate(zip(chunks.request_ids, chunks.token_ids, strict=True)):
            job = jobs[request_id]
            before_s = job.last_token_s
            job.last_token_s = last_s
            job.num_tokens += len(token_ids)
            if before_s is None:
                self._num_prefilling -= 1
                self._release_ticket(request_id)
                job.first_token(chunks.usages[i])
            else:
                gap_s = first_s - before_s
                gaps[gap_s] = gaps.get(gap_s, 0) + 1
                num_rows += 1
                if len(token_ids) > num_steps:  # accepted drafts come together
                    gaps[0.0] = gaps.get(0.0, 0) + len(token_ids) - num_steps
            if i in chunks.finishes:
                del jobs[request_id]
                self._is_blocked = False
                ended.append((job, chunks.usages[i], chunks.tickets.get(i)))
        observer = self._observer
        for gap_s, count in gaps.items():
            observer.gap(gap_s, count)
        if num_steps > 1 and not self.device.is_steady:
            for at in range(1, num_steps):
                observer.gap(ends_s[at] - ends_s[at - 1], num_rows)
        elif num_steps > 1:
            second_s, final_s = ends_s[1] - first_s, last_s - ends_s[num_steps - 2]
            observer.gap_run(second_s, final_s, num_steps - 1, num_rows)
        for job, usage, ticket in ended:
            job.ended(usage, ticket)
        if ended:
            self._report(_REPORT_AT_MOST_EVERY_S)

    # ---- KV

    def _start_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            num_blocks, num_pulled, end_s = self._load(load)
            result = LoadResult(load.load_id, num_blocks, num_pulled)
            self._loop.at(end_s, self._finished(self._generation, result))

    def _finished(self, generation: int, result: LoadResult) -> Callable[[], None]:
        def finish() -> None:
            if generation == self._generation:
                self._loaded.append(result)
                self._wake()

        return finish

    def _load(self, load: KvLoad) -> tuple[int, int, float]:
        """Return how many blocks a load brings, how many of them from a peer, and when it ends."""
        now_s, block_tokens = self._loop.now_s, self._calibration.shape.block_tokens
        num_stored, end_s = self.store.load(load.keys[: load.num_stored], block_tokens, now_s)
        missing = len(load.keys) - num_stored
        if load.ticket is None or not missing:
            return num_stored, 0, end_s
        peer = self._peers.get(load.ticket.address)
        transfer = self._calibration.transfer
        if peer is None or not peer.is_reachable:
            return num_stored, 0, end_s + transfer.latency_s
        pulled_s = self.store.transfer(load.ticket.address, missing, transfer, now_s)
        return len(load.keys), missing, max(end_s, pulled_s)

    def _release_ticket(self, request_id: RequestId) -> None:
        ticket = self._tickets.pop(request_id, None)
        peer = self._peers.get(ticket.address) if ticket is not None else None
        if ticket is not None and peer is not None:
            lease_id = ticket.lease_id
            self._loop.after(self._calibration.transfer.latency_s, lambda: peer.release_lease(lease_id))

    def _move_kv(self) -> None:
        """Write offered blocks into the tiers, and take in the changes of leases."""
        scheduler = self.scheduler
        if offered := scheduler.take_offers():
            self._write(offered)
        if scheduler.num_held:
            scheduler.take_leases()

    def _write(self, offered: list[OfferedBlock]) -> None:
        keys = [block.name.key for block in offered]
        end_s = self._loop.now_s
        for tier in self.store.tiers:
            new, evicted = tier.put(keys)
            if new:
                end_s = max(end_s, self.store.transfer(f"to {tier.name}", len(new), tier.costs, self._loop.now_s))
                self._observer.stored(self.worker_id, new, tier.medium)
            if evicted:
                self._observer.removed(self.worker_id, evicted, tier.medium)
        generation = self._generation

        def written() -> None:
            if generation == self._generation:
                self.scheduler.end_offers(offered)
                self._wake()

        self._loop.at(end_s, written)

    # ---- reports

    def _publish(self) -> None:
        """Publish the KV events since the last call, and the load if its time has come."""
        events = self._events
        if events.named_keys:
            self._observer.stored(self.worker_id, events.named_keys, "GPU")
            events.named_keys = []
        if events.forgotten:
            self._observer.removed(self.worker_id, events.forgotten, "GPU")
            events.forgotten = []
        self._report(_REPORT_EVERY_S if self._step is not None else _REPORT_AT_MOST_EVERY_S)

    def _report(self, least_s: float) -> None:
        if self._loop.now_s - self._reported_s < least_s:
            return
        self._reported_s = self._loop.now_s
        scheduler, pool = self.scheduler, self.pool
        self._observer.reported(
            self.worker_id,
            LoadReport(
                waiting_tokens=scheduler.waiting_tokens,
                waiting_sequences=scheduler.num_waiting,
                running_sequences=scheduler.num_running,
                kv_used=1 - pool.num_free / pool.num_blocks,
                num_blocks=pool.num_blocks,
                block_tokens=self._calibration.shape.block_tokens,
                prefill_tokens_per_s=self.rates.prefill_tokens_per_s,
                step_s=self.rates.decode_step_s,
            ),
        )
