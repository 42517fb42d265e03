"""EngineService: streams of token chunks <-> the engine process. Sees at once when the engine dies, and starts it again."""

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
from stoker.base.errors import ConfigError, EngineDied, ModelFilesError, Overloaded, StokerError
from stoker.base.ids import RequestId
from stoker.proto.messages import (
    Add,
    Cancel,
    Chunks,
    EngineArguments,
    EngineInfo,
    EngineStats,
    KvEvents,
    LoadProgress,
    Prefetch,
    Release,
    Shutdown,
    StartFailed,
)
from stoker.proto.pipe import FrameEnd, ServerEnd
from stoker.sched.request import GenerateRequest, TokenChunk
from stoker.worker.spawn import SpawnedEngine, spawn_engine

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
# An engine that has lived this long was healthy: its end starts the back-off anew.
_HEALTHY_S = 60.0
_STOP_S = 5.0

log = logs.EventLog("service")
Progress = Callable[[str, int, int], None]
TakeChunk = Callable[[TokenChunk], bool]  # False: no more of them until it is asked for


class ChunkStream:
    """One request's chunks: from the pipe's reader straight to whoever takes them. No task is woken for a token."""

    def __init__(self) -> None:
        self._early: deque[TokenChunk] = deque()  # nobody took them yet; bounded by max_new_tokens
        self._died: EngineDied | None = None
        self._take: TakeChunk | None = None
        self._held: asyncio.Future[None] | None = None  # of a relay: done when it is to return
        self.finished = False  # all was taken, or no more will come

    async def relay(self, take: TakeChunk) -> None:
        """Feeds chunks to `take` as they come, until it says no or has the last one. What it raises is raised here."""
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
        self._take, self._held = take, asyncio.get_running_loop().create_future()
        try:
            await self._held
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
        except Exception as error:  # the reader of the pipe goes on: whoever relays can answer for it
            self._let_go(error)
        else:
            self._let_go()

    def fail(self, died: EngineDied) -> None:
        """No more will come: raised behind what has come."""
        self._died = died
        if self._take is not None:
            self.finished = True
            self._let_go(died)

    def _let_go(self, error: Exception | None = None) -> None:
        self._take = None
        if self._held is None or self._held.done():
            return
        if error is None:
            self._held.set_result(None)
        else:
            self._held.set_exception(error)


class EngineListener(Protocol):
    """Whoever passes on what the engine says of itself."""

    def blocks_changed(self, events: KvEvents) -> None: ...

    def all_blocks_lost(self) -> None:
        """The engine ended, and its KV with it."""

    def load_changed(self) -> None:
        """There are new stats, or none any more."""


class NoListener:
    def blocks_changed(self, events: KvEvents) -> None: ...

    def all_blocks_lost(self) -> None: ...

    def load_changed(self) -> None: ...


class EngineService:
    def __init__(
        self,
        arguments: EngineArguments,
        *,
        environment: Mapping[str, str],
        max_open: int = 2048,
        progress: Progress = lambda stage, done, total: None,
        listener: EngineListener | None = None,
        spawned: SpawnedEngine | None = None,
    ) -> None:
        """`spawned`: an engine's process that is under way already; others are started as they are needed."""
        self._spawned = spawned
        self._listener = listener or NoListener()
        self._arguments = arguments
        self._environment = environment
        self._max_open = max_open
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
        """Returns when the engine is ready; raises what it could not start for."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep(), name="engine-keeper")

    async def stop(self) -> None:
        """What still runs ends with EngineDied: drain first."""
        self.ready = False
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._fail_streams("the worker is stopping")
        await self._end_process()

    @asynccontextmanager
    async def open(self, request: GenerateRequest) -> AsyncIterator[ChunkStream]:
        if not self.ready or self._pipe is None:
            raise Overloaded("the engine is starting", retry_after_s=2.0, code="engine_starting")
        if len(self._streams) >= self._max_open:
            raise Overloaded(f"{len(self._streams)} sequences are open, the most that this worker takes")
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
        """Lost without a word where the engine is not there."""
        if self.ready and self._pipe is not None:
            with suppress(EngineDied):
                self._pipe.send(hint)

    def release(self, lease_id: str) -> None:
        """Where the engine is not there, its leases are not either."""
        if self.ready and self._pipe is not None:
            with suppress(EngineDied):
                self._pipe.send(Release(lease_id=lease_id))

    async def _keep(self) -> None:
        """Pass on what the engine says; when it ends, start it again."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started_s = time.monotonic()
            await self._pump()
            self.ready, self.stats = False, None
            self._listener.all_blocks_lost()
            self._listener.load_changed()
            num_streams = len(self._streams)
            self._fail_streams("the engine ended while it worked on this request")
            log.error("engine_died", exit_code=await self._end_process(), streams=num_streams)
            if time.monotonic() - started_s > _HEALTHY_S:
                backoff_s = _FIRST_BACKOFF_S
            while not self.ready:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                self.num_restarts += 1
                try:
                    await self._launch()
                except (StokerError, OSError) as error:
                    log.error("engine_restart_failed", reason=str(error), next_try_s=backoff_s)
                    await self._end_process()
            log.event("engine_restarted", restarts=self.num_restarts)

    async def _launch(self) -> None:
        try:
            await self._start_process()
        except asyncio.CancelledError:
            if self._process is not None:
                self._process.kill()  # while it loads it listens to nobody
            raise

    async def _start_process(self) -> None:
        spawned, self._spawned = self._spawned, None
        if spawned is None:
            spawned = await asyncio.to_thread(spawn_engine, self._environment)
        self._process = spawned.process
        self._pipe = await ServerEnd.connect(spawned.pipe)
        # Not on the command line, which every user of the machine can read: there is a secret among them.
        self._pipe.send(self._arguments)
        while True:
            try:
                message = await self._pipe.receive()
            except FrameEnd as error:
                code = await self._end_process()
                raise EngineDied(f"the engine ended with code {code} while it started") from error
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
                    return

    async def _pump(self) -> None:
        assert self._pipe is not None
        # An engine that sends what cannot be read is as good as dead.
        with suppress(FrameEnd, msgspec.DecodeError):
            while True:
                match await self._pipe.receive():
                    case Chunks(chunks=chunks):
                        for chunk in chunks:
                            stream = self._streams.get(chunk.request_id)
                            if stream is not None:
                                stream.put(chunk)
                    case KvEvents() as events:
                        self._listener.blocks_changed(events)
                    case EngineStats() as stats:
                        self.stats = stats
                        self._listener.load_changed()

    def _fail_streams(self, message: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDied(message))

    async def _end_process(self) -> int | None:
        """Asked first, then told."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if process is None:
            return None
        if pipe is not None:
            with suppress(EngineDied):
                pipe.send(Shutdown())
            pipe.close()
        try:
            return await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await asyncio.to_thread(process.wait)
