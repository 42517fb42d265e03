"""RayPart: a part on one or several nodes of a Ray cluster: its processes, each in an actor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from stoker.up.part import FleetPart, NodeRequest
from stoker.up.part_log import PartLog
from stoker.up.placement.ray_lease import RayLease, resolved
from stoker.up.supervisor import StopMode

_POLL_S = 5.0  # a call of an actor that has no news lasts this long
_CUT_OFF_S, _RETRY_S = 10.0, 0.5  # Ray declares an actor dead within seconds, if its node or process is gone
_KILL_S = 5.0  # maximum time until the processes are gone; then the actors are ended, too
_LAST_LINES_S = 1.0
_LOST = 1  # the exit code of a part whose node is lost


class RayPart:
    """It has started to run when it is created. `keep` gets its lease when its process has ended and the nodes are still there."""

    def __init__(
        self,
        part: FleetPart,
        request: NodeRequest,
        files: Mapping[str, bytes],
        log: PartLog,
        lease: RayLease,
        ray: Any,
        keep: Callable[[RayLease], None],
    ) -> None:
        self._part, self._log, self._lease, self._ray, self._keep = part, log, lease, ray, keep
        self._files, self._texts = files, {**request.texts}
        self._log_fd = os.dup(log.write_fd)
        self._pids: list[int] = []
        self._is_stopping = self._is_whole = False
        self._calls: set[asyncio.Task[None]] = set()
        self._life = asyncio.create_task(self._run(), name=f"ray-{part.name}")

    @property
    def log(self) -> PartLog:
        return self._log

    @property
    def part(self) -> FleetPart:
        return self._part

    @property
    def where(self) -> str:
        return ", ".join(f"{pid} on {host}" for pid, host in zip(self._pids, self.nodes, strict=False)) or "Ray"

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._lease.hosts

    @property
    def pid(self) -> int | None:
        return None

    async def wait(self) -> int:
        try:
            code = await self._life
        except asyncio.CancelledError:
            if not self._life.cancelled():
                raise
            code = -9
        finally:
            self._let_go()
        await asyncio.to_thread(self._log.finish, _LAST_LINES_S)
        return code

    def write(self, file: str, text: str) -> None:
        self._texts[file] = text
        if self._pids:
            for actor in self._lease.actors:
                self._call(self._send(actor, file))

    def stop(self, how: StopMode) -> None:
        self._is_stopping = True
        if not self._pids:
            self._life.cancel()
        elif how is StopMode.KILL:
            self._call(self._kill())
        else:  # the head of a worker on several nodes stops the others
            self._lease.actors[0].stop.remote(int(how))

    async def _run(self) -> int:
        errors = self._ray.exceptions
        try:
            await self._lease.acquire(self._say)
            await self._start_processes()
            code = await self._watch()
            self._is_whole = True
            return code
        except errors.RayTaskError as error:  # for example, a command that is not there
            self._say(f"it cannot be started on {', '.join(self.nodes)}: {error.cause}")
        except errors.RayError as error:
            self._say(f"a Ray node or actor is lost: {str(error).strip().splitlines()[0]}")
        return _LOST

    async def _start_processes(self) -> None:
        part, texts, pids = self._part, dict(self._texts), []
        for number, actor in enumerate(self._lease.actors):
            values = self._lease.values(number)
            pids.append(await actor.start.remote(part.command, dict(part.env), self._files, texts, values))
        self._part, self._pids = part.placed(self._lease.values(0)), pids
        for file, text in self._texts.items():
            if texts[file] != text:  # it was written meanwhile
                self.write(file, text)

    async def _watch(self) -> int:
        """Return the exit code of the first process that ends; of the head, if the part is being stopped."""
        watches = [asyncio.create_task(self._follow(actor)) for actor in self._lease.actors]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return await watches[0] if self._is_stopping else done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _follow(self, actor: Any) -> int:
        """Return the exit code of a process."""
        while True:
            lines, code = await self._patiently(lambda: actor.poll.remote(_POLL_S))
            if lines:
                os.write(self._log_fd, lines)
            if code is not None:
                return int(code)

    async def _send(self, actor: Any, file: str) -> None:
        with suppress(self._ray.exceptions.RayError):  # a part whose actor is lost starts again with the new text
            await self._patiently(lambda: actor.write.remote(file, self._texts[file]))

    async def _patiently(self, call: Callable[[], Any]) -> Any:
        """Return the result of an actor's method. An actor that cannot be reached may only be cut off for a moment."""
        lost_s: float | None = None
        while True:
            try:
                return await resolved(call())
            except self._ray.exceptions.ActorUnavailableError:
                lost_s = lost_s or time.monotonic()
                if time.monotonic() - lost_s > _CUT_OFF_S:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _kill(self) -> None:
        """Kill the processes. An actor that does not answer is ended itself."""
        for actor in self._lease.actors:
            actor.stop.remote(int(StopMode.KILL))
        await asyncio.wait({self._life}, timeout=_KILL_S)
        self._life.cancel()

    def _call(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _say(self, text: str) -> None:
        os.write(self._log_fd, f"stoker up: {text}\n".encode())

    def _let_go(self) -> None:
        os.close(self._log_fd)
        for call in self._calls:
            call.cancel()
        if self._is_whole:
            self._keep(self._lease)
        else:
            self._lease.release()
