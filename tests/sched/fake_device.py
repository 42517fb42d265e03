"""A fake device and model for the scheduler. The next token is a function of the whole prefix as it is stored in KV."""

from __future__ import annotations

import random

from stoker.base.ids import RequestId
from stoker.sched.plan import ON_DEVICE, StepPlan, StepResult
from stoker.sched.request import GenerateRequest, SamplingParams

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
        self._last: dict[int, int] = {}
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
        for change in plan.block_table_changes:
            self._tables[change.row][change.first :] = change.blocks
        for copy in plan.copies:
            self.fill(copy.dst, self._kv[copy.src])
        for block in plan.fresh_blocks:
            self._kv[block] = [None] * self._block_tokens
            self._filled.discard(block)
        at = 0
        writes = []
        for span in plan.spans:
            for position in range(span.start, span.start + span.count):
                token = plan.token_ids[at]
                at += 1
                token = self._last[span.row] if token == ON_DEVICE else token
                block = self._tables[span.row][position // self._block_tokens]
                writes.append((block, position % self._block_tokens))
                self._kv[block][position % self._block_tokens] = token
            rest = self._kv[block][position % self._block_tokens + 1 :]
            assert block in self._filled or rest == [None] * len(rest), "the tokens of an earlier owner can be read"
        assert len(set(writes)) == len(writes), "two spans wrote to the same slot"
        return StepResult(
            [self._sample(span.row, span.start + span.count) if span.samples else [] for span in plan.spans], 0.0
        )

    def read(self, block: int) -> list[int | None]:
        return list(self._kv[block])

    def fill(self, block: int, tokens: list[int | None]) -> None:
        self._kv[block] = list(tokens)
        self._filled.add(block)

    def _sample(self, row: int, length: int) -> list[int]:
        table, size = self._tables[row], self._block_tokens
        prefix = [self._kv[table[i // size]][i % size] for i in range(length)]
        assert None not in prefix
        self._last[row] = next_token(prefix, self._seeds[row])  # type: ignore[arg-type]
        return [self._last[row]]


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
