"""One part's process: started with its log, told to end, and never left behind.

It writes to its log directly, so that neither its speed nor its last words depend on us. It is in a session of its own:
Ctrl-C on the terminal is for `stoker up`, which decides who ends first. Should `stoker up` be killed, the system kills it too.
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
from stoker.up.supervisor import How

_KEPT_LOGS = 3
_LOOK_BYTES = 1 << 16

_SIGNALS = {How.ASK: (signal.SIGTERM,), How.INSIST: (signal.SIGTERM, signal.SIGINT), How.KILL: (signal.SIGKILL,)}


class PartProcess:
    def __init__(self, process: asyncio.subprocess.Process, log: LogReader) -> None:
        self._process = process
        self.log = log

    @staticmethod
    async def start(command: tuple[str, ...], env: Mapping[str, str], log_path: Path) -> PartProcess:
        log_path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
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

    def tell(self, how: How) -> None:
        # Two signals of different kinds where it must end now: two of one kind may arrive as one.
        for number in _SIGNALS[how]:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


class LogReader:
    """What a process has written since it was started, and what of that is meant for people."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = self._at = path.stat().st_size

    def new_words(self) -> list[str]:
        """Whole lines since the last look that say what it is doing while it starts: no events, and no trace of an error,
        which is shown as a whole when it has ended."""
        text, newline, _ = self._read_from(self._at).rpartition(b"\n")
        self._at += len(text) + len(newline)
        words = takewhile(lambda line: not line.startswith("Traceback"), text.decode(errors="replace").splitlines())
        return [line for line in words if line.strip() and not line.startswith(("{", " "))]

    def last_lines(self, num_lines: int) -> list[str]:
        size = self._path.stat().st_size if self._path.exists() else 0
        text = self._read_from(max(self._start, size - _LOOK_BYTES))
        return text.decode(errors="replace").splitlines()[-num_lines:]

    def _read_from(self, start: int) -> bytes:
        """Nothing of a log that somebody has removed: the process writes on, and nobody reads it."""
        try:
            with self._path.open("rb") as log:
                log.seek(start)
                return log.read(_LOOK_BYTES)
        except OSError:
            return b""


def put_aside(log_path: Path, max_bytes: float) -> None:
    """A log that has grown becomes LOG.1, the older ones move up, the oldest goes."""
    if not log_path.exists() or log_path.stat().st_size <= max_bytes:
        return
    for number in range(_KEPT_LOGS, 0, -1):
        older = log_path if number == 1 else log_path.with_name(f"{log_path.name}.{number - 1}")
        if older.exists():
            older.replace(log_path.with_name(f"{log_path.name}.{number}"))
