"""The process of one part.

It runs in a session of its own, so that Ctrl-C on the terminal reaches only `stoker up`, which stops the parts in order. If
`stoker up` is killed, the kernel kills its parts too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from stoker.base.orphans import die_with
from stoker.up.part_log import PartLog
from stoker.up.rotating_file import RotatingFile
from stoker.up.supervisor import StopMode

_LAST_LINES_S = 1.0  # maximum wait for the last lines; a process that it started may keep its stderr open

SIGNALS = {
    StopMode.DRAIN: (signal.SIGTERM,),
    StopMode.NOW: (signal.SIGTERM, signal.SIGINT),
    StopMode.KILL: (signal.SIGKILL,),
}


class PartProcess:
    """A running part."""

    def __init__(self, process: asyncio.subprocess.Process, log: PartLog) -> None:
        self._process = process
        self.log = log

    @staticmethod
    async def start(command: tuple[str, ...], env: Mapping[str, str], file: RotatingFile) -> PartProcess:
        """Start the command. What it writes to stderr goes to `file`."""
        log = PartLog(file)
        with log.writer():
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log.write_fd,
                env=env,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()) if sys.platform == "linux" else None,
            )
        return PartProcess(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the process has exited, and its last lines are in the log."""
        code = await self._process.wait()
        await asyncio.to_thread(self.log.finish, _LAST_LINES_S)
        return code

    def stop(self, how: StopMode) -> None:
        """Send the signals for this mode."""
        # The second signal makes a server stop at once. The two differ, because two equal signals may be delivered as one.
        for number in SIGNALS[how]:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
