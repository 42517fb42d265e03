"""A task that runs all the time goes on after an unexpected error, and says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.base import long_task
from stoker.base.long_task import TaskErrors, repeat


def test_errors_are_counted_and_the_pauses_grow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors, pauses, turns = TaskErrors(), [], 0

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(long_task.asyncio, "sleep", sleep)

    async def turn() -> None:
        nonlocal turns
        turns += 1
        if turns == 12:
            raise asyncio.CancelledError
        if turns != 9:
            raise ValueError("a defect")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(repeat("keys", turn, errors))
    assert errors.counts == {"keys": 10}
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 1.0, 2.0]
    assert [record.getMessage() for record in caplog.records] == ["task_failed"] * 10
    assert all(record.exc_info is not None for record in caplog.records)


def test_a_turn_that_works_is_run_again() -> None:
    turns: list[Any] = []

    async def turn() -> None:
        turns.append(None)
        if len(turns) == 100:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(repeat("x", turn, TaskErrors()))
    assert len(turns) == 100
