"""Scheduler: decides which tokens the next step computes, and takes in what the step sampled.

Pure: it uses no device and does no I/O, and the time is an argument. Plans can be made before the results of earlier
steps are known: what launched steps will sample is counted (`num_pending`, and `num_drafting` as an upper bound of what
drafts add), never guessed. Blocks are taken for the upper bound, and named after the tokens that were really sampled.
The device executes plans in order. So a block that is released and taken again is overwritten only after the last step
that reads it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockId, RequestId, Row
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import KvTicket, LoadResult, OfferedBlock
from stoker.sched.block_sets import BlockSets, PrefixMatch
from stoker.sched.draft_tape import max_heads
from stoker.sched.drafting import Drafting, NoDrafting
from stoker.sched.flex_steps import FlexSteps
from stoker.sched.leases import LeasedKv, Leases, LeaseTerms
from stoker.sched.loads import PendingLoads, loadable_tokens
from stoker.sched.offers import Offers
from stoker.sched.plan import BlockCopy, Span, StepPlan, StepResult
from stoker.sched.plan_builder import PlanBuilder
from stoker.sched.prefill_order import PrefillOrder
from stoker.sched.prefix_cache import PrefixCache
from stoker.sched.request import Finish, GenerateRequest, TokenChunks, TokenLogprobs
from stoker.sched.request_checks import check_request
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.step_size import StepSize

_MAX_COUNTED = 256  # waiting sequences whose tokens are counted in each mixed step; more is a long queue in any case

_MIXED_DRAFT_PART = 4  # drafts take at most one in this many of the tokens that a mixed step has left for prompts

# A pipeline's step has one of this many parts of the prompt tokens that its stages could compute, and at least the minimum. So
# neighbouring steps take similar times, and no stage waits for a long step between short ones.
_STAGE_PARTS = 16
_STAGE_PARTS_ALONE = (
    4  # without sequences that decode, steps need not be as similar, and larger ones cost less per token
)
_MIN_STAGE_TOKENS = 64

_MEASURED_PER_STEP = 8  # waiting sequences whose uncached tokens are counted again in each step, in rotation


def plans_in_flight(stages: int) -> int:
    """Return how many plans a pipeline of this many stages has in flight. With many stages there are more plans than stages,
    because steps do not all take the same time."""
    return stages + stages // 4


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler."""

    block_tokens: int
    step_tokens: int  # maximum number of tokens that one step computes, over all sequences
    max_rows: int  # maximum number of sequences that run at a time
    fingerprint: str = ""  # hash of model, tokenizer, KV layout and dtype; the root of all block keys
    lease: LeaseTerms | None = None  # None: hold no KV for other workers
    max_offers: int = 0  # maximum number of blocks of a KV set that are being copied to the store at a time
    target_itl_s: float = math.inf  # goal for the time between tokens, which limits mixed steps; infinity: no goal
    vocab_size: int | None = None  # None: accept any token id
    max_tokens: int | None = None  # limit of one sequence, prompt included; None: limited by the KV cache only
    # Stages of the pipeline that executes the plans. With several, a sequence is not planned again before its sampled token
    # is known, and each plan has its share of the sequences that decode.
    stages: int = 1
    max_heads: int | None = None  # maximum number of tokens of a step whose logits are computed; None: by `max_rows`
    flex_step_s: float = math.inf  # goal for the time of a step with flex sequences only; infinity: no goal


@dataclass(slots=True)
class Counters:
    """Totals since the start. prompt = cached + computed, except for prompts computed again after a preemption."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    partial_tokens: int = 0  # reused from a block that differs towards its end; not reported as cached
    computed_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0  # verified drafts; not among the computed tokens
    accepted_draft_tokens: int = 0
    draft_step_s: float = 0.0  # time of decode-only steps with drafts or guesses
    undrafted_s: float = 0.0  # the fitted time that their tokens would have taken without drafts
    preemptions: int = 0
    interrupted_steps: int = 0  # steps of flex sequences that were stopped for an interactive request
    loaded_tokens: int = 0  # tokens whose KV came from a tier
    pulled_tokens: int = 0  # tokens whose KV came from another worker
    failed_loads: int = 0  # loads that brought fewer blocks than requested


class _LaunchedPlan(NamedTuple):
    """A plan's spans and their sequences. A sequence whose row epoch has changed was preempted or ended since."""

    spans: list[Span]
    seqs: list[Sequence]
    row_epochs: list[int]
    num_tokens: int
    num_guesses: int


