"""Processes that do not outlive who started them, however that ends. On Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """To be called in the new process, after the fork. The system kills it when the thread that started it ends."""
    libc = ctypes.CDLL(None)  # before the fork: after it nothing may be loaded

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return set_death_signal
