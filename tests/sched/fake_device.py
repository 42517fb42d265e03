"""A fake device and model for the scheduler. The next token is a function of the whole prefix as it is stored in KV."""

from __future__ import annotations

import random

from stoker.base.ids import RequestId
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


class FakeDevice:
    """Executes plans on 'KV' that is the tokens themselves, so that a wrong block, slot or order gives a wrong token."""

    def __init__(self, num_blocks: int, block_tokens: int, max_rows: int) -> None:
        self._block_tokens = block_tokens
        self._kv: list[list[int | None]] = [[None] * block_tokens for _ in range(num_blocks)]
        self._tables: dict[int, list[int]] = {}
        self._seeds: dict[int, int] = {}
        self._known: dict[int, list[int]] = {}
        self._limits: dict[int, int] = {}
        self._tapes: dict[int, TapeUpload] = {}
        self._rejected: set[tuple[int, int]] = set()  # slots that hold a rejected draft of their owner
        self._filled: set[int] = set()  # blocks filled by copies or loads, and not cleared since
        self._max_rows = max_rows

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            self._tables.pop(row)
        for new in plan.new_rows:
            assert new.row not in self._tables
            assert new.row < self._max_rows
            self._tables[new.row] = []
            self._seeds[new.row] = new.sampling.seed
            self._known[new.row] = list(new.token_ids)
            self._limits[new.row] = new.max_tokens
            self._tapes.pop(new.row, None)
        for tape in plan.tapes:
            assert len(tape.token_ids) <= TAPE_TOKENS
            self._tapes[tape.row] = tape
        for change in plan.block_table_changes:
            self._tables[change.row][change.first :] = change.blocks
        for copy in plan.copies:
            self.fill(copy.dst, self._kv[copy.src])
        for block in plan.fresh_blocks:
            self.fill(block, [None] * self._block_tokens)
            self._filled.discard(block)
        at = 0
        writes: list[tuple[int, int]] = []
        result: list[list[int]] = []
        for span in plan.spans:
            token_ids = plan.token_ids[at : at + span.count]
            at += span.count
            result.append(self._run_span(span, token_ids, writes))
        assert len(set(writes)) == len(writes), "two spans wrote to the same slot"
        return StepResult(result, 0.0)

    def _run_span(self, span: Span, token_ids: list[int], writes: list[tuple[int, int]]) -> list[int]:
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
        for position, token in enumerate(token_ids[:count] + drafts, start):
            slot = (self._tables[span.row][position // self._block_tokens], position % self._block_tokens)
            writes.append(slot)
            self._kv[slot[0]][slot[1]] = token
            self._rejected.discard(slot)
        block, first = writes[-1][0], writes[-1][1] + 1
        rest = [self._kv[block][i] for i in range(first, self._block_tokens) if (block, i) not in self._rejected]
        assert block in self._filled or rest == [None] * len(rest), "the tokens of an earlier owner can be read"
        if not span.samples:
            return []
        assert start + count == len(known)
        sampled = [self._sample(span.row, len(known))]
        while len(sampled) <= len(drafts) and drafts[len(sampled) - 1] == sampled[-1]:
            sampled.append(self._sample(span.row, len(known) + len(sampled)))
        if rejected := len(drafts) - len(sampled) + 1:
            self._rejected.update(writes[-rejected:])
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

    def read(self, block: int) -> list[int | None]:
        return list(self._kv[block])

    def fill(self, block: int, tokens: list[int | None]) -> None:
        self._kv[block] = list(tokens)
        self._rejected -= {(block, i) for i in range(self._block_tokens)}
        self._filled.add(block)

    def _sample(self, row: int, length: int) -> int:
        table, size = self._tables[row], self._block_tokens
        prefix = [self._kv[table[i // size]][i % size] for i in range(length)]
        assert None not in prefix
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
