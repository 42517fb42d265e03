"""Scheduler: which tokens run in the next step, and what to make of what they brought.

Pure: no device, no I/O; time is an argument. Plans may be made ahead of results: what a step under way will draw is
counted (`num_drawing`), never guessed. The device carries plans out in order, so that a block given back and taken again
is overwritten after its last use, whoever still had a step under way in it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from stoker.base.errors import ContextTooLong, InvalidRequest
from stoker.base.ids import BlockId, BlockKey, RequestId, Row
from stoker.kv.blocks.keys import block_keys, root_key
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import LoadResult, OfferedBlock
from stoker.sched.leases import LeasedKv, Leases, LeaseTerms
from stoker.sched.loads import Loads, loadable_tokens
from stoker.sched.offers import Offers
from stoker.sched.plan import BlockCopy, BlockTableChange, Span, StepPlan, StepResult
from stoker.sched.plan_builder import Draft
from stoker.sched.request import Finish, GenerateRequest, TokenChunks
from stoker.sched.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_tokens: int
    step_tokens: int  # tokens computed in one step, over all sequences
    max_rows: int  # sequences that run at a time
    fingerprint: str = ""  # model, tokenizer, layout and dtype: the root of all block keys
    lease: LeaseTerms | None = None  # None: no KV is kept for others
    max_offers: int = 0  # blocks that may be on their way into the store at a time
    mixed_tokens: int | None = None  # tokens of a step in which answers go on; None: step_tokens
    vocab_size: int | None = None  # None: any token id is the model's
    max_tokens: int | None = None  # that one sequence may come to know; None: as many as there is KV for


@dataclass(slots=True)
class Counters:
    """Since the start. prompt = cached + computed, but for prompts computed again after a preemption."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    partial_tokens: int = 0  # reused out of a block whose end differed; not reported as cached
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    loaded_tokens: int = 0  # from tiers, beside those in cached_tokens
    pulled_tokens: int = 0
    failed_loads: int = 0  # ended with less than was asked for


