"""How tests stop another process, as if its machine hangs: its connections stay open, and nothing arrives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LONG_S = 30.0


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes; none of their threads runs inside the context. The signal alone is not enough: threads continue
    until one of them has received it."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + _LONG_S
        while not all(_stands_still(pid) for pid in pids):
            assert time.monotonic() < deadline_s, f"{pids} did not stop"
            time.sleep(0.001)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            state = (thread / "stat").read_text().rpartition(") ")[2][0]
            if state not in "tTZX":
                return False
    return True
