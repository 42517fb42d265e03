"""The server's side of the engine process: sends it requests, passes on its token chunks, and restarts it when it dies."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import msgspec

from stoker.base import log as logs
from stoker.base.backoff import BackoffLimits, RestartBackoff
from stoker.base.errors import ConfigError, EngineDied, ModelFilesError, Overloaded, StokerError
from stoker.base.ids import RequestId
from stoker.proto.messages import (
    Add,
    Beat,
    Cancel,
    Chunks,
    EngineArguments,
    EngineInfo,
    EngineStats,
    HandOff,
    KvEvents,
    LoadProgress,
    Prefetch,
    Release,
    Shutdown,
    StartFailed,
)
from stoker.proto.pipe import FrameEnd, ServerEnd
from stoker.sched.request import GenerateRequest, TokenChunk
from stoker.worker.spare import PREPARE_AFTER_S, EngineProcess, SpareEngine
from stoker.worker.spawn import SpawnedEngine, spawn_engine
from stoker.worker.watchdog import CHECK_EVERY_S, EngineWatchdog, WatchdogLimits

_STOP_S = 5.0
# A step on a CPU may be a long chunk of a large model's prompt, which takes minutes on a few cores.
_GPU_STEP_S, _CPU_STEP_S = 120.0, 900.0
# It sends heartbeats while it loads the model. Before that, its imports can take minutes from a slow drive.
_START_SILENT_S = 300.0

log = logs.EventLog("service")
Progress = Callable[[str, int, int], None]
TakeChunk = Callable[[TokenChunk], bool]  # returns False if it takes no more for now


class ChunkStream:
    """The chunks of one sequence. The reader of the pipe passes them on directly, so that no task is woken per token."""

    def __init__(self) -> None:
        self._early: deque[TokenChunk] = deque()  # arrived while no relay ran; bounded by max_new_tokens
        self._died: EngineDied | None = None
        self._take: TakeChunk | None = None
        self._relay_done: asyncio.Future[None] | None = None  # done when the running relay must return
        self.finished = False  # the last chunk was taken, or no more will come

    async def relay(self, take: TakeChunk) -> None:
        """Pass chunks to `take` as they arrive, until it returns False or has the last one. Raises what `take` raises."""
        while self._early:
            chunk = self._early.popleft()
            self.finished = chunk.finish is not None
            if not take(chunk) or self.finished:
                return
        if self._died is not None:
            self.finished = True
            raise self._died
        if self.finished:
            raise EngineDied("The engine's stream ended before the answer did.")
        self._take, self._relay_done = take, asyncio.get_running_loop().create_future()
        try:
            await self._relay_done
        finally:
            self._take = None

    def put(self, chunk: TokenChunk) -> None:
        take = self._take
        if take is None:
            self._early.append(chunk)
            return
        self.finished = chunk.finish is not None
        try:
            if take(chunk) and not self.finished:
                return
        except Exception as error:  # `relay` raises it in the task of its request; the pipe must be read further
            self._end_relay(error)
        else:
            self._end_relay()

    def fail(self, died: EngineDied) -> None:
        """End the stream: `relay` raises `died` after the chunks that have arrived."""
        self._died = died
        if self._take is not None:
            self.finished = True
            self._end_relay(died)

    def _end_relay(self, error: Exception | None = None) -> None:
        self._take = None
        if self._relay_done is None or self._relay_done.done():
            return
        if error is None:
            self._relay_done.set_result(None)
        else:
            self._relay_done.set_exception(error)


class EngineListener(Protocol):
    """Receives what the engine reports about itself."""

    def blocks_changed(self, events: KvEvents) -> None: ...

    def all_blocks_lost(self) -> None:
        """The engine has ended, and its KV is lost."""

    def load_changed(self) -> None:
        """There are new stats, or the engine has ended."""


class NoListener:
    def blocks_changed(self, events: KvEvents) -> None: ...

    def all_blocks_lost(self) -> None: ...

    def load_changed(self) -> None: ...


class EngineService:
    """Runs one engine process and restarts it when it dies."""

    def __init__(
        self,
        arguments: EngineArguments,
        *,
        environment: Mapping[str, str],
        max_open: int = 2048,
        silent_s: float = 4.5,
        step_s: float | None = None,
        start_silent_s: float = _START_SILENT_S,
        prepare_after_s: float = PREPARE_AFTER_S,
        progress: Progress = lambda stage, done, total: None,
        listener: EngineListener | None = None,
        spawned: SpawnedEngine | None = None,
    ) -> None:
        """`spawned` is an engine process that has been started already. Later ones are started when needed.

        The engine is killed and restarted if it sends no heartbeat for `silent_s`, or if one step takes longer than `step_s`
        (None: by its device). While it starts, it may be silent for `start_silent_s`, or for `silent_s` if it was the spare,
        which is started `prepare_after_s` after an engine is ready.
        """
        self._spawned = spawned
        self._spare = SpareEngine(environment, start_silent_s, prepare_after_s)
        self._listener = listener or NoListener()
        self._arguments = arguments
        self._environment = environment
        self._max_open = max_open
        self._silent_s, self._step_s, self._start_silent_s = silent_s, step_s, start_silent_s
        self._backoff = RestartBackoff(BackoffLimits())
        self._progress = progress
        self._streams: dict[RequestId, ChunkStream] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: ServerEnd | None = None
        self._info: EngineInfo | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.stats: EngineStats | None = None
        self.ready = False
        self.num_restarts = 0

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "info is known once the service has started"
        return self._info

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises the reason if it cannot start."""
        await self._launch()
        self._start_keeping()

    async def stop(self) -> None:
        """Stop the engine. Running requests end with EngineDied, so drain first."""
        await self._stop_keeping()
        self._fail_streams("The worker is stopping.")
        await self._spare.close()
        await self._end_process(is_final=True)

    async def switch(self, arguments: EngineArguments) -> None:
        """Replace the engine by one with other arguments. Running requests end with EngineDied, so drain first.

        Raises the reason if the new engine cannot start. Then the old one is started again in the background.
        """
        await self._stop_keeping()
        self._report_loss("The worker was given another model.")
        await self._end_process()
        old, self._arguments = self._arguments, arguments
        self._restart_timeline()
        try:
            await self._launch()
        except Exception:  # not for a cancellation: then the worker stops, and no engine may start
            self._arguments = old
            await self._end_process()
            self._start_keeping()
            raise
        self._start_keeping()

    def _start_keeping(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="engine-keeper")

    async def _stop_keeping(self) -> None:
        self.ready = False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[ChunkStream]:
        if not self.ready or self._pipe is None:
            raise Overloaded("The engine is starting; retry later.", retry_after_s=2.0, code="engine_starting")
        if len(self._streams) >= self._max_open:
            raise Overloaded(
                f"This worker has {len(self._streams)} open sequences, and its limit is {self._max_open}; retry later."
            )
        stream = ChunkStream()
        pipe = self._pipe
        self._streams[request.request_id] = stream
        try:
            pipe.send(Add(request=request))
            yield stream
        finally:
            del self._streams[request.request_id]
            if not stream.finished and pipe is self._pipe:
                with suppress(EngineDied):
                    pipe.send(Cancel(request_id=request.request_id))

    def prefetch(self, hint: Prefetch) -> None:
        """Send a hint. It is dropped if the engine is not running."""
        if self.ready and self._pipe is not None:
            with suppress(EngineDied):
                self._pipe.send(hint)

    def release(self, lease_id: str) -> None:
        """End a lease. An engine that is not running has none."""
        if self.ready and self._pipe is not None:
            with suppress(EngineDied):
                self._pipe.send(Release(lease_id=lease_id))

    def hand_off(self, request_id: RequestId, lease_id: str) -> None:
        """End a request with a hand-off, and keep its KV under this lease. Does nothing if it has ended."""
        if request_id in self._streams and self._pipe is not None:
            with suppress(EngineDied):
                self._pipe.send(HandOff(request_id=request_id, lease_id=lease_id))

    async def _keep(self) -> None:
        """Pass on the messages of the engine, and restart it when it ends."""
        pause_s = 0.0
        while True:
            if not self.ready:
                await self._restart(pause_s)
            started_s = time.monotonic()
            await self._pump_until_end()
            num_streams = len(self._streams)
            self._report_loss("The engine process ended while it worked on this request.")
            log.error("engine_died", exit_code=await self._end_process(), streams=num_streams)
            pause_s = self._backoff.pause_s(time.monotonic() - started_s)

    def _report_loss(self, message: str) -> None:
        """End all streams, and tell the listener that the KV is lost."""
        self.ready, self.stats = False, None
        self._listener.all_blocks_lost()
        self._listener.load_changed()
        self._fail_streams(message)

    async def _restart(self, pause_s: float) -> None:
        """Start the engine again, after a pause, as often as it takes."""
        while not self.ready:
            await asyncio.sleep(pause_s)
            self.num_restarts += 1
            self._restart_timeline()
            try:
                await self._launch()
            except (StokerError, OSError, msgspec.DecodeError) as error:
                pause_s = self._backoff.pause_s(None)
                log.error("engine_restart_failed", reason=str(error), next_try_s=pause_s)
                await self._end_process()
        log.event("engine_restarted", restarts=self.num_restarts)

    def _restart_timeline(self) -> None:
        if self._arguments.timeline_origin_s is not None:
            self._arguments = msgspec.structs.replace(self._arguments, timeline_origin_s=time.time())

    async def _launch(self) -> None:
        """Start the engine: in the process that was spawned first, then in the spare, then in a new process."""
        spare = await self._spare.take() if self._spawned is None else None
        if spare is not None:
            try:
                await self._start_in(spare)
                return
            except EngineDied as error:
                log.warning("spare_engine_failed", reason=error.message)
                await self._end_process()
        await self._start_in(await self._new_process())

    async def _new_process(self) -> EngineProcess:
        spawned, self._spawned = self._spawned, None
        if spawned is None:
            spawned = await asyncio.to_thread(spawn_engine, self._environment)
        return EngineProcess(spawned.process, await ServerEnd.connect(spawned.pipe))

    async def _start_in(self, taken: EngineProcess) -> None:
        self._process, self._pipe = taken.process, taken.pipe
        try:
            await self._wait_until_ready(taken)
        except asyncio.CancelledError:
            taken.process.kill()  # an engine that still loads does not read the pipe
            raise

    async def _wait_until_ready(self, taken: EngineProcess) -> None:
        silent_s = self._silent_s if taken.is_prepared else self._start_silent_s
        # Not on the command line, which every user of the machine can read: the settings contain a secret.
        taken.pipe.send(self._arguments)
        while True:
            try:
                async with asyncio.timeout(silent_s):
                    message = await taken.pipe.receive()
            except TimeoutError as error:
                taken.process.kill()
                await self._end_process()
                raise EngineDied(
                    f"The engine process was silent for {silent_s:g} s while it started: it is stopped or hangs."
                ) from error
            except FrameEnd as error:
                code = await self._end_process()
                raise EngineDied(f"The engine process ended with exit code {code} while it started.") from error
            match message:
                case LoadProgress(stage=stage, done=done, total=total):
                    self._progress(stage, done, total)
                case StartFailed(code=error_code, message=text):
                    await self._end_process()
                    kind = ModelFilesError if error_code != ConfigError.code else ConfigError
                    raise kind(text, code=error_code)
                case EngineInfo():
                    self._info = message
                    self.ready = True
                    if message.keeps_spare:
                        self._spare.prepare(message.device)
                    return

    async def _pump_until_end(self) -> None:
        """Pass on messages until the engine ends, or until the watchdog kills it."""
        step_s = self._step_s or (_CPU_STEP_S if self.info.device == "cpu" else _GPU_STEP_S)
        watchdog = EngineWatchdog(WatchdogLimits(self._silent_s, step_s), time.monotonic())
        watching = asyncio.create_task(self._watch(watchdog), name="engine-watchdog")
        pumping = asyncio.create_task(self._pump(watchdog), name="engine-pump")
        try:
            await asyncio.wait({watching, pumping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            pumping.cancel()
            results = await asyncio.gather(watching, pumping, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(self, watchdog: EngineWatchdog) -> None:
        """Kill the engine when the watchdog says so. A process that is stopped can be killed, but not asked to end."""
        reason = None
        while reason is None:
            await asyncio.sleep(CHECK_EVERY_S)
            reason = watchdog.verdict(time.monotonic())
        assert self._process is not None
        log.error("engine_hangs", pid=self._process.pid, reason=reason)
        self._process.kill()

    async def _pump(self, watchdog: EngineWatchdog) -> None:
        assert self._pipe is not None
        # An engine that sends a message which cannot be decoded counts as dead.
        with suppress(FrameEnd, msgspec.DecodeError):
            while True:
                match await self._pipe.receive():
                    case Chunks(chunks=chunks):
                        for chunk in chunks:
                            stream = self._streams.get(chunk.request_id)
                            if stream is not None:
                                stream.put(chunk)
                    case Beat() as beat:
                        watchdog.beat(beat, time.monotonic())
                    case KvEvents() as events:
                        self._listener.blocks_changed(events)
                    case EngineStats() as stats:
                        self.stats = stats
                        self._listener.load_changed()

    def _fail_streams(self, message: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDied(message))

    async def _end_process(self, *, is_final: bool = False) -> int | None:
        """End the process: ask it to shut down, and kill it after a timeout. Return its exit code."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is None:
            return None
        if pipe is not None:
            with suppress(EngineDied):
                pipe.send(Shutdown(is_final=is_final))
            pipe.close()
        try:
            return await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)
        except asyncio.CancelledError:
            process.kill()  # it may be stopped or hang, and no other code knows it any more
            raise
