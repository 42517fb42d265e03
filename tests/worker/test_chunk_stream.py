"""Chunks are passed on once and in order, and a failure affects only its own stream."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from stoker.base.errors import EngineDied
from stoker.base.ids import RequestId
from stoker.sched.request import Finish, TokenChunk
from stoker.worker.service import ChunkStream


def chunk(token_id: int, last: bool = False) -> TokenChunk:
    return TokenChunk(RequestId("r"), [token_id], finish=Finish("length") if last else None)


class Taker:
    """Returns False after every `portion` chunks."""

    def __init__(self, portion: int = 1000) -> None:
        self.portion = portion
        self.got: list[int] = []

    def take(self, chunk: TokenChunk) -> bool:
        self.got += chunk.token_ids
        return len(self.got) % self.portion != 0


def test_chunks_are_passed_on_without_waking_a_task() -> None:
    async def main() -> None:
        stream, taker = ChunkStream(), Taker()
        relay = asyncio.create_task(stream.relay(taker.take))
        await asyncio.sleep(0)
        for i in range(3):
            stream.put(chunk(i))
            assert taker.got == list(range(i + 1))  # without running a task
        stream.put(chunk(3, last=True))
        await relay
        assert stream.finished
        with pytest.raises(EngineDied):
            await stream.relay(taker.take)

    asyncio.run(main())


@pytest.mark.parametrize("portion", [1, 2, 3, 1000])
@pytest.mark.parametrize("early", [0, 1, 5, 9])
def test_every_chunk_arrives_once_and_in_order(portion: int, early: int) -> None:
    async def main() -> None:
        stream, taker = ChunkStream(), Taker(portion)
        for i in range(early):
            stream.put(chunk(i))

        async def relay_all() -> None:
            while not stream.finished:
                await stream.relay(taker.take)
                await asyncio.sleep(0)  # more chunks arrive meanwhile

        relay = asyncio.create_task(relay_all())
        await asyncio.sleep(0)
        for i in range(early, 10):
            stream.put(chunk(i, last=i == 9))
            if i % 4 == 0:
                await asyncio.sleep(0)
        await relay
        assert taker.got == list(range(10))

    asyncio.run(main())


def test_relay_raises_what_the_taker_raises() -> None:
    async def main() -> None:
        def take(chunk: TokenChunk) -> bool:
            raise ValueError("no such token")

        stream = ChunkStream()
        relay = asyncio.create_task(stream.relay(take))
        await asyncio.sleep(0)
        stream.put(chunk(1))  # the reader of the pipe continues
        stream.put(chunk(2))
        with pytest.raises(ValueError, match="no such token"):
            await relay
        assert not stream.finished  # so that the sequence is cancelled

    asyncio.run(main())


@pytest.mark.parametrize("early", [True, False])
def test_relay_raises_after_the_last_chunks_of_a_dead_engine(early: bool) -> None:
    async def main() -> None:
        stream, taker = ChunkStream(), Taker()
        relay = asyncio.create_task(stream.relay(taker.take))
        if not early:
            await asyncio.sleep(0)
        stream.put(chunk(1))
        stream.fail(EngineDied("gone"))
        with pytest.raises(EngineDied, match="gone"):
            await relay
        assert taker.got == [1]
        assert stream.finished  # the engine need not be told of a cancellation

    asyncio.run(main())


def test_a_cancelled_relay_takes_no_more_chunks() -> None:
    async def main() -> None:
        stream, taker = ChunkStream(), Taker()
        relay = asyncio.create_task(stream.relay(taker.take))
        await asyncio.sleep(0)
        relay.cancel()
        stream.put(chunk(1, last=True))  # arrived before the task saw its cancellation
        with suppress(asyncio.CancelledError):
            await relay
        stream.put(chunk(2))
        assert taker.got == [1]

    asyncio.run(main())
