"""The process of one part, and its log file.

The process writes to its log file directly, so neither its speed nor its last lines depend on `stoker up`. It runs in a session of
its own, so that Ctrl-C on the terminal reaches only `stoker up`, which stops the parts in order. If `stoker up` is killed, the
kernel kills its parts too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from stoker.base.orphans import die_with
from stoker.up.supervisor import StopMode

_KEPT_LOGS = 3
_TAIL_BYTES = 1 << 16

_SIGNALS = {
    StopMode.DRAIN: (signal.SIGTERM,),
    StopMode.NOW: (signal.SIGTERM, signal.SIGINT),
    StopMode.KILL: (signal.SIGKILL,),
}


class PartProcess:
    """A running part."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogReader) -> None:
        self._process = process
        self.log = log

    @staticmethod
    async def start(command: tuple[str, ...], env: Mapping[str, str], log_path: Path) -> PartProcess:
        log_path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been removed since the start
        with log_path.open("ab") as log:
            reader = LogReader(log_path)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
            )
        return PartProcess(process, reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def stop(self, how: StopMode) -> None:
        """Send the signals for this mode."""
        # The second signal makes a server stop at once. The two differ, because two equal signals may be delivered as one.
        for number in _SIGNALS[how]:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


class LogReader:
    """Reads what a process has written to its log file since it was started."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = self._at = path.stat().st_size

    def new_lines(self) -> list[str]:
        """Return the complete progress lines since the last call.

        JSON events are left out. So are tracebacks, which are shown when the process has exited.
        """
        text, newline, _ = self._read_from(self._at).rpartition(b"\n")
        self._at += len(text) + len(newline)
        words = takewhile(lambda line: not line.startswith("Traceback"), text.decode(errors="replace").splitlines())
        return [line for line in words if line.strip() and not line.startswith(("{", " "))]

    def last_lines(self, num_lines: int) -> list[str]:
        size = self._path.stat().st_size if self._path.exists() else 0
        text = self._read_from(max(self._start, size - _TAIL_BYTES))
        return text.decode(errors="replace").splitlines()[-num_lines:]

    def _read_from(self, start: int) -> bytes:
        """Return up to `_TAIL_BYTES` from `start`, or b"" if the log file was removed (the process still writes to it)."""
        try:
            with self._path.open("rb") as log:
                log.seek(start)
                return log.read(_TAIL_BYTES)
        except OSError:
            return b""


def rotate_log(log_path: Path, max_bytes: float) -> None:
    """Rename a large log file to LOG.1, after renaming LOG.1 to LOG.2 and so on. The oldest is deleted."""
    if not log_path.exists() or log_path.stat().st_size <= max_bytes:
        return
    for number in range(_KEPT_LOGS, 0, -1):
        older = log_path if number == 1 else log_path.with_name(f"{log_path.name}.{number - 1}")
        if older.exists():
            older.replace(log_path.with_name(f"{log_path.name}.{number}"))
