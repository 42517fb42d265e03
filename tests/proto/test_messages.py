"""Messages come out of the pipe as they went in, and a gateway reads what a worker writes."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from stoker.base.ids import BlockKey, RequestId, WorkerId
from stoker.proto.messages import BlocksForgotten, BlocksNamed, Chunks, KvEvents, WorkerInfo, WorkerRegistration
from stoker.proto.pipe import EngineEnd, ServerEnd
from stoker.sched.request import Finish, TokenChunks, TokenLogprobs, TokenUsage

KEYS = [BlockKey(bytes([i]) * 16) for i in range(3)]


def test_events_and_chunks_pass_the_pipe_in_order() -> None:
    events = KvEvents(
        events=[
            BlocksNamed(keys=KEYS[:2], parent=None, token_ids=list(range(8)), salt="ab"),
            BlocksNamed(keys=KEYS[2:], parent=KEYS[1], token_ids=[2**31 - 1] * 4),
            BlocksForgotten(keys=[KEYS[0]]),
        ]
    )
    chunks = TokenChunks()
    chunks.add(RequestId("q"), [4, 5])
    chunks.add(RequestId("r"), [1], TokenUsage(3, 2, 1), [TokenLogprobs(1, -0.5, [2], [-0.1])], Finish("stop", 1))
    messages = [Chunks(chunks=chunks), events, Chunks(chunks=TokenChunks())]

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            engine = EngineEnd(theirs)
            server = await ServerEnd.connect(ours)
            for message in messages:
                engine.send(message)
            assert [await server.receive() for _ in messages] == messages
            server.close()

    asyncio.run(main())


def test_a_registration_is_the_worker_info_with_its_url() -> None:
    info = WorkerInfo(
        worker_id=WorkerId("w"),
        role="unified",
        models=["m"],
        fingerprint="f",
        block_tokens=16,
        num_blocks=4,
        max_model_tokens=64,
        events=None,
        replay=None,
        tokenizer="t",
    )
    word = WorkerRegistration(url="http://x:1", **msgspec.structs.asdict(info))
    fields = msgspec.json.decode(msgspec.json.encode(word))
    assert fields == msgspec.to_builtins(info) | {"url": "http://x:1", "moving": False}
    assert msgspec.json.decode(msgspec.json.encode(word), type=WorkerInfo) == info, (
        "a newer worker's fields are passed over"
    )
