"""A worker with a spare engine process: it replaces an engine that ends, and a spare that fails is no reason to fail."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real import children, is_alive

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.ids import RequestId
from stoker.proto.messages import EngineArguments
from stoker.proto.pipe import FrameEnd, ServerEnd
from stoker.sched.request import GenerateRequest, SamplingParams, TokenChunk
from stoker.worker.service import EngineService
from stoker.worker.spare import SpareEngine
from stoker.worker.spawn import spawn_engine


async def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def logged(caplog: pytest.LogCaptureFixture, event: str, field: str) -> list[Any]:
    """Return a field of all log lines with this event, the newest last."""
    return [vars(record)["fields"][field] for record in caplog.records if record.getMessage() == event]


async def spare_number(caplog: pytest.LogCaptureFixture, number: int) -> int:
    """Wait until spare `number` is ready, counted from one, and return its process id."""
    await wait_until(lambda: len(logged(caplog, "spare_engine_ready", "pid")) >= number)
    return int(logged(caplog, "spare_engine_ready", "pid")[number - 1])


async def answer(service: EngineService) -> list[int]:
    tokens: list[int] = []

    def take(chunk: TokenChunk) -> bool:
        tokens.extend(chunk.token_ids)
        return True

    request = GenerateRequest(RequestId("r"), [5, 6, 7], 3, SamplingParams(seed=3), 20)
    async with service.open(request) as stream:
        await stream.relay(take)
    return tokens


def test_the_spare_replaces_an_engine_and_no_process_is_left(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(dtype="float64", num_threads=1, spare_engine="on", kv=KvSettings(num_blocks=500))
    arguments = EngineArguments(folder=str(tiny_folder), settings=settings)
    caplog.set_level("INFO", "stoker")

    others = set(children(os.getpid()))  # of other tests

    async def run() -> None:
        service = EngineService(arguments, environment=os.environ, silent_s=2.0, prepare_after_s=0.0)
        try:
            await service.start()
            before = await answer(service)
            spare = await spare_number(caplog, 1)
            (first,) = set(children(os.getpid())) - {spare} - others
            os.kill(first, signal.SIGKILL)
            await wait_until(lambda: service.num_restarts == 1 and service.ready)
            assert is_alive(spare), "the spare serves now"
            assert await answer(service) == before

            stopped = await spare_number(caplog, 2)
            os.kill(stopped, signal.SIGSTOP)
            await service.switch(arguments)
            (reason,) = logged(caplog, "spare_engine_failed", "reason")
            assert "silent for 2 s while it started" in reason
            assert not is_alive(stopped)
            assert await answer(service) == before

            # The worker stops while it switches, and the next spare is still being prepared.
            switching = asyncio.create_task(service.switch(arguments))
            await wait_until(lambda: service.info is not None and not service.ready)
            await asyncio.sleep(0.3)
            switching.cancel()
            await asyncio.wait({switching})
            assert switching.cancelled()
        finally:
            await service.stop()
        await wait_until(lambda: not any(map(is_alive, set(children(os.getpid())) - others)))

    asyncio.run(run())


def test_a_spare_that_died_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "stoker")

    async def run() -> None:
        spare = SpareEngine(os.environ, start_silent_s=120.0, prepare_after_s=0.0)
        spare.prepare("cpu")
        pid = await spare_number(caplog, 1)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await spare.take() is None
        assert logged(caplog, "spare_engine_lost", "exit_code") == [-signal.SIGKILL]

    asyncio.run(run())


def test_a_spare_that_cannot_make_its_context_ends_at_once() -> None:
    async def run() -> None:
        spawned = spawn_engine(os.environ, prepare="cuda:99")
        pipe = await ServerEnd.connect(spawned.pipe)
        try:
            with pytest.raises(FrameEnd):
                async with asyncio.timeout(60):
                    await pipe.receive()
            assert await asyncio.to_thread(spawned.process.wait, 30) == 1
        finally:
            pipe.close()
            spawned.kill()

    asyncio.run(run())
