"""Measure a running worker from outside: the time of prefill, decode and mixed steps, and what its host side adds.

Several workers may be measured at the same time. On one machine they share its cores, as they will under load. The shapes are
measured in rounds, and not one after another: a machine that is slower for some seconds makes all of them a little slower, and
not one of them much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from stoker.base.errors import StokerError
from stoker.loadgen.client import Client, Target
from stoker.loadgen.prompts import random_tokens
from stoker.loadgen.session import Blocks, TokenRange, Turn
from stoker.loadgen.stream import Record

_DECODE_TOKENS = 24
_TAIL_GAPS = 12  # at the end of an answer all rows decode together
_JITTER_PARTS = 20
_TAIL_TOKENS = 16  # new tokens of a prompt whose head is cached
_MIXED_TOKENS = 40  # of answers that go on while another prompt is computed
_MIXED_AFTER = 10  # of these tokens, that prompt is sent


class ProbeFailed(StokerError):
    """A request of a measurement was not answered."""

    code = "probe_failed"


@dataclass(frozen=True, slots=True)
class ProbedStep:
    """`rows` rows decode after `context` tokens each. Or, if `rows` is 0, `prompt_tokens` tokens of one prompt are computed
    after `context` cached ones. With both, they are computed in the same step, and the prompt has no cached tokens."""

    seconds: float
    rows: int = 0
    context: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerProbe:
    """What was measured. `host_s` is the time to the first token beyond the step itself. `jitter` is the time of single
    decode-only steps over the typical one of their shape, in equally likely parts."""

    steps: list[ProbedStep]
    host_s: float
    jitter: list[float]
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

    async def follow_up(self, head_tokens: int, new_tokens: int, max_tokens: int, count: int = 1) -> list[Record]:
        """Let each server compute a head, unless it has it. Then send it `count` prompts of this head and new tokens."""
        self._num_sets += 1
        await self._send([self._long_prompt(i, head_tokens, 0, 1) for i in range(len(self._clients))])
        total = count * len(self._clients)
        return await self._send([self._long_prompt(i, head_tokens, new_tokens, max_tokens) for i in range(total)])

    async def mixed(self, rows: int, prompt_tokens: int, step_s: float) -> list[Record]:
        """Send a prompt to each server while `rows` answers go on there. Return the records of these answers."""
        answers = asyncio.create_task(self.send(rows, _TAIL_TOKENS, _MIXED_TOKENS))
        await asyncio.sleep((_MIXED_AFTER + rows) * step_s)
        await self.send(1, prompt_tokens, 1)
        return await answers

    def _long_prompt(self, index: int, head_tokens: int, new_tokens: int, max_tokens: int) -> Turn:
        head = f"head-{self._seed}-{index % len(self._clients)}"
        name = f"follow-up-{self._seed + self._num_sets}-{index}"
        blocks = Blocks((head,), name, head_tokens, head_tokens + new_tokens, self._range)
        return Turn(blocks, name, max_tokens=max_tokens)

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


class _ProbeSamples:
    """The measurements of each shape, in the order in which the shapes were first measured."""

    def __init__(self) -> None:
        self._by_shape: dict[Hashable, list[float]] = {}
        self._gaps: dict[Hashable, list[float]] = {}

    def add(self, shape: Hashable, seconds: Sequence[float]) -> None:
        self._by_shape.setdefault(shape, []).extend(seconds)

    def add_gaps(self, shape: Hashable, records: Sequence[Record], part: slice) -> None:
        """Add the gaps between tokens of records. Each record counts as one measurement, the median of its gaps."""
        gaps = [record.gaps_s[part] for record in records]
        self.add(shape, [median(one) for one in gaps if one])
        self._gaps.setdefault(shape, []).extend(gap_s for one in gaps for gap_s in one)

    def jitter(self) -> list[float]:
        """Return single gaps over the typical one of their shape, as the middles of equally likely parts."""
        ratios = sorted(
            gap_s / typical_s
            for shape, gaps in self._gaps.items()
            if (typical_s := self.typical(shape))
            for gap_s in gaps
        )
        if len(ratios) < _JITTER_PARTS:
            return []
        return [ratios[int((part + 0.5) / _JITTER_PARTS * len(ratios))] for part in range(_JITTER_PARTS)]

    def has(self, shape: Hashable) -> bool:
        return bool(self._by_shape.get(shape))

    def typical(self, shape: Hashable) -> float:
        """Return the mean of the middle half."""
        ordered = sorted(self._by_shape[shape])
        if not ordered:
            raise ProbeFailed(f"no time between two tokens was seen ({shape}): the server must stream every token")
        quarter = len(ordered) // 4
        return fmean(ordered[quarter : len(ordered) - quarter])


async def probe_worker(
    targets: Sequence[Target],
    model: str,
    vocab_size: int,
    prompts: Sequence[int],
    decodes: Sequence[tuple[int, int]],
    repeats: int,
    follow_ups: Sequence[tuple[int, int]] = (),
    mixed: Sequence[tuple[int, int]] = (),
    seed: int = 0,
) -> WorkerProbe:
    """Measure prompts of these lengths, (rows, context) pairs of decoding rows, (cached, new) pairs of prompts whose first part
    is cached, and (rows, prompt) pairs of steps with both. A server that does not report cached tokens has no steps with a
    cached part."""
    clients = [Client(target) for target in targets]
    for client in clients:
        await client.__aenter__()
    try:
        probe = ProbeClient(clients, model, vocab_size, seed)
        await probe.send(1, 64, 8)  # warm-up
        samples = _ProbeSamples()
        measured: dict[tuple[int, int], tuple[int, int]] = {}  # what was really cached and computed
        for _ in range(repeats):
            await _round(probe, samples, measured, prompts, decodes, follow_ups, mixed)
        one_row_s = samples.typical("one row")
        host_s = max(0.0, samples.typical("one token") - one_row_s)
        steps = [ProbedStep(one_row_s, rows=1, context=5)]
        for length in prompts:
            steps.append(ProbedStep(max(1e-6, samples.typical(length) - host_s), prompt_tokens=length))
        for pair, (cached, computed) in measured.items():
            seconds = max(1e-6, samples.typical(("after", pair)) - host_s)
            steps.append(ProbedStep(seconds, context=cached, prompt_tokens=computed))
        for rows, context in decodes:
            seconds = samples.typical(("decode", rows, context))
            steps.append(ProbedStep(seconds, rows=rows, context=context + _DECODE_TOKENS // 2))
        for rows, length in mixed:
            if not samples.has(("mixed", rows, length)):
                continue
            context = _TAIL_TOKENS + _MIXED_AFTER
            steps.append(ProbedStep(samples.typical(("mixed", rows, length)), rows, context, length))
        first_gaps = [(length, samples.typical(("gap", length))) for length in prompts if samples.has(("gap", length))]
        return WorkerProbe(steps, host_s, samples.jitter(), first_gaps)
    finally:
        for client in clients:
            await client.__aexit__(None, None, None)


async def _round(
    probe: ProbeClient,
    samples: _ProbeSamples,
    measured: dict[tuple[int, int], tuple[int, int]],
    prompts: Sequence[int],
    decodes: Sequence[tuple[int, int]],
    follow_ups: Sequence[tuple[int, int]],
    mixed: Sequence[tuple[int, int]],
) -> None:
    """Measure each shape once on each server."""
    for _ in range(3):
        single = await probe.send(1, 1, 10)
        samples.add_gaps("one row", single, slice(None))
        samples.add("one token", [record.ttft_s or 0.0 for record in single])
    for length in prompts:
        found = await probe.send(1, length, 3)
        samples.add(length, [record.ttft_s or 0.0 for record in found])
        samples.add(("gap", length), [record.gaps_s[0] for record in found if record.gaps_s])
    for pair in follow_ups:
        found = await probe.follow_up(*pair, max_tokens=1)
        cached = min(record.cached_tokens or 0 for record in found)
        if cached and measured.setdefault(pair, (cached, sum(pair) - cached)) == (cached, sum(pair) - cached):
            samples.add(("after", pair), [record.ttft_s or 0.0 for record in found])
    for rows, context in decodes:
        if context <= 4 * _TAIL_TOKENS:
            found = await probe.send(rows, context, _DECODE_TOKENS)
        else:
            found = await probe.follow_up(context - _TAIL_TOKENS, _TAIL_TOKENS, _DECODE_TOKENS, rows)
        samples.add_gaps(("decode", rows, context), found, slice(-_TAIL_GAPS, -2))
    for rows, length in mixed:
        found = await probe.mixed(rows, length, samples.typical("one row"))
        later = [record.gaps_s[_MIXED_AFTER // 2 :] for record in found]
        samples.add(("mixed", rows, length), [max(gaps) for gaps in later if gaps])
