"""Plays sessions against a server as a load says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from stoker.base.clock import Clock
from stoker.loadgen.client import Client
from stoker.loadgen.load import Load
from stoker.loadgen.session import Session
from stoker.loadgen.stream import Record


async def play(
    sessions: Iterable[Session],
    client: Client,
    load: Load,
    options: Mapping[str, Any],
    observe: Callable[[Record], None],
    clock: Clock,
) -> None:
    """`observe` gets each record as it ends, so that a run cut short still has what it saw."""
    slots: AbstractAsyncContextManager[None]
    slots = nullcontext() if load.slots is None else asyncio.Semaphore(load.slots)
    begin_s = clock.now()
    async with asyncio.TaskGroup() as players:
        for session, planned_s in zip(sessions, load.starts(), strict=False):
            start_s = planned_s if planned_s is not None else session.start_s or 0.0
            wait_s = begin_s + start_s - clock.now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            players.create_task(_play_one(session, slots, client, options, observe))


async def _play_one(
    session: Session,
    slots: AbstractAsyncContextManager[None],
    client: Client,
    options: Mapping[str, Any],
    observe: Callable[[Record], None],
) -> None:
    answers: list[str] = []
    async with slots:
        for turn in session.turns:
            if turn.pause_s > 0:
                await asyncio.sleep(turn.pause_s)
            record = await client.send(turn, options, answers)
            answers.append(record.text)
            observe(record)
