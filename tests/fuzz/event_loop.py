"""One event loop for all executions of a process: creating one takes longer than most executions."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end."""
    return _LOOP.run_until_complete(main)
