"""PartActor: runs one process of a part on a node of a Ray cluster. It is a Ray actor, and ends with its node.

The process ends with the actor: the kernel kills it when the actor's event loop ends, for whatever reason.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from stoker.base.orphans import die_with
from stoker.up.plan import PYTHON
from stoker.up.ports import ReservedPorts
from stoker.up.process import SIGNALS
from stoker.up.supervisor import StopMode

_MAX_LOG_BYTES = 1 << 20  # of lines that `stoker up` has not fetched
_READ_BYTES = 1 << 16


class PartActor:
    """All methods run on one event loop."""

    def __init__(self) -> None:
        self._ports = ReservedPorts()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines = bytearray()
        self._changed = asyncio.Event()

    async def reserve(self, num_ports: int) -> tuple[str, list[int]]:
        """Return this machine's address, and free ports that stay reserved while the actor lives."""
        ray: Any = importlib.import_module("ray")
        host = str(ray.util.get_node_ip_address())
        return host, [self._ports.take(host, 0) for _ in range(num_ports)]

    async def start(self, command: Sequence[str], env: Mapping[str, str], files: Mapping[str, bytes]) -> int:
        """Start the process, and return its id. An argument that is a name in `files` becomes the path of a file with these
        bytes. The file is in memory and ends with the process: a secret must not stay on the disk of a node that is lost."""
        with ExitStack() as opened:
            fds = {name: _memory_file(content) for name, content in files.items()}
            for fd in fds.values():
                opened.callback(os.close, fd)
            values = {PYTHON: sys.executable} | {name: f"/proc/self/fd/{fd}" for name, fd in fds.items()}
            self._process = await asyncio.create_subprocess_exec(
                *(values.get(argument, argument) for argument in command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **env},
                pass_fds=list(fds.values()),
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
            )
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process.pid

    async def poll(self, wait_s: float) -> tuple[bytes, int | None]:
        """Return what the process has written since the last call, and its exit code, None while it runs. Waits at most `wait_s`
        for news."""
        assert self._process is not None
        assert self._reading is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), wait_s)
        self._changed.clear()
        lines = bytes(self._lines)
        self._lines.clear()
        if not self._reading.done():
            return lines, None
        return lines, self._process.returncode

    async def stop(self, how: int) -> None:
        for number in SIGNALS[StopMode(how)]:
            with suppress(ProcessLookupError):
                if self._process is not None:
                    self._process.send_signal(number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(_READ_BYTES):
            self._lines += data
            del self._lines[:-_MAX_LOG_BYTES]
            self._changed.set()
        await process.wait()
        self._changed.set()


def _memory_file(content: bytes) -> int:
    """Return the file descriptor of a new file in memory."""
    fd = os.memfd_create("stoker")
    os.write(fd, content)
    return fd