class _UnderWay(NamedTuple):
    """A launched plan's spans, and whose they are. `runs` tell which of those have been preempted since."""

    spans: list[Span]
    seqs: list[Sequence]
    runs: list[int]


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._by_id: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []  # by precedence
        self._running: list[Sequence] = []  # by precedence
        self._free_rows = [Row(row) for row in reversed(range(config.max_rows))]
        self._freed_rows: list[Row] = []  # to be told to the runner with the next plan
        self._under_way: deque[_UnderWay] = deque()
        self._computing: dict[BlockKey, Sequence] = {}  # prompt blocks that a running sequence has yet to finish
        self._loads = Loads()
        self._unfilled: list[BlockId] = []  # blocks of loads that failed, to be cleared with the next plan
        self._leases = Leases(config.lease, pool)
        self._offers = Offers(config.max_offers, pool)
        self._num_arrivals = 0
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._under_way or self._loads)

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

    def add(self, request: GenerateRequest, num_stored: int = 0) -> None:
        """`num_stored`: leading blocks that tiers have and that are worth loading."""
        total_tokens = request.num_prompt + request.max_new_tokens
        kv_tokens = self._pool.num_blocks * self._config.block_tokens
        max_tokens = self._config.max_tokens
        if max_tokens is not None and total_tokens > max_tokens:
            raise ContextTooLong(
                f"{request.num_prompt} prompt tokens and {request.max_new_tokens} to come are {total_tokens}, "
                f"the model's context is {max_tokens}"
            )
        if total_tokens > kv_tokens:
            raise InvalidRequest(
                f"{request.num_prompt} prompt tokens and {request.max_new_tokens} to come need KV for {total_tokens} tokens, "
                f"the cache holds {kv_tokens}",
                code="kv_too_small",
            )
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request id {request.request_id} is in use", code="duplicate_request_id")
        if not 0 < request.num_prompt <= len(request.token_ids) < total_tokens:
            raise InvalidRequest(
                f"num_prompt {request.num_prompt}, {len(request.token_ids)} tokens known, at most {total_tokens}: nothing to do"
            )
        vocab_size = self._config.vocab_size
        if vocab_size is not None and (largest := max(request.token_ids)) >= vocab_size:
            # Some tokenizers have words that were added after the model was made.
            raise InvalidRequest(f"token id {largest} is not the model's: it has {vocab_size}", code="unknown_token")
        size, root = self._config.block_tokens, root_key(self._config.fingerprint, request.cache_salt)
        keys = block_keys(request.token_ids, root, size)
        seq = Sequence(request, self._num_arrivals, root, size, total_tokens, list(request.token_ids), keys, num_stored)
        if request.lease_id is not None:
            self._leases.open(request.lease_id, seq)
        self._num_arrivals += 1
        self._by_id[request.request_id] = seq
        insort(self._waiting, seq, key=lambda s: s.precedence)
        self.counters.prompt_tokens += request.num_prompt

    def cancel(self, request_id: RequestId) -> TokenChunks:
        chunks = TokenChunks()
        if (seq := self._by_id.get(request_id)) is not None:
            self._end(seq, Finish("cancelled"), chunks)
        return chunks

    def expire(self, now: float) -> TokenChunks:
        """Set the time of this step, and end the sequences whose deadline has passed."""
        self._pool.now_s = now
        late = [s for s in self._by_id.values() if s.request.deadline_s is not None and s.request.deadline_s <= now]
        chunks = TokenChunks()
        for seq in late:
            self._end(seq, Finish("deadline"), chunks)
        return chunks

    # ---- KV from elsewhere and for others

    def loaded(self, result: LoadResult) -> None:
        """What came of a plan's load. Whatever did not come is computed like any other token."""
        loaded = self._loads.end(result)
        seq = loaded.seq
        if seq.state is State.DONE:  # it left meanwhile; nobody writes into its blocks any more
            self._pool.release(seq.blocks)
            seq.blocks = []
            return
        seq.state = State.RUNNING
        seq.num_computed = loaded.num_computed
        seq.pulled_tokens = loaded.pulled_tokens
        self._count_cached(seq, loaded.num_computed - loaded.pulled_tokens)
        self.counters.loaded_tokens += loaded.stored_tokens
        self.counters.pulled_tokens += loaded.pulled_tokens
        self.counters.failed_loads += bool(loaded.unfilled)
        self._unfilled += loaded.unfilled
        self._name_blocks(seq, seq.num_computed)

    def take_leases(self) -> tuple[list[LeasedKv], list[str]]:
        """The KV under lease that is new or still growing, and the leases that came to nothing."""
        return self._leases.take()

    def take_bare_leases(self) -> list[str]:
        """Those whose KV was given up: with the next plan others may write where it was."""
        return self._leases.take_bare()

    def due_leases(self, now: float) -> list[str]:
        return self._leases.due(now)

    def release(self, lease_id: str) -> None:
        """Nobody will pull it any more. Of no effect while its sequence still runs."""
        self._leases.release(lease_id)

    def take_offers(self) -> list[OfferedBlock]:
        return self._offers.take()

    def end_offer(self, blocks: Iterable[BlockId]) -> None:
        """Their bytes have been copied, or nobody wants them."""
        self._offers.end(blocks)

    # ---- a step

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        to_go = [(seq, seq.num_to_compute) for seq in self._running]
        # One token to go comes before a prompt to go: a long prompt must not stop the others' answers.
        answers = [one for one in to_go if one[1] == 1]
        prompts = [one for one in to_go if one[1] > 1]
        draft = Draft(budget=self._budget(len(answers)))
        for seq, num_to_compute in answers + prompts:
            count = num_to_compute if num_to_compute <= draft.budget else draft.budget
            if not count or seq.state is not State.RUNNING:
                continue
            has_room = seq.num_computed + count <= len(seq.blocks) * seq.block_tokens
            if has_room or self._make_room(seq, count, draft):
                draft.give(seq, count)
        for seq in list(self._waiting):
            if not draft.budget:
                break
            if seq.num_drawing:
                continue  # preempted with a step under way: its next token is not known here yet
            if self._waits_for_a_prefix(seq):
                continue
            if not self._admit(seq, draft):
                break
        if not draft.does_something:
            return None
        plan = draft.finish(self._freed_rows, self._unfilled)
        self._freed_rows, self._unfilled = [], []
        self._under_way.append(_UnderWay(plan.spans, list(draft.counts), [seq.run for seq in draft.counts]))
        self.counters.computed_tokens += plan.num_tokens
        return plan

    def _budget(self, num_answers: int) -> int:
        """A step that computes prompts takes long, and every answer waits for it: so those that some wait for are shorter."""
        most, mixed = self._config.step_tokens, self._config.mixed_tokens
        return most if mixed is None or not num_answers else min(most, max(mixed, num_answers + mixed // 4))

    def commit(self, result: StepResult) -> TokenChunks:
        """Take in the oldest launched plan's result."""
        chunks = TokenChunks()
        spans, seqs, runs = self._under_way.popleft()
        for i, (span, seq, run, token_ids) in enumerate(zip(spans, seqs, runs, result.token_ids, strict=True)):
            if seq.run == run:
                if span.start + span.count >= (seq.num_named + 1) * seq.block_tokens:
                    self._name_blocks(seq, span.start + span.count)
            elif seq.state is State.DONE:
                continue
            if i in result.errors:
                self._end(seq, Finish("error", error_code="invalid_grammar", error_message=result.errors[i]), chunks)
            elif span.samples:
                self._take_tokens(seq, token_ids, i, result, chunks)
        self.counters.generated_tokens += sum(map(len, chunks.token_ids))
        return chunks

    def _take_tokens(
        self, seq: Sequence, token_ids: list[int], i: int, result: StepResult, chunks: TokenChunks
    ) -> None:
        """Drawn by span `i`."""
        seq.num_drawing -= 1
        request = seq.request
        is_first = len(seq.token_ids) == len(request.token_ids)
        seq.token_ids += token_ids
        finish, ticket = _finish_of(seq, i in result.grammar_done), None
        if finish is not None:
            if request.lease_id is not None and (finish.reason == "handoff" or request.max_new_tokens == 1):
                ticket = self._leases.keep(request.lease_id, seq)
            self._leave(seq)
        usage = seq.usage if is_first or finish is not None else None
        chunks.add(request.request_id, token_ids, usage, result.logprobs.get(i), finish, ticket)

    # ---- who gets rows and blocks

    def _make_room(self, seq: Sequence, count: int, draft: Draft) -> bool:
        """Blocks for `count` more tokens of a running sequence; the last comers give way, at worst itself."""
        missing = seq.num_blocks_for(seq.num_computed + count) - len(seq.blocks)
        while self._pool.num_free < missing:
            victim = next(other for other in reversed(self._running) if other.state is State.RUNNING)
            self._preempt(victim, draft)
            if victim is seq:
                return False
        blocks = self._take(missing, draft)
        draft.changes[seq] = BlockTableChange(seq.running_row, len(seq.blocks), blocks)
        seq.blocks += blocks
        return True

    def _take(self, count: int, draft: Draft) -> list[BlockId]:
        blocks = self._pool.take(count)
        draft.fresh_blocks += blocks
        return blocks

    def _waits_for_a_prefix(self, seq: Sequence) -> bool:
        """Somebody is computing this very block right now: waiting for it is cheaper than doing it again."""
        matched = self._match(seq)
        return len(matched) < seq.num_reusable and seq.keys[len(matched)] in self._computing

    def _admit(self, seq: Sequence, draft: Draft) -> bool:
        """From waiting to running, or to loading, if there is a row and blocks for all that it knows."""
        matched = self._match(seq)
        missing = seq.num_blocks_for(len(seq.token_ids) + 1) - len(matched)
        if not self._clear_the_way(seq, matched, missing, draft):
            return False
        self._pool.hold_found(matched)
        found_tokens = len(matched) * seq.block_tokens
        loadable = loadable_tokens(seq)
        partial = self._match_partial(seq, len(matched)) if loadable <= found_tokens else None
        seq.num_computed = found_tokens
        seq.num_named = len(matched)
        seq.blocks = matched + self._take(missing, draft)
        if partial is not None:
            src, count = partial
            draft.copies.append(BlockCopy(src, seq.blocks[len(matched)]))
            seq.num_computed += count
            self.counters.partial_tokens += count
        self._waiting.remove(seq)
        insort(self._running, seq, key=lambda s: s.precedence)
        seq.run += 1
        seq.row = self._free_rows.pop()
        for key in seq.keys[len(matched) :]:
            self._computing.setdefault(key, seq)
        draft.place(seq)
        if loadable > found_tokens:
            seq.state = State.LOADING
            draft.loads.append(self._loads.begin(seq, len(matched), loadable))
        else:
            seq.state = State.RUNNING
            self._count_cached(seq, found_tokens)
            draft.give(seq, min(seq.num_to_compute, draft.budget))
        return True

    def _clear_the_way(self, seq: Sequence, matched: list[BlockId], missing: int, draft: Draft) -> bool:
        """A row, and `missing` blocks beside those that match. Whoever runs at a worse priority can give way; nobody does if
        that would still not be enough."""
        lesser = [
            other
            for other in self._running
            if other.request.priority > seq.request.priority and other.state is State.RUNNING
        ]
        if not self._free_rows and not lesser:
            return False
        if self._pool.num_free_after(matched) + sum(len(other.blocks) for other in lesser) < missing:
            return False
        while lesser and (not self._free_rows or self._pool.num_free_after(matched) < missing):
            self._preempt(lesser.pop(), draft)
        # Still too few, if what gave way shared its blocks with somebody.
        return self._pool.num_free_after(matched) >= missing

    def _count_cached(self, seq: Sequence, num_tokens: int) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(num_tokens, seq.request.num_prompt)
            self.counters.cached_tokens += seq.cached_tokens

    def _match(self, seq: Sequence) -> list[BlockId]:
        seq.extend_keys()
        return self._pool.match(seq.keys[: seq.num_reusable])

    def _match_partial(self, seq: Sequence, num_matched: int) -> tuple[BlockId, int] | None:
        """In the block after those: the last known token is computed anew, here too."""
        start = num_matched * seq.block_tokens
        end = min(start + seq.block_tokens, len(seq.token_ids) - 1)
        return self._pool.match_partial(seq.parent_of(num_matched), seq.token_ids[start:end])

    def _name_blocks(self, seq: Sequence, num_computed: int) -> None:
        seq.extend_keys()
        for i in range(seq.num_named, num_computed // seq.block_tokens):
            salt = None if i else seq.request.cache_salt
            self._pool.name(seq.blocks[i], seq.keys[i], seq.parent_of(i), seq.tokens_of(i), salt)
            self._stop_computing(seq, seq.keys[i])
            seq.num_named = i + 1
            self._offers.add(seq, i)

    def _stop_computing(self, seq: Sequence, key: BlockKey) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]

    def _preempt(self, seq: Sequence, draft: Draft) -> None:
        """Back to waiting; what it computed stays findable until somebody needs the blocks."""
        draft.withdraw(seq)
        self._give_back(seq)
        seq.state = State.WAITING
        seq.num_computed = 0
        insort(self._waiting, seq, key=lambda s: s.precedence)
        self.counters.preemptions += 1

    def _end(self, seq: Sequence, finish: Finish, chunks: TokenChunks) -> None:
        self._leave(seq)
        chunks.add(seq.request.request_id, [], seq.usage, None, finish)

    def _leave(self, seq: Sequence) -> None:
        if seq.state is State.WAITING:
            self._waiting.remove(seq)
        else:
            self._give_back(seq)
        seq.state = State.DONE
        del self._by_id[seq.request.request_id]
        if seq.request.lease_id is not None:
            self._leases.left(seq.request.lease_id)

    def _give_back(self, seq: Sequence) -> None:
        self._running.remove(seq)
        for key in seq.keys[seq.num_named :]:
            self._stop_computing(seq, key)
        if seq.request.lease_id is not None:
            self._leases.gave_back(seq.request.lease_id)
        if seq.state is not State.LOADING:  # somebody still writes into those: `loaded` gives them back
            self._pool.release(seq.blocks)
            seq.blocks = []
        self._free_rows.append(seq.running_row)
        self._freed_rows.append(seq.running_row)
        seq.row = None
        seq.run += 1


def _finish_of(seq: Sequence, grammar_done: bool) -> Finish | None:
    request, last = seq.request, seq.token_ids[-1]
    if last in request.sampling.stop_token_ids:
        return Finish("stop", stop_token_id=last)
    if grammar_done:
        return Finish("stop")
    if len(seq.token_ids) >= seq.most_tokens:
        return Finish("length")
    return Finish("handoff") if request.lease_id is not None else None
