"""A worker whose engine sleeps instead of computing: the real server process and scheduler, with step times from a formula.

    python -m bench.support.sleeping_worker PORT --role decode

It answers completions, hands off, pulls and moves like a real worker, and publishes KV events and load reports. KV that it pulls
is not transferred, only counted. Tokens are a function of the position. It needs no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import tokenizers
import uvloop
from aiohttp import web
from tokenizers import models, pre_tokenizers

from stoker.base.ids import RequestId
from stoker.kv.blocks.pool import BlockPool
from stoker.kv.blocks.transfer import KvLoad, LoadResult
from stoker.proto.messages import EngineInfo, EngineStats, Prefetch
from stoker.sched.leases import LeaseTerms
from stoker.sched.plan import StepPlan, StepResult
from stoker.sched.request import GenerateRequest, TokenChunk, TokenChunks
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.text.template import ChatTemplate
from stoker.text.tokenizer import Tokenizer
from stoker.worker.app import make_app, make_runner
from stoker.worker.config import HttpConfig
from stoker.worker.context import CONTEXT, ModelText
from stoker.worker.fleet_side import worker_report
from stoker.worker.identity import Identity
from stoker.worker.report import Reporter

MODEL = "sleeping"
BLOCK_TOKENS, NUM_BLOCKS, MAX_TOKENS = 16, 20_000, 32_768
_LEASE_S = 1.0
_PULL_S = 0.01
_SMOOTHING = 0.2


@dataclass(frozen=True)
class StepTimes:
    """What a step costs: a fixed part, each prompt token, and each sequence that decodes."""

    fixed_s: float = 0.03
    prompt_token_s: float = 1e-4
    row_s: float = 4.8e-3

    def step_s(self, plan: StepPlan) -> float:
        prompts = sum(span.count for span in plan.spans if span.count > 1)
        rows = sum(1 for span in plan.spans if span.count == 1)
        return self.fixed_s + self.prompt_token_s * prompts + self.row_s * rows


class SleepingChunks:
    """The chunks of one sequence."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TokenChunk] = asyncio.Queue()

    def put(self, chunk: TokenChunk) -> None:
        self._queue.put_nowait(chunk)

    async def relay(self, take: Callable[[TokenChunk], bool]) -> None:
        while True:
            chunk = await self._queue.get()
            if not take(chunk) or chunk.finish is not None:
                return


class SleepingEngine:
    """The engine's loop, which sleeps for the time of each step."""

    def __init__(self, times: StepTimes, port: int, on_load: Callable[[], None]) -> None:
        lease = LeaseTerms(f"e-{port}", f"127.0.0.1:{port}", _LEASE_S)
        config = SchedulerConfig(BLOCK_TOKENS, 2048, 256, "sleeping", lease, target_itl_s=0.3)
        self._scheduler = Scheduler(config, BlockPool(NUM_BLOCKS))
        self._times = times
        self._on_load = on_load
        self._streams: dict[RequestId, SleepingChunks] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rate: float | None = 1.0 / (times.prompt_token_s + times.fixed_s / 2048)
        self._decode_s: float | None = None
        self._num_steps, self._step_s = 0, 0.0
        self.ready, self.num_restarts = True, 0
        self.info = EngineInfo(
            model_fingerprint="sleeping",
            device="none",
            dtype="none",
            vocab_size=258,
            max_model_tokens=MAX_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            max_rows=256,
            load_s=0.0,
            engine_id=lease.engine_id,
            kv_address=lease.address,
        )

    @property
    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        return EngineStats(
            waiting_sequences=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            running_sequences=scheduler.num_running,
            free_blocks=NUM_BLOCKS,
            cached_blocks=0,
            num_blocks=NUM_BLOCKS,
            steps=self._num_steps,
            step_s=self._step_s,
            prompt_tokens=counters.prompt_tokens,
            computed_tokens=counters.computed_tokens,
            cached_tokens=counters.cached_tokens,
            partial_tokens=0,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            prefill_tokens_per_s=self._rate,
            decode_step_s=self._decode_s,
            held_leases=scheduler.num_held,
        )

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[SleepingChunks]:
        stream = self._streams[request.request_id] = SleepingChunks()
        self._scheduler.add(request)
        self._work.set()
        try:
            yield stream
        finally:
            del self._streams[request.request_id]
            self._scheduler.cancel(request.request_id)

    def release(self, lease_id: str) -> None:
        self._scheduler.release_lease(lease_id)

    def prefetch(self, hint: Prefetch) -> None: ...

    def hand_off(self, request_id: RequestId, lease_id: str) -> None:
        self._send(self._scheduler.hand_off(request_id, lease_id))
        self._work.set()

    def _send(self, chunks: TokenChunks) -> None:
        for chunk in chunks:
            if (stream := self._streams.get(chunk.request_id)) is not None:
                stream.put(chunk)

    async def _run(self) -> None:
        scheduler = self._scheduler
        while True:
            self._send(scheduler.expire(time.monotonic()))
            plan = scheduler.plan()
            scheduler.take_emptied_leases()
            if plan is None:
                await self._idle()
                continue
            for load in plan.loads:
                asyncio.get_running_loop().call_later(_PULL_S, self._loaded, load)
            step_s = self._times.step_s(plan)
            if plan.spans:
                await asyncio.sleep(step_s)
            self._measure(plan, step_s)
            tokens = [[97 + (span.start + span.count) % 26] if span.samples else [] for span in plan.spans]
            self._send(scheduler.commit(StepResult(tokens, step_s)))
            self._send(scheduler.end_leaving())
            self._end_leases()
            self._on_load()
            await asyncio.sleep(0)

    async def _idle(self) -> None:
        self._end_leases()
        self._work.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await self._work.wait()

    def _loaded(self, load: KvLoad) -> None:
        self._scheduler.finish_load(LoadResult(load.load_id, len(load.keys), len(load.keys), True))
        self._work.set()

    def _end_leases(self) -> None:
        _, broken = self._scheduler.take_leases()
        for lease_id in [*broken, *self._scheduler.expired_leases(time.monotonic())]:
            self._scheduler.release_lease(lease_id)

    def _measure(self, plan: StepPlan, step_s: float) -> None:
        self._num_steps += 1
        self._step_s += step_s
        # A stream that shares its worker with prompts waits for their chunks too.
        if any(span.count == 1 for span in plan.spans):
            last = step_s if self._decode_s is None else self._decode_s
            self._decode_s = last + _SMOOTHING * (step_s - last)


def _text() -> ModelText:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(raw, eos_token_ids=[257], eos_token="<|im_end|>")
    return ModelText.of(tokenizer, ChatTemplate({}, tokenizer))


async def _main(args: argparse.Namespace) -> None:
    reporter = Reporter("127.0.0.1")
    engine: Any = SleepingEngine(StepTimes(), args.port, reporter.load_changed)
    identity = Identity(role=args.role, events_port=reporter.events_port, replay_port=reporter.replay_port)
    app = make_app(engine, _text(), HttpConfig(served_names=(MODEL,)), identity=identity)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    reporter.start(lambda number: worker_report(app[CONTEXT], number))
    reporter.follow(app[CONTEXT].open_work)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--role", default="unified", choices=("unified", "prefill", "decode"))
    uvloop.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
