"""KV event messages and replays, as a gateway receives them from a worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from stoker.gateway.watch.rekey import Rekeyer, StoreBlocks
from stoker.proto.events import (
    AllBlocksCleared,
    BadEvents,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
    message_frames,
    read_message,
    read_replay,
    read_replay_request,
    replay_frames,
)
from tests.fuzz.target import FuzzTarget

_BREAK = b"\xff|frame|"


class _Index:
    """Counts what the translator writes."""

    def __init__(self) -> None:
        self.num_keys = 0

    def stored(self, keys: Sequence[int], medium: str) -> None:
        self.num_keys += len(keys)

    def removed(self, keys: Sequence[int], medium: str) -> None:
        pass

    def cleared(self) -> None:
        pass


def execute(data: bytes, rng: random.Random) -> None:
    frames = data.split(_BREAK)
    for read in (read_message, read_replay, read_replay_request):
        try:
            read(frames)
        except BadEvents:
            continue
    index = _Index()
    stores = {"CPU": StoreBlocks()} if rng.random() < 0.5 else {}
    rekeyer = Rekeyer(index, 4, hashes_salts=rng.random() < 0.5, stores=stores, max_blocks=1000)
    for frame in frames:
        try:
            rekeyer.apply(decode_batch(frame).events)
        except (BadEvents, OverflowError):  # what the follower expects
            continue
    assert index.num_keys <= len(data)


def seeds() -> list[bytes]:
    stored = BlockStored(
        block_hashes=[b"h1", 2],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        extra_keys=[["s"], None],
    )
    child = BlockStored(block_hashes=[3], parent_block_hash=2, token_ids=[1, 2], block_size=2, medium="CPU")
    removed = BlockRemoved(block_hashes=[b"h1"], medium="CPU")
    batch = encode_batch(EventBatch(1.5, [stored, child, removed, AllBlocksCleared()]))
    arrays = msgspec.msgpack.encode(
        [1.5, [["BlockStored", [5], None, [1, 2, 3, 4], 4, None, "GPU", {"cache_salt": "x"}], ["BlockRemoved", [5]]], 0]
    )
    unknown = msgspec.msgpack.encode([1.5, [{"type": "Other"}, ["Other", 1], 7, None, "text"], 0])
    return [
        batch,
        arrays,
        unknown,
        _BREAK.join(message_frames(b"kv", 7, batch)),
        _BREAK.join(replay_frames(b"id", b"kv", 7, arrays)),
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    tokens=[
        _BREAK,
        b"\xabBlockStored",
        b"\xacBlockRemoved",
        b"\xa4type",
        b"\xdd\xff\xff\xff\xff",
        b"\xc0",
        b"\x80",
        b"\x90",
    ],
)
