"""Child processes that end with their parent, for whatever reason the parent ends (Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """Return a `preexec_fn` for subprocess. The kernel kills the child when the thread that started it ends.

    `parent` is the process id of the caller.
    """
    libc = ctypes.CDLL(None)  # before the fork: after a fork it is not safe to load a library

    def set_death_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)

    return set_death_signal
