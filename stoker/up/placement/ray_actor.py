"""PartActor: runs the process of a part on a node of a Ray cluster. It is a Ray actor, and ends with its node.

The process ends with the actor: the kernel kills it when the actor's event loop ends, for whatever reason. When its process has
ended, an actor can start another one. So the ports and the place on the node stay reserved while a part is restarted.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from stoker.base.orphans import die_with
from stoker.up.part import PYTHON, filled
from stoker.up.placement.memory_files import MemoryFiles
from stoker.up.placement.ray_nodes import own_address
from stoker.up.ports import ReservedPorts
from stoker.up.process import SIGNALS
from stoker.up.supervisor import StopMode

_MAX_LOG_BYTES = 1 << 20  # of lines that `stoker up` has not fetched
_READ_BYTES = 1 << 16


class PartActor:
    """All methods run on one event loop."""

    def __init__(self) -> None:
        self._ports = ReservedPorts()
        self._files = MemoryFiles()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines = bytearray()
        self._changed = asyncio.Event()

    async def reserve(self, ports: Sequence[int]) -> tuple[str, list[int]]:
        """Return this machine's address, and ports that stay reserved while the actor lives: these, or the next free ones."""
        host = own_address(importlib.import_module("ray"))
        return host, [self._ports.take_or_next(host, port) for port in ports]

    async def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        files: Mapping[str, bytes],
        texts: Mapping[str, str],
        values: Mapping[str, str],
    ) -> int:
        """Start the process, and return its id.

        An argument that is a name in `values`, `files` or `texts` becomes the value, or the path of the file. Names in `texts` too.
        """
        self._files.close()
        self._lines.clear()
        self._changed.clear()
        known = {PYTHON: sys.executable, **values}
        known |= {name: self._files.create(name, content) for name, content in files.items()}
        known |= {name: self._files.create(name, filled(text, known).encode()) for name, text in texts.items()}
        self._process = await asyncio.create_subprocess_exec(
            *(known.get(argument, argument) for argument in command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
        )
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process.pid

    async def write(self, file: str, text: str) -> None:
        """Replace the content of a file of the process."""
        self._files.write(file, text.encode())

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
