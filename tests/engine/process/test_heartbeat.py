"""The engine's heartbeat through the pipe: it goes on while the loop is busy, and tells whether the loop advances."""

from __future__ import annotations

import asyncio
import socket
import threading

from stoker.engine.process.heartbeat import Heartbeat, LoopProgress
from stoker.proto.messages import Beat, LoadProgress
from stoker.proto.pipe import EngineEnd, ServerEnd


def test_beats_tell_a_busy_loop_from_an_idle_one() -> None:
    ours, theirs = socket.socketpair()
    progress = LoopProgress()

    async def life() -> None:
        server = await ServerEnd.connect(ours)
        with Heartbeat(EngineEnd(theirs), progress):
            assert await server.receive() == Beat(round=0, busy=False)
            progress.begin()
            assert await server.receive() == Beat(round=1, busy=True)
            progress.end()
            progress.begin()
            progress.end()
            assert await server.receive() == Beat(round=2, busy=False)
        server.close()

    asyncio.run(life())
    theirs.close()


def test_frames_of_two_threads_are_not_mixed() -> None:
    ours, theirs = socket.socketpair()
    pipe = EngineEnd(theirs)
    long = LoadProgress(stage="x" * 1_000_000, done=1, total=2)  # takes several writes
    threads = [
        threading.Thread(target=lambda: [pipe.send(long) for _ in range(10)]),
        threading.Thread(target=lambda: [pipe.send(Beat(round=number, busy=True)) for number in range(200)]),
    ]

    async def life() -> None:
        server = await ServerEnd.connect(ours)
        for thread in threads:
            thread.start()
        messages = [await server.receive() for _ in range(210)]
        assert [one for one in messages if isinstance(one, LoadProgress)] == [long] * 10
        assert [one.round for one in messages if isinstance(one, Beat)] == list(range(200))
        server.close()

    asyncio.run(life())
    for thread in threads:
        thread.join()
    theirs.close()
