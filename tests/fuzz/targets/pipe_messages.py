"""Messages on the pipe between the server process and the engine process, in both directions."""

from __future__ import annotations

import asyncio
import random
import socket
import struct

import msgspec

from stoker.base.ids import RequestId
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.messages import Add, Cancel, Chunks, EngineInfo, LoadProgress, Prefetch, Release
from stoker.proto.pipe import EngineEnd, FrameEnd, ServerEnd
from stoker.sched.request import GenerateRequest, GrammarSpec, SamplingParams, TokenChunks
from tests.fuzz.event_loop import run
from tests.fuzz.target import FuzzTarget


def execute(data: bytes, rng: random.Random) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        sent = ours.send(data) if data else 0
        ours.shutdown(socket.SHUT_WR)
        end = EngineEnd(theirs)
        try:
            while True:
                end.receive()
        except (FrameEnd, msgspec.DecodeError):
            pass
        finally:
            end._reader.close()
    run(_read_as_server(data[:sent]))


async def _read_as_server(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    end = ServerEnd(reader, None)  # type: ignore[arg-type]  # nothing is written
    try:
        while True:
            await end.receive()
    except (FrameEnd, msgspec.DecodeError):
        return


def seeds() -> list[bytes]:
    ticket = KvTicket("e", "h:1", "l", 5, 1.0)
    sampling = SamplingParams(grammar=GrammarSpec("regex", "a+"))
    request = GenerateRequest(RequestId("r"), [1, 2, 3], 3, sampling, 8, ticket=ticket, prediction=(4, 5))
    messages: list[object] = [
        Add(request=request),
        Cancel(request_id=RequestId("r")),
        Prefetch(token_ids=[1, 2], ticket=ticket),
        Release(lease_id="l"),
        LoadProgress(stage="s", done=1, total=2),
        Chunks(chunks=TokenChunks()),
        EngineInfo(
            model_fingerprint="f", device="cpu", dtype="d", vocab_size=1, max_model_tokens=1, block_tokens=1,
            num_blocks=1, max_rows=1, load_s=0.0,
        ),
    ]  # fmt: skip
    frames = [struct.pack("<I", len(payload)) + payload for payload in map(msgspec.msgpack.encode, messages)]
    return [*frames, b"".join(frames)]


def repair(data: bytes) -> bytes:
    """Make the first frame's length that of the rest."""
    return struct.pack("<I", max(0, len(data) - 4)) + data[4:]


TARGET = FuzzTarget(execute, seeds, tokens=[b"\xa4type", b"\xa3Add", b"\xdd\xff\xff\xff\xff"], repair=repair)
