"""The spare engine process: it has imported torch and made its GPU context, and waits for a model.

It replaces an engine that dies, or that ends because the worker is given another model. Then only the weights must be loaded.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.base import log as logs
from stoker.base.errors import EngineDied
from stoker.proto.messages import Prepared
from stoker.proto.pipe import FrameEnd, ServerEnd
from stoker.worker.spawn import spawn_engine

# The spare's imports take seconds of CPU time, which the first requests after a start would miss.
PREPARE_AFTER_S = 3.0

log = logs.EventLog("spare")


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine process and the server's end of its pipe. Send `EngineArguments` first."""

    process: subprocess.Popen[bytes]
    pipe: ServerEnd
    is_prepared: bool = False  # it has sent `Prepared`, so it answers at once

    def kill(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class SpareEngine:
    """Keeps one engine process prepared. It does not replace a spare that fails before the next `prepare`."""

    def __init__(self, environment: Mapping[str, str], start_silent_s: float, prepare_after_s: float) -> None:
        """A spare is started `prepare_after_s` after `prepare`, and killed if it is not ready after `start_silent_s`."""
        self._environment = environment
        self._prepare_after_s = prepare_after_s
        self._start_silent_s = start_silent_s
        self._preparing: asyncio.Task[None] | None = None
        self._spare: EngineProcess | None = None

    def prepare(self, device: str) -> None:
        """Start a spare for `device` in the background, unless there is one."""
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare(device), name="spare-engine")

    async def take(self) -> EngineProcess | None:
        """Return the spare and forget it, or None if there is none. One that is not prepared yet is killed."""
        await self._stop_preparing()
        spare, self._spare = self._spare, None
        if spare is not None and spare.process.poll() is not None:
            log.warning("spare_engine_lost", exit_code=spare.process.returncode)
            spare.kill()
            return None
        return spare

    async def close(self) -> None:
        """End the spare."""
        if (spare := await self.take()) is not None:
            spare.kill()

    async def _stop_preparing(self) -> None:
        task, self._preparing = self._preparing, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _prepare(self, device: str) -> None:
        await asyncio.sleep(self._prepare_after_s)
        try:
            spawned = await asyncio.to_thread(spawn_engine, self._environment, prepare=device)
        except OSError as error:  # no memory, or no process left: the engine that runs is not affected
            log.warning("spare_engine_failed", reason=str(error))
            return
        spare = EngineProcess(spawned.process, await ServerEnd.connect(spawned.pipe), is_prepared=True)
        try:
            await self._wait_until_prepared(spare)
            self._spare = spare
        except EngineDied as error:
            log.warning("spare_engine_failed", reason=error.message)
        finally:
            if self._spare is None:
                spare.kill()

    async def _wait_until_prepared(self, spare: EngineProcess) -> None:
        try:
            async with asyncio.timeout(self._start_silent_s):
                message = await spare.pipe.receive()
        except TimeoutError:
            raise EngineDied(f"It was not prepared within {self._start_silent_s:g} s.") from None
        except FrameEnd:
            raise EngineDied("It ended while it was being prepared; its error is on stderr.") from None
        if not isinstance(message, Prepared):
            raise EngineDied(f"It sent {type(message).__name__} before Prepared.")
        log.event("spare_engine_ready", pid=spare.process.pid)
