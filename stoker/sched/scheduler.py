"""Scheduler: decides which tokens the next step computes, and takes in what the step sampled.

Pure: it uses no device and does no I/O, and the time is an argument. Plans can be made before the results of earlier
steps are known: what launched steps will sample is counted (`num_pending`, and `num_drafting` as an upper bound of what
drafts add), never guessed. Blocks are taken for the upper bound, and named after the tokens that were really sampled.
The device executes plans in order. So a block that is released and taken again is overwritten only after the last step
that reads it.

This file has the scheduler's contract, and puts its parts together:

- `SequenceQueues` has the sequences that wait and run. `Residency` moves them, with their rows, blocks and loads.
- `StepFiller` chooses the tokens of a step, with `StepBudget` (how many) and `PrefillTurns` (whose prompts).
- `StepOutcomes` applies what a step sampled.
- `Departures` are the sequences that another worker takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockKey, RequestId
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import LoadResult, OfferedBlock
from stoker.sched.block_sets import BlockSets
from stoker.sched.departures import Departures
from stoker.sched.draft_tape import max_heads
from stoker.sched.drafting import Drafting, NoDrafting
from stoker.sched.flex_steps import FlexSteps
from stoker.sched.leases import LeasedKv, Leases
from stoker.sched.offers import Offers
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.prefill_order import PrefillOrder
from stoker.sched.prefill_turns import PrefillTurns
from stoker.sched.prefix_cache import PrefixCache
from stoker.sched.request import Finish, GenerateRequest, TokenChunks
from stoker.sched.request_checks import check_request
from stoker.sched.residency import Residency
from stoker.sched.row_pool import RowPool
from stoker.sched.scheduler_config import Counters, SchedulerConfig
from stoker.sched.sequence import Sequence
from stoker.sched.sequence_queues import SequenceQueues
from stoker.sched.step_budget import StepBudget
from stoker.sched.step_filler import StepFiller
from stoker.sched.step_outcomes import LaunchedPlan, StepOutcomes
from stoker.sched.step_size import StepSize


class Scheduler:
    """Queues requests, plans steps, and turns their results into chunks of tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        drafting: Drafting | None = None,
        local_pools: Iterable[BlockPool] = (),
        order: type[PrefillOrder] = PrefillOrder,
    ) -> None:
        """`pool` is that of the first KV set, and `local_pools` are those of the others, which have a bounded reach.
        `drafting` decides which drafts are verified; None: none ever. `order` decides whose prompts are computed first."""
        self._config = config
        self._root = root_key(config.fingerprint)  # of requests without a salt
        self._drafting = drafting or NoDrafting()
        self.counters = counters = Counters()
        self.step_size = step_size = StepSize(config.target_itl_s, config.step_tokens)
        self._flex = flex = FlexSteps(config.flex_step_s, step_size)
        self._sets = sets = BlockSets([pool, *local_pools], config.block_tokens)
        self._rows = rows = RowPool(config.max_rows, config.stages)
        self._leases = leases = Leases(config.lease, sets)
        self._offers = Offers(config.max_offers, sets)
        prefixes = PrefixCache(sets, self._offers)
        self._queues = queues = SequenceQueues(order(config.step_tokens, prefixes.tokens_left), flex)
        self._residency = residency = Residency(queues, rows, sets, prefixes, leases, self._drafting, counters)
        budget = StepBudget(config, queues, rows, flex, step_size, counters)
        prefill = PrefillTurns(queues, rows, sets, prefixes, residency)
        heads = max_heads(config.max_rows) if config.max_heads is None else config.max_heads
        self._filler = StepFiller(queues, sets, residency, budget, prefill, self._drafting, step_size, heads)
        self._outcomes = StepOutcomes(residency, prefixes, leases, self._drafting, step_size, counters)
        self._departures = Departures(residency, leases)
        self._launched: deque[LaunchedPlan] = deque()
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queues.by_id or self._launched or self._residency.num_loading)

    @property
    def num_loading(self) -> int:
        return self._residency.num_loading

    @property
    def num_held(self) -> int:
        return self._leases.num_held

    @property
    def num_leaving(self) -> int:
        """Sequences that `end_leaving` will return once their launched steps are done."""
        return self._departures.num_leaving

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self._queues.waiting)

    # ---- requests

    def add(self, request: GenerateRequest, num_stored: int = 0, keys: list[BlockKey] | None = None) -> None:
        """Queue a request. `num_stored` is the number of leading blocks that tiers hold and that are worth loading. `keys` are
        those of its full blocks, if the caller has them."""
        config = self._config
        if request.request_id in self._queues.by_id:
            raise InvalidRequest(f"request id {request.request_id} is in use", code="duplicate_request_id")
        check_request(request, config.max_tokens, self._sets.max_tokens, config.vocab_size)
        root = root_key(config.fingerprint, request.cache_salt) if request.cache_salt else self._root
        seq = Sequence(
            request=request,
            arrival=self._num_arrivals,
            root=root,
            block_tokens=config.block_tokens,
            max_tokens=request.num_prompt + request.max_new_tokens,
            token_ids=list(request.token_ids),
            keys=block_keys(request.token_ids, root, config.block_tokens) if keys is None else keys,
            num_stored=num_stored,
        )
        if request.lease_id is not None:
            self._leases.open(request.lease_id, seq)
        self._num_arrivals += 1
        self._queues.add(seq)
        self.counters.prompt_tokens += request.num_prompt

    def cancel(self, request_id: RequestId) -> TokenChunks:
        """End a request. Return its last chunk, or nothing if the request is not known."""
        seq = self._queues.by_id.get(request_id)
        return self._end([] if seq is None else [seq], Finish("cancelled"))

    def expire(self, now: float) -> TokenChunks:
        """Set the time of this step, and end the requests whose deadline has passed. Return their last chunks."""
        self._sets.set_time(now)
        self._flex.set_time(now)
        if not self._queues.num_deadlines:
            return TokenChunks()
        seqs = self._queues.by_id.values()
        late = [seq for seq in seqs if seq.request.deadline_s is not None and seq.request.deadline_s <= now]
        return self._end(late, Finish("deadline"))

    def _end(self, seqs: list[Sequence], finish: Finish) -> TokenChunks:
        chunks = TokenChunks()
        for seq in seqs:
            self._residency.remove(seq)
            chunks.add(seq.request.request_id, [], seq.usage, None, finish)
        return chunks

    # ---- steps

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute now."""
        builder = self._filler.fill()
        if builder.is_empty:
            return None
        for seq in self._residency.take_shortened():
            builder.put_tables(seq)
        plan = builder.build(
            self._rows.take_freed(),
            self._residency.take_unfilled(),
            self._drafting.num_guesses,
            flex_runs_alone=not self._flex.is_quiet,
        )
        self._rows.plan_launched()
        self._launched.append(LaunchedPlan.of(plan, list(builder.counts)))
        self.counters.computed_tokens += plan.num_tokens - plan.num_drafts
        self.counters.draft_tokens += plan.num_drafts
        return plan

    def commit(self, result: StepResult) -> TokenChunks:
        """Apply the result of the oldest launched plan. Return the new tokens of each sequence."""
        launched = self._launched.popleft()
        self._rows.plan_committed()
        return self._outcomes.apply(launched, result)

    # ---- sequences that move to another worker

    def hand_off(self, request_id: RequestId, lease_id: str) -> TokenChunks:
        """Let another worker continue a request. Return its last chunk, if it can end at once.

        Otherwise the next `end_leaving` returns it, after the steps that were launched for it. Its KV is held under
        `lease_id`. A running sequence that has a lease already hands itself off after its prompt.
        """
        if (seq := self._queues.by_id.get(request_id)) is not None:
            self._departures.start(seq, lease_id)
        return self.end_leaving()

    def end_leaving(self) -> TokenChunks:
        """End the leaving sequences whose launched steps are done. Return their last chunks."""
        return self._departures.end(self._launched)

    # ---- KV that comes from tiers or other workers, and KV for them

    def finish_load(self, result: LoadResult) -> None:
        """Take in the result of a plan's load. Blocks that did not arrive are computed."""
        self._residency.finish_load(result)

    def take_leases(self) -> tuple[list[LeasedKv], list[str]]:
        """Return the KV of all growing and newly held leases, and the ids of newly broken leases."""
        return self._leases.take()

    def take_emptied_leases(self) -> list[str]:
        """Return the leases that lost their blocks. The next plan may overwrite those blocks."""
        return self._leases.take_emptied()

    def expired_leases(self, now: float) -> list[str]:
        return self._leases.expired(now)

    def release_lease(self, lease_id: str) -> None:
        """Give the blocks of a held lease back to the pool. Does nothing while its sequence still runs."""
        self._leases.release(lease_id)

    def take_offers(self) -> list[OfferedBlock]:
        """Return the blocks that are newly offered to the store."""
        return self._offers.take()

    def end_offers(self, ended: Iterable[OfferedBlock]) -> None:
        """Release offered blocks that the store has copied or does not want."""
        self._offers.end(ended)
