"""KV events in vLLM's public ZMQ format: what a worker says about the blocks that it holds, and how the frames look.

A message is [topic, sequence number, batch]; a batch is the msgpack array [time, events, data-parallel rank], an event a
map with its `type`. SGLang and older vLLM write events as arrays, so both are read; ours are always maps. Whoever missed
messages sends the first number that it lacks to the worker's ROUTER socket and gets them again, up to the end mark.
This file knows the bytes; it refuses to know what anybody makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.base.errors import StokerError

KV_TOPIC = b"kv"
LOAD_TOPIC = b"load"  # our workers' load reports travel on the same socket

BlockHash = bytes | int
END_SEQ = -1

_SEQ_BYTES = 8


class BadEvents(StokerError):
    """A message that is not what its sender's format promises: what it said is lost, as if it had never arrived."""

    code = "bad_kv_events"


class BlockStored(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Blocks of one chain, in order. `token_ids` are those of all of them; an offload's copy may leave them out."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # per block: salt and whatever else its hash has in it
    cache_salt: str | None = None  # SGLang says a chain's salt here
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Every block of every medium."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


# ---- other people's forms


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    sixth: Any = None  # vLLM: lora_name; SGLang: a map with the salt
    extra_keys: Any = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_KNOWN_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_encoder = msgspec.msgpack.Encoder()
_whole = msgspec.msgpack.Decoder(EventBatch)
_batch = msgspec.msgpack.Decoder(_RawBatch)
_map = msgspec.msgpack.Decoder(KvEvent)
_array: msgspec.msgpack.Decoder[_StoredArray | _RemovedArray | _ClearedArray] = msgspec.msgpack.Decoder(
    _StoredArray | _RemovedArray | _ClearedArray
)


def encode_batch(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(data: bytes) -> EventBatch:
    """Both forms; fields and types of events that are not known here are passed over. Raises BadEvents."""
    try:
        return _whole.decode(data)  # the common case: a batch of maps, all of them known
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        batch = _batch.decode(data)
        found = [_event(raw) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise BadEvents(f"a KV event batch of {len(data)} bytes cannot be read: {wrong}") from None
    return EventBatch(batch.ts, [event for event in found if event is not None], batch.data_parallel_rank)


def _event(raw: msgspec.Raw) -> KvEvent | None:
    first = bytes(memoryview(raw)[:1])[0]
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    try:
        return _map.decode(raw) if is_map else _from_array(_array.decode(raw))
    except msgspec.ValidationError:
        plain = msgspec.msgpack.decode(raw)
        kind = plain.get("type") if isinstance(plain, dict) else plain[0] if plain else None
        if kind in _KNOWN_TYPES:
            raise
        return None


def _from_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> KvEvent:
    match event:
        case _StoredArray():
            salt = event.sixth.get("cache_salt") if isinstance(event.sixth, dict) else None
            return BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=event.medium,
                lora_name=event.sixth if isinstance(event.sixth, str) else None,
                extra_keys=event.extra_keys if isinstance(event.extra_keys, list) else None,
                cache_salt=salt,
                group_idx=event.group_idx,
                kv_cache_spec_kind=event.kv_cache_spec_kind,
                kv_cache_spec_sliding_window=event.kv_cache_spec_sliding_window,
            )
        case _RemovedArray():
            return BlockRemoved(block_hashes=event.block_hashes, medium=event.medium, group_idx=event.group_idx)
        case _ClearedArray():
            return AllBlocksCleared()


# ---- frames


@dataclass(frozen=True, slots=True)
class Message:
    topic: bytes
    seq: int
    payload: bytes

    @property
    def is_end(self) -> bool:
        return self.seq == END_SEQ


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(_SEQ_BYTES, "big", signed=True)


def decode_seq(frame: bytes) -> int:
    if len(frame) != _SEQ_BYTES:
        raise BadEvents(f"a sequence number of {len(frame)} bytes; it has {_SEQ_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def message_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """What a worker publishes."""
    return [topic, encode_seq(seq), payload]


def read_message(frames: Sequence[bytes]) -> Message:
    if len(frames) != 3:
        raise BadEvents(f"a published message of {len(frames)} frames; it has topic, number and batch")
    return Message(bytes(frames[0]), decode_seq(frames[1]), bytes(frames[2]))


def replay_request(start_seq: int) -> list[bytes]:
    """From a DEALER socket: the empty frame is what a REQ socket would have put in front."""
    return [b"", encode_seq(start_seq)]


def read_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """At the ROUTER: who asks, and from which number on."""
    if len(frames) != 3 or frames[1]:
        raise BadEvents(f"a replay request of {len(frames)} frames; it has asker, an empty one and a number")
    return bytes(frames[0]), decode_seq(frames[2])


def replay_frames(asker: bytes, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """At the ROUTER: one message again, as vLLM sends it."""
    return [asker, b"", topic, encode_seq(seq), payload]


def replay_end_frames(asker: bytes, topic: bytes = KV_TOPIC) -> list[bytes]:
    return replay_frames(asker, topic, END_SEQ, b"")


def read_replay(frames: Sequence[bytes]) -> Message:
    """At the DEALER. With the topic (vLLM, ours) or without (SGLang); the empty frame may be gone already."""
    parts = list(frames[1:]) if frames and not frames[0] and len(frames) > 2 else list(frames)
    if len(parts) == 2:
        parts.insert(0, b"")
    return read_message(parts)
