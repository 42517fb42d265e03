"""A fake device and model for the scheduler. The next token is a function of the whole prefix as it is stored in KV."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from stoker.base.ids import BlockId, RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.reach import KvReach
from stoker.sched.draft_tape import MAX_DRAFTS, TAPE_TOKENS, DraftTape
from stoker.sched.drafting import NoDrafting
from stoker.sched.plan import ON_DEVICE, Span, StepPlan, StepResult, TapeUpload
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.sequence import Sequence
from stoker.sched.step_costs import StepCosts

VOCAB = 50


def next_token(token_ids: list[int], seed: int) -> int:
    value = seed
    for token in token_ids:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value % VOCAB


Slot = tuple[int, int, int]  # KV set, block, place in the block


class FakeDevice:
    """Executes plans on 'KV' that is the tokens themselves, so that a wrong block, slot or order gives a wrong token.

    What the layers of a KV set with a bounded reach see must be the tokens that the first set has at the same positions.
    """

    def __init__(self, num_blocks: int, block_tokens: int, max_rows: int, local: Iterable[BlockPool] = ()) -> None:
        """`local` are the pools of the KV sets with a bounded reach, after the first set."""
        self._block_tokens = block_tokens
        self._local = list(local)
        sizes = [num_blocks, *(pool.num_blocks for pool in self._local)]
        self._kv: list[list[list[int | None]]] = [[[None] * block_tokens for _ in range(size)] for size in sizes]
        self._tables: dict[int, list[dict[int, int]]] = {}  # by row: the blocks of each set by their number
        self._seeds: dict[int, int] = {}
        self._known: dict[int, list[int]] = {}
        self._limits: dict[int, int] = {}
        self._tapes: dict[int, TapeUpload] = {}
        self._rejected: set[Slot] = set()  # slots that hold a rejected draft of their owner
        self._filled: set[tuple[int, int]] = set()  # sets and blocks filled by copies or loads, and not cleared since
        self._max_rows = max_rows

    def interrupt(self, plan: StepPlan, rng: random.Random) -> StepResult:
        """Execute a part of a plan: its changes of rows and blocks, and wrong KV in some of the slots that it writes."""
        assert plan.is_interruptible
        self.run(replace(plan, spans=[], token_ids=[]))
        for span in plan.spans:
            for kv_set, table in enumerate(self._tables[span.row]):
                for position in range(span.start, span.start + rng.randint(0, span.count)):
                    number, place = divmod(position, self._block_tokens)
                    if number in table:  # there may be no room for the last drafts
                        self._kv[kv_set][table[number]][place] = -1
        return StepResult([[] for _ in plan.spans], 0.0, is_interrupted=True)

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            self._tables.pop(row)
        for new in plan.new_rows:
            assert new.row not in self._tables
            assert new.row < self._max_rows
            self._tables[new.row] = [{} for _ in self._kv]
            self._seeds[new.row] = new.sampling.seed
            self._known[new.row] = list(new.token_ids)
            self._limits[new.row] = new.max_tokens
            self._tapes.pop(new.row, None)
        for tape in plan.tapes:
            assert len(tape.token_ids) <= TAPE_TOKENS
            self._tapes[tape.row] = tape
        for change in plan.block_table_changes:
            self._tables[change.row][change.kv_set].update(enumerate(change.blocks, change.first))
        for copy in plan.copies:
            self.fill(copy.dst, self._kv[copy.kv_set][copy.src], copy.kv_set)
        for kv_set, fresh in enumerate(plan.fresh_blocks):
            for block in fresh:
                self.fill(block, [None] * self._block_tokens, kv_set)
                self._filled.discard((kv_set, block))
        at = 0
        writes: list[Slot] = []
        result: list[list[int]] = []
        for span in plan.spans:
            token_ids = plan.token_ids[at : at + span.count]
            at += span.count
            result.append(self._run_span(span, token_ids, writes))
        assert len(set(writes)) == len(writes), "two spans wrote to the same slot"
        return StepResult(result, 0.0)

    def _run_span(self, span: Span, token_ids: list[int], writes: list[Slot]) -> list[int]:
        known, limit = self._known[span.row], self._limits[span.row]
        count = span.count - span.num_drafts
        start = span.start
        if token_ids[0] == ON_DEVICE:
            start = len(known) - 1
            token_ids[0] = known[-1]
        assert span.start - span.slack <= start <= span.start, "the device knows another position"
        assert token_ids[count:] == [ON_DEVICE - 1 - j for j in range(span.num_drafts)]
        drafts = self._drafts(span.row, len(known), min(span.num_drafts, limit - 1 - len(known)))
        if start >= limit - 1:  # all tokens were sampled already: nothing to compute
            assert span.slack
            return [0]
        for kv_set, table in enumerate(self._tables[span.row]):
            if kv_set:  # what the first of the tokens sees
                first = self._local[kv_set - 1].reach.first_block(start, self._block_tokens)
                last = (start + count + len(drafts) - 1) // self._block_tokens
                self._check_held(kv_set, {table[i] for i in range(first, last + 1)})
            for position, token in enumerate(token_ids[:count] + drafts, start):
                slot = (kv_set, table[position // self._block_tokens], position % self._block_tokens)
                writes.append(slot)
                self._kv[kv_set][slot[1]][slot[2]] = token
                self._rejected.discard(slot)
            _, block, last = writes[-1]
            places = [(kv_set, block, i) for i in range(last + 1, self._block_tokens)]
            rest = [self._kv[kv_set][block][place[2]] for place in places if place not in self._rejected]
            is_clean = (kv_set, block) in self._filled or rest == [None] * len(rest)
            assert is_clean, "the tokens of an earlier owner can be read"
        if not span.samples:
            return []
        assert start + count == len(known)
        sampled = [self._sample(span.row, len(known))]
        while len(sampled) <= len(drafts) and drafts[len(sampled) - 1] == sampled[-1]:
            sampled.append(self._sample(span.row, len(known) + len(sampled)))
        for position in range(len(known) + len(sampled) - 1, len(known) + len(drafts)):
            number, place = divmod(position, self._block_tokens)
            self._rejected.update((i, table[number], place) for i, table in enumerate(self._tables[span.row]))
        known += sampled
        return sampled

    def _drafts(self, row: int, length: int, max_drafts: int) -> list[int]:
        """Return the tape's guesses for the positions from `length` on, if the tape agrees with the known tokens."""
        tape = self._tapes.get(row)
        if tape is None or not tape.start <= length < tape.start + len(tape.token_ids):
            return []
        known = self._known[row][tape.start :]
        if any(guess >= 0 and guess != token for guess, token in zip(tape.token_ids, known, strict=False)):
            return []
        guesses = tape.token_ids[length - tape.start :][: max(0, max_drafts)]
        return [guess if guess >= 0 else ~guess for guess in guesses]

    def _check_held(self, kv_set: int, blocks: set[int]) -> None:
        """Assert that no block has gone back to its pool, where another sequence may take it at any time."""
        pool = self._local[kv_set - 1]
        assert pool.num_free_after(map(BlockId, blocks)) == pool.num_free, f"{pool.reach}: reads a released block"

    def read(self, block: int, kv_set: int = 0) -> list[int | None]:
        return list(self._kv[kv_set][block])

    def fill(self, block: int, tokens: list[int | None], kv_set: int = 0) -> None:
        self._kv[kv_set][block] = list(tokens)
        self._rejected -= {(kv_set, block, i) for i in range(self._block_tokens)}
        self._filled.add((kv_set, block))

    def _sample(self, row: int, length: int) -> int:
        tables, size = self._tables[row], self._block_tokens

        def tokens(kv_set: int, first: int) -> list[int | None]:
            table = tables[kv_set]
            if kv_set:
                self._check_held(kv_set, {table[i // size] for i in range(first, length)})
            return [self._kv[kv_set][table[i // size]][i % size] for i in range(first, length)]

        prefix = tokens(0, 0)
        assert None not in prefix
        for kv_set, pool in enumerate(self._local, 1):
            first = pool.reach.first_visible(length - 1)
            assert tokens(kv_set, first) == prefix[first:], f"{pool.reach} at {length}: {tokens(kv_set, first)}"
        return next_token(prefix, self._seeds[row])  # type: ignore[arg-type]


class RandomDrafting(NoDrafting):
    """Drafts the right tokens, except for random errors, as often and as many as the random numbers say."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._error_rate = rng.choice([0.0, 0.2, 1.0])
        self._rate = rng.choice([0.2, 0.8, 1.0])

    def plan(self, seqs: list[Sequence], budget: int, costs: StepCosts) -> dict[Sequence, int]:
        rng = self._rng
        wanted = {seq: rng.randint(1, MAX_DRAFTS) for seq in seqs if rng.random() < self._rate}
        for seq in wanted:
            if seq.tape is None or rng.random() < 0.5:
                seq.tape = self._tape(seq)
        return wanted

    def _tape(self, seq: Sequence) -> DraftTape:
        rng = self._rng
        start = max(0, len(seq.token_ids) - rng.randint(0, 3))
        token_ids = seq.token_ids[start:]
        known = list(seq.token_ids)
        for _ in range(rng.randint(0, TAPE_TOKENS - len(token_ids))):
            known.append(next_token(known, seq.request.sampling.seed))
            wrong = rng.random() < self._error_rate
            token_ids.append(rng.choice([rng.randrange(VOCAB), ~rng.randrange(VOCAB)]) if wrong else known[-1])
        return DraftTape(start, token_ids, "random")


def lone_run(request: GenerateRequest) -> list[int]:
    token_ids = list(request.token_ids)
    while len(token_ids) - request.num_prompt < request.max_new_tokens:
        token_ids.append(next_token(token_ids, request.sampling.seed))
        if token_ids[-1] in request.sampling.stop_token_ids:
            break
    return token_ids[len(request.token_ids) :]


def random_request(rng: random.Random, number: int, kv_tokens: int, shared: list[int]) -> GenerateRequest:
    num_prompt = rng.randint(1, max(1, min(60, kv_tokens - 2)))
    head = shared[: rng.randint(0, num_prompt)] if rng.random() < 0.7 else []
    token_ids = head + [rng.randrange(VOCAB) for _ in range(num_prompt - len(head))]
    max_new = rng.randint(1, min(25, kv_tokens - num_prompt))
    resumed = [rng.randrange(VOCAB) for _ in range(rng.randint(0, max_new - 1))] if rng.random() < 0.2 else []
    return GenerateRequest(
        request_id=RequestId(f"r{number}"),
        token_ids=token_ids + resumed,
        num_prompt=num_prompt,
        # The fake model's answer depends on the seed. Equal prompts share KV, whatever their seed, and must still be right.
        sampling=SamplingParams(seed=rng.randrange(3), stop_token_ids=tuple(rng.sample(range(VOCAB), 2))),
        max_new_tokens=max_new,
        cache_salt=rng.choice(["", "", "tenant"]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        deadline_s=None if rng.random() < 0.9 else rng.uniform(0, 200),
        tenant=rng.choice(["", "", "a", "b"]),
        tenant_weight=rng.choice([0.5, 1.0, 1.0, 4.0]),
    )


def random_reaches(rng: random.Random) -> list[KvReach]:
    """Return the reaches of up to three KV sets with a bounded reach."""
    kinds = rng.sample(["window", "chunk", "window"], rng.randint(1, 3))
    return [KvReach(kind, rng.choice([1, 2, 3, 5, 8, 16, 33])) for kind in kinds]


def random_pools(rng: random.Random, reaches: list[KvReach], block_tokens: int, num_blocks: int) -> list[BlockPool]:
    """Return a pool for each reach, from the smallest size on."""
    pools = []
    for reach in reaches:
        least = reach.min_pool_blocks(block_tokens)
        pools.append(BlockPool(rng.choice([least, least + 1, 2 * least, num_blocks + least]), reach=reach))
    return pools
