"""How tests wait in an event loop: for a condition, never for a fixed time, because a machine may stall at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONG_S = 30.0  # for what comes at once: only a failing test waits this long


async def until(condition: Callable[[], bool], every_s: float = 0.002) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110 - what is watched is the code under test, which has no event for it
            await asyncio.sleep(every_s)


async def turns(number: int = 20) -> None:
    """Let the loop run until everything that can happen by itself has happened: each socket was polled this many times."""
    for _ in range(number):
        await asyncio.sleep(0.001)


async def settled(amount: Callable[[], int], num_turns: int = 150) -> int:
    """Return the amount once it has not changed for some turns of the loop."""
    seen, num_same = amount(), 0
    for _ in range(100 * num_turns):
        await turns(1)
        now = amount()
        seen, num_same = now, num_same + 1 if now == seen else 0
        if num_same == num_turns:
            return seen
    raise AssertionError(f"still changing: {seen}")
