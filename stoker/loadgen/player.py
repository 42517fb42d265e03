"""Plays sessions against a server according to a load plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from stoker.base.clock import Clock
from stoker.loadgen.client import Client
from stoker.loadgen.load import LoadPlan
from stoker.loadgen.session import LoadSession, Turn
from stoker.loadgen.stream import Delta, Record


async def play(
    sessions: Iterable[LoadSession],
    client: Client,
    load: LoadPlan,
    options: Mapping[str, Any],
    observe: Callable[[Turn, Record], None],
    clock: Clock,
    on_delta: Callable[[Delta], None] | None = None,
) -> None:
    """Play all sessions. `observe` gets each record when its request ends, so that an interrupted run keeps its records."""
    slots: AbstractAsyncContextManager[None]
    slots = nullcontext() if load.slots is None else asyncio.Semaphore(load.slots)
    begin_s = clock.now()
    async with asyncio.TaskGroup() as players:
        for session, planned_s in zip(sessions, load.starts(), strict=False):
            start_s = planned_s if planned_s is not None else session.start_s or 0.0
            wait_s = begin_s + start_s - clock.now()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            players.create_task(_play_one(session, slots, client, options, observe, on_delta))


async def _play_one(
    session: LoadSession,
    slots: AbstractAsyncContextManager[None],
    client: Client,
    options: Mapping[str, Any],
    observe: Callable[[Turn, Record], None],
    on_delta: Callable[[Delta], None] | None,
) -> None:
    answers: list[str] = []
    async with slots:
        for turn in session.turns:
            if turn.pause_s > 0:
                await asyncio.sleep(turn.pause_s)
            record = await client.send(turn, options, answers, on_delta)
            answers.append(record.text)
            observe(turn, record)