class Scheduler:
    """Queues requests, plans steps, and turns their results into chunks of tokens."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        drafting: Drafting | None = None,
        local_pools: Iterable[BlockPool] = (),
    ) -> None:
        """`pool` is that of the first KV set, and `local_pools` are those of the others, which have a bounded reach.
        `drafting` decides which drafts are verified; None: none ever."""
        self._config = config
        self._drafting = drafting or NoDrafting()
        self._sets = BlockSets([pool, *local_pools], config.block_tokens)
        self._by_id: dict[RequestId, Sequence] = {}
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()  # the one that was measured last is last
        self._running: list[Sequence] = []  # ordered by precedence; includes loading sequences
        self._free_rows = [Row(row) for row in reversed(range(config.max_rows))]
        self._freed_rows: list[Row] = []  # passed to the runner with the next plan
        # Rows that a launched step of a pipeline still samples for, with the number of plans that must be committed first.
        self._cooling_rows: deque[tuple[int, Row]] = deque()
        self._num_plans = self._num_commits = 0
        self._launched: deque[_LaunchedPlan] = deque()
        self._loads = PendingLoads(self._sets)
        self._unfilled: list[BlockId] = []  # blocks of failed loads in the first KV set, cleared with the next plan
        self._leases = Leases(config.lease, self._sets)
        self._offers = Offers(config.max_offers, self._sets)
        self._prefixes = PrefixCache(self._sets, self._offers)
        self._order = PrefillOrder(config.step_tokens, self._tokens_left)
        self._leaving: list[
            Sequence
        ] = []  # sequences that another worker takes over, until their launched steps are done
        self._num_arrivals = 0
        self._max_heads = max_heads(config.max_rows) if config.max_heads is None else config.max_heads
        self.counters = Counters()
        self.step_size = StepSize(config.target_itl_s, config.step_tokens)
        self._flex = FlexSteps(config.flex_step_s, self.step_size)

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._launched or self._loads)

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    @property
    def num_held(self) -> int:
        return self._leases.num_held

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_tokens(self) -> int:
        return sum(len(seq.token_ids) for seq in self._waiting)

    # ---- requests

    def add(self, request: GenerateRequest, num_stored: int = 0) -> None:
        """Queue a request. `num_stored` is the number of leading blocks that tiers hold and that are worth loading."""
        config = self._config
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id} is in use", code="duplicate_request_id")
        check_request(request, config.max_tokens, self._sets.max_tokens, config.vocab_size)
        root = root_key(config.fingerprint, request.cache_salt)
        seq = Sequence(
            request=request,
            arrival=self._num_arrivals,
            root=root,
            block_tokens=config.block_tokens,
            max_tokens=request.num_prompt + request.max_new_tokens,
            token_ids=list(request.token_ids),
            keys=block_keys(request.token_ids, root, config.block_tokens),
            num_stored=num_stored,
        )
        if request.lease_id is not None:
            self._leases.open(request.lease_id, seq)
        self._num_arrivals += 1
        self._by_id[request.request_id] = seq
        self._flex.added(request)
        self._enqueue(seq)
        self.counters.prompt_tokens += request.num_prompt

    def cancel(self, request_id: RequestId) -> TokenChunks:
        """End a request. Return its last chunk, or nothing if the request is not known."""
        chunks = TokenChunks()
        if (seq := self._by_id.get(request_id)) is not None:
            self._end(seq, Finish("cancelled"), chunks)
        return chunks

    def expire(self, now: float) -> TokenChunks:
        """Set the time of this step, and end the requests whose deadline has passed. Return their last chunks."""
        self._sets.set_time(now)
        self._flex.set_time(now)
        late = [s for s in self._by_id.values() if s.request.deadline_s is not None and s.request.deadline_s <= now]
        chunks = TokenChunks()
        for seq in late:
            self._end(seq, Finish("deadline"), chunks)
        return chunks

    # ---- sequences that move to another worker

    def hand_off(self, request_id: RequestId, lease_id: str) -> TokenChunks:
        """Let another worker continue a request. Return its last chunk, if it can end at once.

        Otherwise the next `end_leaving` returns it, after the steps that were launched for it. Its KV is held under
        `lease_id`. A running sequence that has a lease already hands itself off after its prompt.
        """
        seq = self._by_id.get(request_id)
        if seq is None or seq.leaves_under is not None:
            return TokenChunks()
        if seq.request.lease_id is not None and seq.state is not SequenceState.WAITING:
            return TokenChunks()
        seq.leaves_under = lease_id
        self._leaving.append(seq)
        return self.end_leaving()

    def end_leaving(self) -> TokenChunks:
        """End the leaving sequences whose launched steps are done. Return their last chunks."""
        chunks = TokenChunks()
        if self._leaving:
            in_flight = {id(seq) for plan in self._launched for seq in plan.seqs}
            for seq in [seq for seq in self._leaving if id(seq) not in in_flight]:
                ticket = self._leaving_ticket(seq)
                self._remove(seq)
                chunks.add(seq.request.request_id, [], seq.usage, None, Finish("handoff"), ticket)
        return chunks

    def _leaving_ticket(self, seq: Sequence) -> KvTicket | None:
        """Return a ticket for the KV that was computed here. Without any, return the ticket that the sequence came with."""
        assert seq.leaves_under is not None
        if seq.state is SequenceState.RUNNING and seq.num_computed and self._config.lease is not None:
            return self._leases.take_over(seq.leaves_under, seq, min(seq.num_computed, len(seq.token_ids) - 1))
        return seq.request.ticket if seq.cached_tokens is None else None

    # ---- KV that comes from tiers or other workers, and KV for them

    def finish_load(self, result: LoadResult) -> None:
        """Take in the result of a plan's load. Blocks that did not arrive are computed."""
        finished = self._loads.finish(result)
        seq = finished.seq
        if seq.state is SequenceState.DONE:  # it ended during the load; its blocks are no longer written to
            self._sets.release(seq)
            return
        if finished.failed:
            self._sets.shorten(seq, seq.num_named)
        seq.state = SequenceState.RUNNING
        seq.num_computed = finished.num_computed
        seq.pulled_tokens = finished.pulled_tokens
        self._count_cached(seq, finished.num_computed - finished.pulled_tokens)
        self.counters.loaded_tokens += finished.stored_tokens
        self.counters.pulled_tokens += finished.pulled_tokens
        self.counters.failed_loads += finished.failed
        self._unfilled += finished.unfilled
        self._prefixes.name_blocks(seq, seq.num_computed)
        if seq.num_to_compute > 1:
            self._order.add(seq)

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

    # ---- steps

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if there is nothing to compute now."""
        to_compute = [(seq, seq.num_to_compute) for seq in self._running if self._is_plannable(seq)]
        builder = PlanBuilder(0, [[] for _ in self._sets.pools], holds_flex=self._has_interactive_prompt(to_compute))
        self._fill(builder, to_compute)
        if builder.holds_flex and builder.is_empty:  # the interactive prompt may wait for blocks of flex sequences
            builder.holds_flex = False
            self._fill(builder, [entry for entry in to_compute if entry[0].state is SequenceState.RUNNING])
        if builder.is_empty:
            return None
        if builder.drafts:
            builder.limit_drafts(self._max_heads - len(builder.counts))
            self._drafting.launched(builder.drafts)
        guesses, alone = self._drafting.num_guesses, not self._flex.is_quiet
        plan = builder.build(self._freed_rows, self._unfilled, guesses, flex_runs_alone=alone)
        self._freed_rows, self._unfilled = [], []
        row_epochs = [seq.row_epoch for seq in builder.counts]
        self._num_plans += 1
        seqs = list(builder.counts)
        self._launched.append(_LaunchedPlan(plan.spans, seqs, row_epochs, plan.num_tokens, plan.num_guesses))
        self.counters.computed_tokens += plan.num_tokens - plan.num_drafts
        self.counters.draft_tokens += plan.num_drafts
        return plan

    def _has_interactive_prompt(self, to_compute: list[tuple[Sequence, int]]) -> bool:
        """Return True if flex sequences must wait, because prompt tokens of another sequence are to be computed."""
        if not self._flex.num_flex or self._flex.num_flex == len(self._by_id):
            return False
        return any(count > 1 and not seq.request.is_flex for seq, count in to_compute) or any(
            not seq.request.is_flex for seq in self._waiting
        )

    def _fill(self, builder: PlanBuilder, to_compute: list[tuple[Sequence, int]]) -> None:
        """Schedule the sequences of one step: those that decode, their drafts, then prompts."""
        if builder.holds_flex:
            to_compute = [entry for entry in to_compute if not entry[0].request.is_flex]
        # Decode comes before prefill, so that a long prompt does not stall the sequences that decode.
        decodes = self._stage_share([entry for entry in to_compute if entry[1] == 1])
        prefills = [entry for entry in to_compute if entry[1] > 1]
        builder.budget = self._budget(len(decodes), prefills)
        for seq, num_to_compute in decodes:
            count = num_to_compute if num_to_compute <= builder.budget else builder.budget
            if not count or seq.state is not SequenceState.RUNNING:
                continue
            end = seq.num_computed + count
            if end > seq.max_tokens:  # the device computes nothing beyond it; `num_computed` is an upper bound
                end = seq.max_tokens
            if end <= seq.room or self._extend_blocks(seq, end, builder):
                builder.schedule(seq, count)
        self._add_drafts(builder, mixed=bool(prefills or self._waiting))
        self._compute_prompts([seq for seq, _ in prefills], builder)

    def _is_plannable(self, seq: Sequence) -> bool:
        """Return False while a pipeline samples the sequence's next token: the later stages do not know it."""
        return self._config.stages == 1 or not seq.num_pending

    def _stage_share(self, decodes: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Return the part of the decoding sequences that one plan of a pipeline has, so that the plans in flight together have
        them all."""
        if self._config.stages == 1:
            return decodes
        return decodes[: -(-len(self._running) // plans_in_flight(self._config.stages))]

    def _add_drafts(self, builder: PlanBuilder, mixed: bool) -> None:
        """Add drafts to the scheduled sequences, all of which decode.

        `mixed`: prompts compete for this step's tokens. Drafts then take at most a part of what is left.
        """
        budget = builder.budget // _MIXED_DRAFT_PART if mixed else builder.budget
        wanted = self._drafting.plan(list(builder.counts), budget, self.step_size.costs)
        for seq, num_drafts in wanted.items():
            # Drafts after the sequence's last token would be useless.
            num_drafts = min(num_drafts, builder.budget, seq.max_tokens - len(seq.token_ids) - seq.num_pending - 1)
            room = self._make_draft_room(seq, num_drafts, builder)
            if min(num_drafts, room) > 0:
                builder.add_drafts(seq, min(num_drafts, room))

    def _make_draft_room(self, seq: Sequence, num_drafts: int, builder: PlanBuilder) -> int:
        """Take free blocks for a scheduled sequence's drafts. No sequence is preempted for them.

        Return for how many drafts there is room.
        """
        first = seq.num_computed + 1
        # The device computes nothing beyond the sequence's limit, even if `first` is an upper bound beyond it.
        end = min(first + num_drafts, seq.max_tokens)
        if end > seq.room:
            if end > self._sets.free_tokens(seq):
                return seq.room - first
            self._append_blocks(seq, end, builder)
        return num_drafts

    def _budget(self, num_decodes: int, prefills: list[tuple[Sequence, int]]) -> int:
        """Return the step's token limit. A step with decoding sequences is limited, because all of them wait for it. The
        stages of a pipeline get steps of similar size: a long one between short ones would leave stages idle."""
        step_tokens, stages = self._config.step_tokens, self._config.stages
        if self._flex.num_flex == len(self._by_id):
            step_tokens = self._flex.limit(num_decodes, step_tokens)
        if not (prefills or self._waiting) or (not num_decodes and stages == 1):
            return step_tokens
        limit = step_tokens
        if num_decodes:
            limit = min(limit, self.step_size.limit(num_decodes, self._queued_tokens(prefills, _MAX_COUNTED)))
        if stages == 1:
            return limit
        startable = self._queued_tokens(prefills, min(_MAX_COUNTED, len(self._free_rows)))
        parts = stages * (_STAGE_PARTS if num_decodes else _STAGE_PARTS_ALONE)
        return min(limit, num_decodes + max(_MIN_STAGE_TOKENS, -(-startable // parts)))

    def _queued_tokens(self, prefills: list[tuple[Sequence, int]], max_waiting: int) -> int:
        """Return how many prompt tokens are left to compute, of at most `max_waiting` sequences that wait."""
        # What the cache holds of the waiting prompts is not known yet. They are assumed to be like the earlier ones.
        uncached = 1 - self.counters.cached_tokens / max(1, self.counters.prompt_tokens)
        waiting_tokens = sum(len(seq.token_ids) for seq in islice(self._waiting, max_waiting))
        return sum(num_to_compute for _seq, num_to_compute in prefills) + int(uncached * waiting_tokens)

    def commit(self, result: StepResult) -> TokenChunks:
        """Apply the result of the oldest launched plan. Return the new tokens of each sequence."""
        chunks = TokenChunks()
        spans, seqs, row_epochs, num_tokens, num_guesses = self._launched.popleft()
        self._num_commits += 1
        while self._cooling_rows and self._cooling_rows[0][0] <= self._num_commits:
            self._give_back_row(self._cooling_rows.popleft()[1])
        if result.is_interrupted:
            self._requeue(spans, seqs, row_epochs)
            return chunks
        done = SequenceState.DONE  # looking it up takes long for one row of hundreds
        if spans:
            self.step_size.record(num_tokens, len(spans), result.step_s, num_guesses)
        for i, (span, seq, row_epoch, token_ids) in enumerate(
            zip(spans, seqs, row_epochs, result.token_ids, strict=True)
        ):
            if seq.state is done:
                continue
            has_row = seq.row_epoch == row_epoch  # it was not preempted since
            if not span.samples:
                if has_row and span.start + span.count >= (seq.num_named + 1) * seq.block_tokens:
                    self._prefixes.name_blocks(seq, span.start + span.count)
            elif i in result.errors and len(_up_to_last(seq, token_ids)) == len(token_ids):  # no stop token before it
                error = Finish("error", error_code="invalid_grammar", error_message=result.errors[i])
                self._end(seq, error, chunks, token_ids[:-1], result.logprobs.get(i, [])[:-1])
            else:
                seq.num_pending -= 1
                if span.num_drafts:
                    token_ids = self._take_drafts(seq, span, token_ids, has_row)
                self._append_tokens(seq, token_ids, has_row, i, result, chunks)
        num_generated = sum(map(len, chunks.token_ids))
        self.counters.generated_tokens += num_generated
        if num_guesses or num_tokens > len(spans):
            self._count_speed(spans, num_tokens, num_generated, result.step_s)
        return chunks

    def _requeue(self, spans: list[Span], seqs: list[Sequence], row_epochs: list[int]) -> None:
        """Preempt the sequences of an interrupted step. What earlier steps computed for them stays in the prefix cache."""
        self.counters.interrupted_steps += 1
        for span, seq, row_epoch in zip(spans, seqs, row_epochs, strict=True):
            if seq.state is not SequenceState.DONE:
                seq.num_pending -= span.samples
                if span.num_drafts:
                    self._drafting.dropped(seq)
                    seq.num_drafting -= span.num_drafts
                    self.counters.draft_tokens -= span.num_drafts
                if seq.row_epoch == row_epoch:
                    self._move_to_queue(seq)

    def _count_speed(self, spans: list[Span], num_tokens: int, num_generated: int, step_s: float) -> None:
        """Compare the time of a step with drafts with that of the same tokens without. Mixed steps are left out."""
        num_rows = len(spans)
        if num_tokens == num_rows + sum(span.num_drafts for span in spans) and all(span.samples for span in spans):
            self.counters.draft_step_s += step_s
            self.counters.undrafted_s += self.step_size.costs.decode_s(num_rows) * num_generated / num_rows

    def _take_drafts(self, seq: Sequence, span: Span, token_ids: list[int], has_row: bool) -> list[int]:
        """Take in the outcome of a span with drafts. Return its tokens up to the sequence's last."""
        num_accepted = len(token_ids) - 1
        self._drafting.committed(seq, span.num_drafts, token_ids)
        seq.num_drafting -= span.num_drafts
        if has_row:
            seq.num_computed -= span.num_drafts - num_accepted
        seq.draft_tokens += span.num_drafts
        token_ids = _up_to_last(seq, token_ids)
        num_used = min(num_accepted, len(token_ids))  # a draft after the last token was no help
        seq.accepted_draft_tokens += num_used
        self.counters.accepted_draft_tokens += num_used
        return token_ids

    def _append_tokens(
        self, seq: Sequence, token_ids: list[int], has_row: bool, i: int, result: StepResult, chunks: TokenChunks
    ) -> None:
        """Append the tokens that span `i` sampled, and end the sequence if they are its last."""
        request = seq.request
        is_first = len(seq.token_ids) == len(request.token_ids)
        seq.token_ids += token_ids
        if has_row and len(seq.token_ids) > (seq.num_named + 1) * seq.block_tokens:
            self._prefixes.name_blocks(seq, len(seq.token_ids) - 1)
        finish, ticket = _finish_of(seq, i in result.grammar_done), None
        if finish is not None:
            if request.lease_id is not None and (finish.reason == "handoff" or request.max_new_tokens == 1):
                ticket = self._leases.hold(request.lease_id, seq)
            self._remove(seq)
        elif i in result.drafts:
            self._drafting.suggested(seq, result.drafts[i])
        usage = seq.usage if is_first or finish is not None or request.prediction else None
        logprobs = result.logprobs.get(i)
        if logprobs is not None and len(logprobs) > len(token_ids):
            logprobs = logprobs[: len(token_ids)]
        chunks.add(request.request_id, token_ids, usage, logprobs, finish, ticket)

    # ---- prompts

    def _compute_prompts(self, running: list[Sequence], builder: PlanBuilder) -> None:
        """Fill the rest of the step with prompts of running and waiting sequences, until one does not fit.

        `running` are the running sequences with prompt tokens to compute.
        """
        for _ in range(min(_MEASURED_PER_STEP, len(self._waiting))):
            seq = next(iter(self._waiting))
            self._waiting.move_to_end(seq)
            self._order.measure(seq)
        if running or self._free_rows or self._could_preempt():
            self._take_turns(builder)
        # A waiting sequence that does not fit does not stop those that have their blocks. It may wait for these.
        for seq in sorted(running, key=lambda s: s.num_to_compute):
            if builder.budget and seq.state is SequenceState.RUNNING:
                self._take_turn(seq, builder)

    def _could_preempt(self) -> bool:
        """Return True if a running sequence has a worse priority than a waiting one."""
        best = self._order.best_priority
        return best is not None and bool(self._running) and best < self._running[-1].request.priority

    def _take_turns(self, builder: PlanBuilder) -> None:
        """Compute prompts in order. At most one sequence that does not fit is passed, by other tenants of its priority."""
        blocked: Sequence | None = None
        num_free = 0
        for seq in self._order.walk():
            if not builder.budget or (blocked is not None and seq.request.priority != blocked.request.priority):
                break
            if self._take_turn(seq, builder):
                continue
            if blocked is not None or not self._may_be_passed(seq):
                break
            blocked, num_free = seq, self._sets.first_pool.num_free
            self._order.pass_over(seq)
        if blocked is not None:
            blocked.blocks_passed += max(0, num_free - self._sets.first_pool.num_free)

    def _take_turn(self, turn: Sequence, builder: PlanBuilder) -> bool:
        """Compute prompt tokens of a sequence, or of the running one whose blocks it waits for.

        Return False if it does not fit.
        """
        seq = turn
        if builder.holds_flex and turn.request.is_flex:
            return True
        if turn.state is SequenceState.WAITING:
            if turn.num_pending or turn.leaves_under is not None:
                return True  # preempted while a step samples its next token, which is not known here yet, or leaving
            seq = self._prefixes.sequence_ahead(turn) or turn
        if seq in builder.counts or seq.state is SequenceState.LOADING:
            return True
        if seq.state is SequenceState.RUNNING:
            if seq.num_to_compute <= 1:
                return True  # launched steps compute the rest of its prompt
            self._schedule_prompt(seq, builder)
        elif not self._admit(seq, builder):
            return False
        if count := builder.counts.get(seq, 0):
            self._order.charge(turn, seq, count, seq.num_to_compute - count)
        elif seq.is_loading:
            self._order.discard(seq)  # until its blocks are loaded
        return True

    def _schedule_prompt(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Compute prompt tokens of a running sequence, as many as it gets blocks for."""
        end = seq.num_computed + min(seq.num_to_compute, builder.budget)
        if end > seq.room:
            # Only in a KV set with a bounded reach: in others it has had all of its blocks since it started.
            self._sets.release_behind(seq)
            end = min(end, max(self._sets.free_tokens(seq), seq.num_computed + 1))
            if not self._extend_blocks(seq, end, builder):
                return
        builder.schedule(seq, end - seq.num_computed)

    def _may_be_passed(self, seq: Sequence) -> bool:
        """Return True if other tenants' sequences may start before this one, which does not fit.

        Otherwise one tenant's prompt that needs most of the KV cache would stop all others until the running sequences end.
        After the others have taken as many blocks as it needs itself, they wait for it. So it does not starve.
        """
        return bool(self._free_rows) and seq.blocks_passed < seq.num_blocks_for(len(seq.token_ids) + 1)

    def _tokens_left(self, seq: Sequence) -> int:
        """Return how many known tokens are to be computed. For a waiting sequence it is an estimate."""
        if seq.state is not SequenceState.WAITING:
            return seq.num_to_compute
        cached = max(self._prefixes.num_matched(seq) * seq.block_tokens, loadable_tokens(seq))
        return len(seq.token_ids) - cached

    def _enqueue(self, seq: Sequence) -> None:
        self._waiting[seq] = None
        self._order.add(seq)

    # ---- admission

    def _admit(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Start a waiting sequence, if there are a row and blocks for all of its known tokens and one more.

        Return False if there are not.
        """
        match = self._prefixes.match(seq)
        num_matched = match.num_blocks
        matched_tokens = num_matched * seq.block_tokens
        loadable = loadable_tokens(seq)
        loads = loadable > matched_tokens
        wanted = self._sets.wanted(seq, match, loadable if loads else 0)
        if not self._make_room(seq, match, wanted, builder):
            return False
        partial = None if loads else self._prefixes.match_partial(seq, num_matched)
        self._sets.start(seq, match, wanted, builder.fresh_blocks)
        seq.num_computed = matched_tokens
        seq.num_named = num_matched
        if partial is not None:
            sources, count = partial
            builder.copies += [
                BlockCopy(src, held.ids[num_matched], kv_set)
                for kv_set, (src, held) in enumerate(zip(sources, seq.held, strict=True))
            ]
            seq.num_computed += count
            self.counters.partial_tokens += count
        del self._waiting[seq]
        insort(self._running, seq, key=lambda s: s.precedence)
        seq.row_epoch += 1
        seq.row = self._free_rows.pop()
        self._prefixes.start_computing(seq, num_matched)
        builder.add_row(seq)
        if loads:
            seq.state = SequenceState.LOADING
            builder.loads.append(self._loads.start(seq, num_matched, loadable))
        else:
            seq.state = SequenceState.RUNNING
            self._count_cached(seq, matched_tokens)
            self._schedule_prompt(seq, builder)
        return True

    def _make_room(self, seq: Sequence, match: PrefixMatch, wanted: list[range], builder: PlanBuilder) -> bool:
        """Free a row and the wanted blocks besides the matched ones, by preempting sequences of worse priority.

        Return False if there is still too little room. No sequence is preempted if preempting all of them would not be
        enough.
        """
        preemptible = [
            other
            for other in self._running
            if other.request.priority > seq.request.priority and other.state is SequenceState.RUNNING
        ]
        if not self._free_rows and not preemptible:
            return False
        if not self._sets.can_start(match, wanted, preemptible):
            return False
        while preemptible and (not (self._free_rows or self._cooling_rows) or not self._sets.can_start(match, wanted)):
            self._preempt(preemptible.pop(), builder)
        # There may still be too few blocks, if the preempted sequences shared theirs with others.
        return bool(self._free_rows) and self._sets.can_start(match, wanted)

    def _count_cached(self, seq: Sequence, num_tokens: int) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(num_tokens, seq.request.num_prompt)
            self.counters.cached_tokens += seq.cached_tokens

    # ---- rows and blocks

    def _extend_blocks(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Take blocks until a running sequence has room for `num_tokens` tokens.

        If a pool has too few, the sequences of lowest precedence are preempted, except those that start in this step.
        Return False if `seq` itself was preempted, or if it gets no blocks in this step.
        """
        self._sets.release_behind(seq)
        while num_tokens > self._sets.free_tokens(seq):
            if self._sets.releases_soon(seq):
                return False
            victim = next(other for other in reversed(self._running) if builder.may_preempt(other))
            self._preempt(victim, builder)
            if victim is seq:
                return False
        self._append_blocks(seq, num_tokens, builder)
        return True

    def _append_blocks(self, seq: Sequence, num_tokens: int, builder: PlanBuilder) -> None:
        """Give a running sequence room for `num_tokens` tokens. There are enough free blocks."""
        for kv_set, blocks in self._sets.extend(seq, num_tokens, builder.fresh_blocks):
            builder.add_blocks(seq, kv_set, blocks)

    def _preempt(self, seq: Sequence, builder: PlanBuilder) -> None:
        """Take a running sequence out of the plan, and move it back to the queue."""
        builder.unschedule(seq)
        self._move_to_queue(seq)
        self.counters.preemptions += 1

    def _move_to_queue(self, seq: Sequence) -> None:
        """Make a running sequence wait. Its full blocks stay in the prefix cache until they are reused."""
        self._release_row(seq)
        seq.state = SequenceState.WAITING
        seq.num_computed = 0
        self._order.discard(seq)
        self._enqueue(seq)

    def _end(
        self,
        seq: Sequence,
        finish: Finish,
        chunks: TokenChunks,
        token_ids: Iterable[int] = (),
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """End a sequence, after its last tokens `token_ids`."""
        seq.token_ids += token_ids
        self._remove(seq)
        chunks.add(seq.request.request_id, list(token_ids), seq.usage, logprobs or None, finish)

    def _remove(self, seq: Sequence) -> None:
        self._order.discard(seq)
        self._drafting.ended(seq)
        if seq.state is SequenceState.WAITING:
            del self._waiting[seq]
        else:
            self._prefixes.offer_last(seq)
            self._release_row(seq)
        seq.state = SequenceState.DONE
        del self._by_id[seq.request.request_id]
        self._flex.ended(seq.request)
        if seq.leaves_under is not None:
            self._leaving.remove(seq)
        if seq.request.lease_id is not None:
            self._leases.sequence_ended(seq.request.lease_id)

    def _release_row(self, seq: Sequence) -> None:
        """Take row and blocks from a running or loading sequence."""
        self._running.remove(seq)
        self._prefixes.stop_computing(seq)
        if seq.request.lease_id is not None:
            self._leases.blocks_released(seq.request.lease_id)
        if seq.state is not SequenceState.LOADING:  # a load still writes into its blocks: finish_load() releases them
            self._sets.release(seq)
        if self._config.stages == 1 or self._num_plans == self._num_commits:
            self._give_back_row(seq.running_row)
        else:
            self._cooling_rows.append((self._num_plans, seq.running_row))
        seq.row = None
        seq.uploaded_tape = None
        seq.row_epoch += 1

    def _give_back_row(self, row: Row) -> None:
        self._free_rows.append(row)
        self._freed_rows.append(row)


def _up_to_last(seq: Sequence, token_ids: list[int]) -> list[int]:
    """Return new tokens of a sequence up to its last: a stop token, or the one that reaches its limit."""
    token_ids = token_ids[: seq.max_tokens - len(seq.token_ids)]
    stops = seq.request.sampling.stop_token_ids
    for i, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: i + 1]
    return token_ids


def _finish_of(seq: Sequence, grammar_done: bool) -> Finish | None:
    """Return why the sequence ends after its last token, or None if it continues."""
    request, last = seq.request, seq.token_ids[-1]
    if last in request.sampling.stop_token_ids:
        return Finish("stop", stop_token_id=last)
    if grammar_done:
        return Finish("stop")
    if len(seq.token_ids) >= seq.max_tokens:
        return Finish("length")
    return Finish("handoff") if request.lease_id is not None else None
