"""Code that several commands share: listening, signals, draining, progress."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

from stoker.base.output import print_message
from stoker.checkpoint.progress import Progress

EXIT_INTERRUPTED = 130


class Drainable(Protocol):
    """A server that counts its running requests."""

    @property
    def num_running(self) -> int: ...

    async def wait_idle(self) -> None: ...


async def drained(server: Drainable, seconds: float) -> None:
    """Wait until no request runs, but at most `seconds`."""
    try:
        await asyncio.wait_for(server.wait_idle(), seconds)
    except TimeoutError:
        print_message(
            f"stoker: {server.num_running} requests still run after {seconds:g} s and are aborted", sys.stderr
        )


class Signals:
    """Counts SIGTERM and Ctrl-C. The first one starts a drain, the second one stops at once. `on_signal` is told of each."""

    def __init__(self, on_signal: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        self._arrived = asyncio.Event()
        self._on_signal = on_signal
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, number)

    def _note(self, number: int) -> None:
        self.count += 1
        self._arrived.set()
        self._on_signal(number)

    def close(self) -> None:
        """Handle the signals no more."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def wait(self) -> None:
        await self._arrived.wait()
        self._arrived.clear()

    async def first_of(self, task: asyncio.Task[Any]) -> None:
        """Wait until the task is done (its error is raised) or a signal comes (the task is cancelled)."""
        signalled = asyncio.create_task(self._arrived.wait())
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()
            await asyncio.wait({task})


def progress_line() -> Progress:
    """Show progress: on a terminal in one line that is overwritten, elsewhere as one line per stage."""
    last_stage = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last_stage
        part = f" {100 * done // total}%" if total else ""
        if sys.stderr.isatty():
            end = "\n" if total and done >= total else ""
            print_message(f"\r\033[K{stage}{part}", sys.stderr, end=end)
        elif stage != last_stage:
            print_message(stage, sys.stderr)
        last_stage = stage

    return show
