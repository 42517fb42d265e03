"""Scheduler: which tokens run in the next step, and what to make of what they brought.

Pure: no device, no I/O; time is an argument. Plans may be made ahead of results: what a step under way will draw is
counted (`num_drawing`), never guessed. The device carries plans out in order, so that a block given back and taken again
is overwritten after its last use, whoever still had a step under way in it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stoker.base.errors import InvalidRequest
from stoker.base.ids import BlockId, BlockKey, RequestId, Row
from stoker.kv.keys import block_keys, next_key, root_key, salt_hash
from stoker.kv.pool import BlockPool
from stoker.kv.transfer import BlockName, KvLoad, LoadResult, OfferedBlock
from stoker.sched.held import HeldBlocks, LeasedKv, LeaseTerms
from stoker.sched.plan import (
    ON_DEVICE,
    BlockCopy,
    BlockTableChange,
    NewRow,
    Span,
    SpanResult,
    StepPlan,
    StepResult,
)
from stoker.sched.request import Finish, GenerateRequest, TokenChunk
from stoker.sched.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_tokens: int
    step_tokens: int  # tokens computed in one step, over all sequences
    max_rows: int  # sequences that run at a time
    fingerprint: str = ""  # model, tokenizer, layout and dtype: the root of all block keys
    lease: LeaseTerms | None = None  # None: no KV is kept for others
    max_offers: int = 0  # blocks that may be on their way into the store at a time


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
    unoffered_blocks: int = 0  # too many were under way: the store never saw them


@dataclass(slots=True)
class _Draft:
    """A plan being written. Kept by sequence, so that one preempted on the way leaves nothing behind."""

    budget: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    changes: dict[Sequence, BlockTableChange] = field(default_factory=dict)
    new_rows: list[NewRow] = field(default_factory=list)
    fresh_blocks: list[BlockId] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    loads: list[KvLoad] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Loading:
    seq: Sequence
    load: KvLoad
    end: int  # tokens that are computed once all of it is there


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A span of a launched plan: whose it is, and how far it computes. `run` tells whether `seq` was preempted since."""

    seq: Sequence
    run: int
    end: int


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._by_id: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []  # by precedence
        self._running: list[Sequence] = []  # by precedence
        self._free_rows = [Row(row) for row in reversed(range(config.max_rows))]
        self._freed_rows: list[Row] = []  # to be told to the runner with the next plan
        self._under_way: deque[list[_UnderWay]] = deque()
        self._computing: dict[BlockKey, Sequence] = {}  # prompt blocks that a running sequence has yet to finish
        self._loading: dict[int, _Loading] = {}
        self._unfilled: list[BlockId] = []  # blocks of loads that failed, to be cleared with the next plan
        self._leased: dict[str, Sequence] = {}  # sequences whose KV may be pulled while they run
        self._completed: list[LeasedKv] = []  # leases whose sequence came to its end since they were last asked for
        self._broken: list[str] = []  # leases whose sequence ended otherwise
        self._held = HeldBlocks(config.lease.lease_s if config.lease else 0.0)
        self._offers: list[OfferedBlock] = []
        self._num_offered = 0
        self._arrivals = 0
        self._num_loads = 0
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self._by_id or self._under_way or self._loading)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_held(self) -> int:
        return len(self._held)

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
        root = root_key(self._config.fingerprint, request.cache_salt)
        seq = Sequence(request=request, arrival=self._arrivals, root=root, token_ids=list(request.token_ids))
        seq.keys = block_keys(seq.token_ids, root, self._config.block_tokens)
        seq.num_stored = num_stored
        if request.lease_id is not None:
            self._check_lease(request.lease_id)
            self._leased[request.lease_id] = seq
        self._arrivals += 1
        self._by_id[request.request_id] = seq
        insort(self._waiting, seq, key=lambda s: s.precedence)
        self.counters.prompt_tokens += request.num_prompt

    def cancel(self, request_id: RequestId) -> list[TokenChunk]:
        seq = self._by_id.get(request_id)
        return [] if seq is None else [self._end(seq, Finish("cancelled"))]

    def expire(self, now: float) -> list[TokenChunk]:
        late = [s for s in self._by_id.values() if s.request.deadline_s is not None and s.request.deadline_s <= now]
        return [self._end(seq, Finish("deadline")) for seq in late]

    # ---- KV from elsewhere and for others

    def loaded(self, result: LoadResult) -> None:
        """What came of a plan's load. Whatever did not come is computed like any other token."""
        loading = self._loading.pop(result.load_id)
        seq, load, size = loading.seq, loading.load, self._config.block_tokens
        if seq.state is State.DONE:  # it left meanwhile; nobody writes into its blocks any more
            self._pool.release(seq.blocks)
            seq.blocks = []
            return
        seq.state = State.RUNNING
        seq.num_computed = max(seq.num_computed, min((load.first + result.num_loaded) * size, loading.end))
        loaded_tokens = seq.num_computed - load.first * size
        seq.pulled_tokens = min(result.num_pulled * size, loaded_tokens)
        self._count_cached(seq, load.first * size + loaded_tokens - seq.pulled_tokens)
        self.counters.loaded_tokens += loaded_tokens - seq.pulled_tokens
        self.counters.pulled_tokens += seq.pulled_tokens
        self.counters.failed_loads += result.num_loaded < len(load.blocks)
        self._unfilled += load.blocks[result.num_loaded :]
        self._name_blocks(seq, seq.num_computed)

    def take_leases(self) -> tuple[list[LeasedKv], list[str]]:
        """The KV under lease that is new or still growing, and the leases that came to nothing."""
        if not (self._leased or self._completed or self._broken):
            return [], []
        told = [self._leased_kv(lease_id, seq) for lease_id, seq in self._leased.items()] + self._completed
        broken, self._completed, self._broken = self._broken, [], []
        return told, broken

    def due_leases(self, now: float) -> list[str]:
        return self._held.due(now)

    def release(self, lease_id: str) -> None:
        """Nobody will pull it any more. Of no effect while its sequence still runs."""
        self._pool.release(self._held.take(lease_id))

    def take_offers(self) -> list[OfferedBlock]:
        offers, self._offers = self._offers, []
        return offers

    def end_offer(self, blocks: Iterable[BlockId]) -> None:
        """Their bytes have been copied, or nobody wants them."""
        ended = list(blocks)
        self._num_offered -= len(ended)
        self._pool.release(ended)

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        draft = _Draft(budget=self._config.step_tokens)
        # One token to go comes before a prompt to go: a long prompt must not stop the others' answers.
        for seq in sorted(self._running, key=lambda s: (s.num_to_compute > 1, s.precedence)):
            count = min(seq.num_to_compute, draft.budget)
            if count and seq.state is State.RUNNING and self._make_room(seq, count, draft):
                self._give(seq, count, draft)
        for seq in list(self._waiting):
            if not draft.budget:
                break
            if seq.num_drawing:
                continue  # preempted with a step under way: its next token is not known here yet
            if self._waits_for_a_prefix(seq):
                continue
            if not self._admit(seq, draft):
                break
        return self._finish_plan(draft)

    def commit(self, result: StepResult) -> list[TokenChunk]:
        """Take in the oldest launched plan's result."""
        chunks = []
        for span, outcome in zip(self._under_way.popleft(), result.spans, strict=True):
            seq = span.seq
            if seq.state is State.DONE:
                continue
            if seq.run == span.run and seq.state is State.RUNNING:
                self._name_blocks(seq, span.end)
            if outcome is not None:
                chunks.append(self._take_tokens(seq, outcome))
        return chunks

    def _take_tokens(self, seq: Sequence, outcome: SpanResult) -> TokenChunk:
        seq.num_drawing -= 1
        if outcome.error is not None:
            return self._end(seq, Finish("error", error_code="invalid_grammar", error_message=outcome.error))
        seq.token_ids.extend(outcome.token_ids)
        self.counters.generated_tokens += len(outcome.token_ids)
        last = seq.token_ids[-1]
        finish = None
        if last in seq.request.sampling.stop_token_ids:
            finish = Finish("stop", stop_token_id=last)
        elif outcome.grammar_done:
            finish = Finish("stop")
        elif len(seq.token_ids) - seq.request.num_prompt >= seq.request.max_new_tokens:
            finish = Finish("length")
        lease_id, ticket = seq.request.lease_id, None
        if lease_id is not None and self._config.lease is not None:
            finish = finish or Finish("handoff")
            if finish.reason == "handoff" or seq.request.max_new_tokens == 1:
                # The token just drawn has no KV yet: whoever goes on computes it.
                ticket = self._config.lease.ticket(lease_id, len(seq.token_ids) - 1)
                if (
                    seq.state is State.RUNNING
                ):  # else it was preempted with its last step under way: nothing is left to keep
                    self._hold(seq, lease_id, ticket.num_tokens)
        if finish is not None:
            self._leave(seq)
        return TokenChunk(seq.request.request_id, outcome.token_ids, seq.usage, outcome.logprobs, finish, ticket)

    def _check_lease(self, lease_id: str) -> None:
        if self._config.lease is None:
            raise InvalidRequest("this engine keeps no KV for others", code="no_handoff")
        if lease_id in self._leased or lease_id in self._held:
            raise InvalidRequest(f"lease {lease_id} is in use", code="duplicate_lease")

    def _hold(self, seq: Sequence, lease_id: str, num_tokens: int) -> None:
        """The blocks outlive the sequence; those beyond its KV do not."""
        kept = seq.blocks[: self._blocks_for(num_tokens)]
        self._pool.hold(kept)
        self._held.hold(lease_id, kept)
        seq.state = State.HELD
        del self._leased[lease_id]
        self._completed.append(self._leased_kv(lease_id, seq))

    def _leased_kv(self, lease_id: str, seq: Sequence) -> LeasedKv:
        size, num_full = self._config.block_tokens, min(seq.num_named, len(seq.blocks))
        keys, blocks = seq.keys[:num_full], seq.blocks[:num_full]
        names = [self._block_name(seq, i) for i in range(num_full)]
        if seq.state is not State.HELD:
            return LeasedKv(lease_id, keys, blocks, names, len(blocks), complete=False)
        tail = seq.token_ids[num_full * size : -1]
        if tail:
            parent = keys[-1] if keys else seq.root
            keys, blocks = [*keys, next_key(parent, tail)], seq.blocks[: num_full + 1]
        return LeasedKv(lease_id, keys, blocks, names, len(blocks), complete=True)

    def _make_room(self, seq: Sequence, count: int, draft: _Draft) -> bool:
        """Blocks for `count` more tokens of a running sequence; the last comers give way, at worst itself."""
        missing = self._blocks_for(seq.num_computed + count) - len(seq.blocks)
        while self._pool.num_free < missing:
            victim = next(other for other in reversed(self._running) if other.state is State.RUNNING)
            self._preempt(victim, draft)
            if victim is seq:
                return False
        if missing > 0:
            blocks = self._take(missing, draft)
            draft.changes[seq] = BlockTableChange(self._row(seq), len(seq.blocks), blocks)
            seq.blocks += blocks
        return True

    def _take(self, count: int, draft: _Draft) -> list[BlockId]:
        blocks = self._pool.take(count)
        draft.fresh_blocks += blocks
        return blocks

    def _waits_for_a_prefix(self, seq: Sequence) -> bool:
        """Somebody is computing this very block right now: waiting for it is cheaper than doing it again."""
        matched = self._match(seq)
        return len(matched) < self._max_match(seq) and seq.keys[len(matched)] in self._computing

    def _admit(self, seq: Sequence, draft: _Draft) -> bool:
        matched = self._match(seq)
        num_matched = len(matched)
        num_blocks = self._blocks_for(len(seq.token_ids) + 1)
        missing = num_blocks - num_matched
        # Whoever runs at a worse priority can give way; nobody does if that would still not be enough.
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
        if self._pool.num_free_after(matched) < missing:
            return False  # what gave way shared its blocks with somebody
        self._pool.hold(matched)
        seq.num_computed = num_matched * self._config.block_tokens
        loadable = self._loadable_tokens(seq)
        loads = loadable > seq.num_computed
        partial = None if loads else self._match_partial(seq, num_matched)
        blocks = matched + self._take(missing, draft)
        if partial is not None:
            src, count = partial
            draft.copies.append(BlockCopy(src, blocks[num_matched]))
            seq.num_computed += count
            self.counters.partial_tokens += count
        self._waiting.remove(seq)
        insort(self._running, seq, key=lambda s: s.precedence)
        seq.run += 1
        seq.row = self._free_rows.pop()
        seq.blocks = blocks
        seq.num_named = num_matched
        for key in seq.keys[num_matched:]:
            self._computing.setdefault(key, seq)
        draft.new_rows.append(
            NewRow(
                seq.row,
                seq.request.sampling,
                list(seq.token_ids),
                seq.request.num_prompt,
                seq.request.max_new_tokens,
            )
        )
        draft.changes[seq] = BlockTableChange(seq.row, 0, list(blocks))
        if loads:
            self._begin_load(seq, num_matched, loadable, draft)
            return True
        seq.state = State.RUNNING
        self._count_cached(seq, num_matched * self._config.block_tokens)
        self._give(seq, min(seq.num_to_compute, draft.budget), draft)
        return True

    def _count_cached(self, seq: Sequence, num_tokens: int) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(num_tokens, seq.request.num_prompt)
            self.counters.cached_tokens += seq.cached_tokens

    def _loadable_tokens(self, seq: Sequence) -> int:
        """Tokens whose KV can be had elsewhere. It is asked for once: whatever failed to come is computed."""
        if seq.run:
            return 0
        stored = min(seq.num_stored, self._max_match(seq)) * self._config.block_tokens
        ticket = seq.request.ticket
        if ticket is None or not 0 < ticket.num_tokens <= len(seq.request.token_ids):
            return stored
        return max(stored, min(ticket.num_tokens, len(seq.token_ids) - 1))

    def _begin_load(self, seq: Sequence, first: int, end: int, draft: _Draft) -> None:
        size, num_blocks = self._config.block_tokens, self._blocks_for(end)
        num_stored = max(0, min(seq.num_stored, self._max_match(seq)) - first)
        ticket = seq.request.ticket if first + num_stored < num_blocks else None
        keys = seq.keys[:num_blocks]
        if ticket is not None and ticket.num_tokens < num_blocks * size:
            # The last block is unfilled there, and named by what it holds.
            start = (num_blocks - 1) * size
            parent = keys[num_blocks - 2] if start else seq.root
            keys = [*keys[: num_blocks - 1], next_key(parent, seq.token_ids[start : ticket.num_tokens])]
        blocks = seq.blocks[first:num_blocks]
        load = KvLoad(self._num_loads, first, keys[first:], blocks, num_stored, ticket)
        self._num_loads += 1
        self._loading[load.load_id] = _Loading(seq, load, end)
        seq.state = State.LOADING
        draft.loads.append(load)

    def _max_match(self, seq: Sequence) -> int:
        # The last known token is always computed anew: its logits are what we sample from.
        return (len(seq.token_ids) - 1) // self._config.block_tokens

    def _match(self, seq: Sequence) -> list[BlockId]:
        self._extend_keys(seq)
        return self._pool.match(seq.keys[: self._max_match(seq)])

    def _match_partial(self, seq: Sequence, num_matched: int) -> tuple[BlockId, int] | None:
        parent = seq.keys[num_matched - 1] if num_matched else seq.root
        start = num_matched * self._config.block_tokens
        end = min(start + self._config.block_tokens, len(seq.token_ids) - 1)
        return self._pool.match_partial(parent, seq.token_ids[start:end])

    def _give(self, seq: Sequence, count: int, draft: _Draft) -> None:
        draft.counts[seq] = count
        draft.budget -= count

    def _finish_plan(self, draft: _Draft) -> StepPlan | None:
        if not draft.counts and not draft.loads:
            return None
        spans, token_ids = [], []
        for seq, count in draft.counts.items():
            start = seq.num_computed
            known = seq.token_ids[start : start + count]
            token_ids += known
            token_ids += [ON_DEVICE] * (count - len(known))
            seq.num_computed += count
            samples = seq.num_computed == seq.num_known
            if samples:
                seq.num_drawing += 1
            spans.append(Span(self._row(seq), start, count, samples))
            self.counters.computed_tokens += count
        freed_rows, self._freed_rows = self._freed_rows, []
        filled = {copy.dst for copy in draft.copies} | {block for load in draft.loads for block in load.blocks}
        unfilled, self._unfilled = self._unfilled, []
        self._under_way.append([_UnderWay(seq, seq.run, seq.num_computed) for seq in draft.counts])
        return StepPlan(
            spans,
            token_ids,
            freed_rows,
            draft.new_rows,
            list(draft.changes.values()),
            draft.copies,
            [block for block in draft.fresh_blocks + unfilled if block not in filled],
            draft.loads,
        )

    def _name_blocks(self, seq: Sequence, num_computed: int) -> None:
        self._extend_keys(seq)
        size = self._config.block_tokens
        for i in range(seq.num_named, num_computed // size):
            parent = seq.keys[i - 1] if i else seq.root
            salt = None if i else seq.request.cache_salt
            self._pool.name(seq.blocks[i], seq.keys[i], parent, seq.token_ids[i * size : (i + 1) * size], salt)
            self._stop_computing(seq, seq.keys[i])
            seq.num_named = i + 1
            self._offer(seq, i)

    def _offer(self, seq: Sequence, i: int) -> None:
        if not self._config.max_offers:
            return
        if self._num_offered >= self._config.max_offers:
            self.counters.unoffered_blocks += 1
            return
        self._num_offered += 1
        self._pool.hold([seq.blocks[i]])
        self._offers.append(OfferedBlock(self._block_name(seq, i), seq.blocks[i]))

    def _block_name(self, seq: Sequence, i: int) -> BlockName:
        size = self._config.block_tokens
        parent, salt = (seq.keys[i - 1], None) if i else (seq.root, salt_hash(seq.request.cache_salt) or "")
        return BlockName(seq.keys[i], parent, tuple(seq.token_ids[i * size : (i + 1) * size]), salt)

    def _extend_keys(self, seq: Sequence) -> None:
        """Keys for the blocks that filled up since: all but the prompt's first ones come one at a time."""
        size = self._config.block_tokens
        for i in range(len(seq.keys), len(seq.token_ids) // size):
            parent = seq.keys[i - 1] if i else seq.root
            seq.keys.append(next_key(parent, seq.token_ids[i * size : (i + 1) * size]))

    def _stop_computing(self, seq: Sequence, key: BlockKey) -> None:
        if self._computing.get(key) is seq:
            del self._computing[key]

    def _preempt(self, seq: Sequence, draft: _Draft) -> None:
        """Back to waiting; what it computed stays findable until somebody needs the blocks."""
        draft.budget += draft.counts.pop(seq, 0)
        draft.changes.pop(seq, None)
        self._give_back(seq)
        seq.state = State.WAITING
        seq.num_computed = 0
        insort(self._waiting, seq, key=lambda s: s.precedence)
        self.counters.preemptions += 1

    def _end(self, seq: Sequence, finish: Finish) -> TokenChunk:
        self._leave(seq)
        return TokenChunk(seq.request.request_id, [], seq.usage, None, finish)

    def _leave(self, seq: Sequence) -> None:
        if seq.state is State.WAITING:
            self._waiting.remove(seq)
        else:
            self._give_back(seq)
        seq.state = State.DONE
        del self._by_id[seq.request.request_id]
        lease_id = seq.request.lease_id
        if lease_id is not None and self._leased.pop(lease_id, None) is not None:
            self._broken.append(lease_id)

    def _give_back(self, seq: Sequence) -> None:
        self._running.remove(seq)
        for key in seq.keys[seq.num_named :]:
            self._stop_computing(seq, key)
        if seq.state is not State.LOADING:  # somebody still writes into those: `loaded` gives them back
            self._pool.release(seq.blocks)
            seq.blocks = []
        row = self._row(seq)
        self._free_rows.append(row)
        self._freed_rows.append(row)
        seq.row = None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_tokens)

    @staticmethod
    def _row(seq: Sequence) -> Row:
        assert seq.row is not None, f"{seq.request.request_id} has no row"
        return seq.row
