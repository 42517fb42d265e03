"""Measure a running worker from outside: the time of prefill and decode steps, and what its host side adds.

Several workers may be measured at the same time. On one machine they share its cores, as they will under load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from stoker.base.errors import StokerError
from stoker.loadgen.client import Client, Target
from stoker.loadgen.prompts import random_tokens
from stoker.loadgen.session import Blocks, TokenRange, Turn
from stoker.loadgen.stream import Record

_DECODE_TOKENS = 24
_TAIL_GAPS = 12  # at the end of an answer all rows decode together


class ProbeFailed(StokerError):
    """A request of a measurement was not answered."""

    code = "probe_failed"


@dataclass(frozen=True, slots=True)
class ProbedStep:
    """`rows` rows decode after `context` tokens each. Or, if `rows` is 0, `prompt_tokens` tokens of one prompt are computed
    after `context` cached ones."""

    seconds: float
    rows: int = 0
    context: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerProbe:
    """What was measured. `host_s` is the time to the first token beyond the step itself."""

    steps: list[ProbedStep]
    host_s: float
    handoff_gaps_s: list[tuple[int, float]]  # prompt tokens, and the first gap of the answer


class ProbeClient:
    """Sends measuring requests to one or several servers at a time."""

    def __init__(self, clients: Sequence[Client], model: str, vocab_size: int, seed: int) -> None:
        self._clients = clients
        self._options: dict[str, Any] = {"model": model, "temperature": 0.0, "ignore_eos": True}
        self._range = TokenRange.below(vocab_size)
        self._seed = seed
        self._num_sets = 0

    async def send(self, count: int, prompt_tokens: int, max_tokens: int) -> list[Record]:
        """Send `count` requests with new prompts to each server at once."""
        self._num_sets += 1
        total = count * len(self._clients)
        sessions = random_tokens(total, prompt_tokens, max_tokens, 0.0, self._seed + self._num_sets, self._range)
        return await self._send([session.turns[0] for session in sessions])

    async def follow_up(self, cached_tokens: int, new_tokens: int) -> list[Record]:
        """Send a new prompt to each server, then the same prompt with `new_tokens` more. Return the second answers."""
        self._num_sets += 1
        records: list[Record] = []
        for num_tokens in (cached_tokens, cached_tokens + new_tokens):
            records = await self._send(
                [self._long_prompt(i, cached_tokens, num_tokens) for i in range(len(self._clients))]
            )
        return records

    def _long_prompt(self, index: int, head_tokens: int, num_tokens: int) -> Turn:
        name = f"follow-up-{self._seed + self._num_sets}-{index}"
        return Turn(Blocks((name,), f"{name}-tail", head_tokens, num_tokens, self._range), name, max_tokens=1)

    async def _send(self, turns: Sequence[Turn]) -> list[Record]:
        """Send the turns at once, the same number to each server."""
        count = len(turns) // len(self._clients)
        sends = [
            client.send(turn, self._options)
            for i, client in enumerate(self._clients)
            for turn in turns[i * count : (i + 1) * count]
        ]
        records = list(await asyncio.gather(*sends))
        for record in records:
            if record.error is not None:
                raise ProbeFailed(f"a measuring request failed: {record.error}: {record.error_message}")
        return records


async def probe_worker(
    targets: Sequence[Target],
    model: str,
    vocab_size: int,
    prompts: Sequence[int],
    decodes: Sequence[tuple[int, int]],
    repeats: int,
    follow_ups: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> WorkerProbe:
    """Measure prompts of these lengths, (rows, context) pairs of decoding rows, and (cached, new) pairs of prompts whose
    first part is cached. A server that does not report cached tokens has no steps of the last kind."""
    clients = [Client(target) for target in targets]
    for client in clients:
        await client.__aenter__()
    try:
        probe = ProbeClient(clients, model, vocab_size, seed)
        await probe.send(1, 64, 8)  # warm-up
        single: list[Record] = []
        for _ in range(3 * repeats):
            single += await probe.send(1, 1, 10)
        one_row_s = median(gap_s for record in single for gap_s in record.gaps_s)
        host_s = max(0.0, median(record.ttft_s or 0.0 for record in single) - one_row_s)
        steps = [ProbedStep(one_row_s, rows=1, context=5)]
        first_gaps: list[tuple[int, float]] = []
        for length in prompts:
            found = [record for _ in range(repeats) for record in await probe.send(1, length, 3)]
            ttft_s = median(record.ttft_s or 0.0 for record in found)
            steps.append(ProbedStep(max(1e-6, ttft_s - host_s), prompt_tokens=length))
            first_gaps.append((length, median(record.gaps_s[0] for record in found if record.gaps_s)))
        for cached, new in follow_ups:
            found = [record for _ in range(repeats) for record in await probe.follow_up(cached, new)]
            cached = min(record.cached_tokens or 0 for record in found)
            if cached:
                ttft_s = median(record.ttft_s or 0.0 for record in found)
                computed = max(record.prompt_tokens or 0 for record in found) - cached
                steps.append(ProbedStep(max(1e-6, ttft_s - host_s), context=cached, prompt_tokens=computed))
        for rows, context in decodes:
            gaps: list[float] = []
            for _ in range(max(1, repeats // 2)):
                for record in await probe.send(rows, context, _DECODE_TOKENS):
                    gaps += record.gaps_s[-_TAIL_GAPS:-2]
            steps.append(ProbedStep(median(gaps), rows=rows, context=context + _DECODE_TOKENS // 2))
        return WorkerProbe(steps, host_s, first_gaps)
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)
