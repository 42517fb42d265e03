"""Runs the processes of one gateway: starts them, restarts one that ends, and passes signals on.

All processes listen on the same port (SO_REUSEPORT), and the kernel spreads connections over them. A process that is killed loses
only its own streams. The first process starts alone, because it creates the tables of the store.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.base.bound_socket import shared_socket
from stoker.base.errors import ConfigError
from stoker.base.log import EventLog
from stoker.base.orphans import die_with

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_HEALTHY_S = 10.0  # the restart backoff resets after this uptime
_START_S = 120.0
_POLL_S = 0.05

log = EventLog("processes")


@dataclass(slots=True, eq=False)
class GatewayProcess:
    """One process, over all its restarts."""

    number: int
    handle: subprocess.Popen[bytes] | None = None
    pause_s: float = _FIRST_PAUSE_S
    restarts: int = 0
    started_s: float = field(default=0.0)


class ProcessSupervisor:
    """Supervises processes. `command(number, ports, is_restart)` is the command line of one.

    `ports` are the processes' own ports on 127.0.0.1. They are held while this object lives, so that a restarted process keeps
    its port and no other program gets it.
    """

    def __init__(self, count: int, command: Callable[[int, Sequence[int], bool], Sequence[str]]) -> None:
        self._command = command
        self._held = [shared_socket("127.0.0.1", 0) for _ in range(count)]
        self.ports = [one.getsockname()[1] for one in self._held]
        self._processes = [GatewayProcess(number) for number in range(count)]
        self._stopping = False

    async def run(self) -> int:
        """Run until `stop` was called and all processes have ended. Return the exit status."""
        first, *others = self._processes
        self._start(first)
        status = await self._until_listening(first)
        if status is not None:
            return status
        if self._stopping:
            others = []  # a signal came while the first one started: no other would get it
        for one in others:
            self._start(one)
        try:
            await asyncio.gather(*(self._keep_running(one) for one in (first, *others)))
        finally:
            self.kill()
        return 0

    def stop(self, signal_number: int) -> None:
        """Pass a signal on. Processes that end from now on are not restarted."""
        self._stopping = True
        for one in self._processes:
            if one.handle is not None and one.handle.poll() is None:
                one.handle.send_signal(signal_number)

    def kill(self) -> None:
        for one in self._processes:
            if one.handle is not None and one.handle.poll() is None:
                one.handle.kill()
                one.handle.wait()
        for held in self._held:
            held.close()

    def _start(self, one: GatewayProcess) -> None:
        command = self._command(one.number, self.ports, one.restarts > 0)
        # A session of its own: Ctrl-C in a terminal must reach it once, through this process.
        one.handle = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with(os.getpid()))
        one.started_s = asyncio.get_running_loop().time()

    async def _until_listening(self, one: GatewayProcess) -> int | None:
        """Wait until a process listens. Return its exit status if it ends first."""
        assert one.handle is not None
        deadline_s = one.started_s + _START_S
        while True:
            status = one.handle.poll()
            if status is not None:
                return status
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.ports[one.number])
            except OSError:
                if asyncio.get_running_loop().time() > deadline_s:
                    self.kill()
                    raise ConfigError(f"the first gateway process does not listen after {_START_S:g} s") from None
                await asyncio.sleep(_POLL_S)
            else:
                writer.close()
                return None

    async def _keep_running(self, one: GatewayProcess) -> None:
        loop = asyncio.get_running_loop()
        while True:
            assert one.handle is not None
            status = one.handle.poll()
            if status is None:
                await asyncio.sleep(_POLL_S)
                continue
            if self._stopping:
                return
            if loop.time() - one.started_s > _HEALTHY_S:
                one.pause_s = _FIRST_PAUSE_S
            log.error("process_ended", process=one.number, status=status, restart_in_s=one.pause_s)
            await asyncio.sleep(one.pause_s)
            if self._stopping:
                return
            one.pause_s = min(2 * one.pause_s, _LONGEST_PAUSE_S)
            one.restarts += 1
            self._start(one)
