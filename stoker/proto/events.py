"""KV events in vLLM's public ZMQ format: which blocks a worker stores and removes.

A message has the frames [topic, sequence number, batch]. A batch is the msgpack array [time, events, data-parallel rank].
An event is a map with its `type`. SGLang and older versions of vLLM write events as arrays: both forms are read, and maps
are written. A subscriber that missed messages sends the first missing number to the worker's ROUTER socket and gets them
again, up to an end marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stoker.base.errors import StokerError

KV_TOPIC = b"kv"
LOAD_TOPIC = b"load"  # our workers publish their load reports on the same socket

BlockHash = bytes | int
END_SEQ = -1

_SEQ_BYTES = 8


class BadEvents(StokerError):
    """A message in a wrong format. It is dropped, as if it had not arrived."""

    code = "bad_kv_events"


class BlockStored(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """Consecutive blocks of one chain, with the token ids of all of them. An event of an offloaded copy may have none."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # per block: the salt and everything else that goes into its hash
    cache_salt: str | None = None  # the salt of the chain in SGLang's events
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """An event: all blocks of all media were removed."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


# ---- the array form


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
    lora_name_or_salt: Any = None  # vLLM: lora_name; SGLang: a map with the salt
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
    """Decode both forms. Unknown fields and unknown types of events are skipped. Raises BadEvents."""
    try:
        return _whole.decode(data)  # the common case: all events are maps of known types
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        batch = _batch.decode(data)
        found = [_event(raw) for raw in batch.events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        raise BadEvents(f"a KV event batch of {len(data)} bytes cannot be decoded: {wrong}") from None
    return EventBatch(batch.ts, [event for event in found if event is not None], batch.data_parallel_rank)


def _event(raw: msgspec.Raw) -> KvEvent | None:
    first = bytes(memoryview(raw)[:1])[0]
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    try:
        return _map.decode(raw) if is_map else _from_array(_array.decode(raw))
    except msgspec.ValidationError:
        if _type_of(msgspec.msgpack.decode(raw)) in _KNOWN_TYPES:
            raise
        return None


def _type_of(event: Any) -> str | None:
    """Return the type of an event in either form, or None if it has none."""
    kind = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return kind if isinstance(kind, str) else None


def _from_array(event: _StoredArray | _RemovedArray | _ClearedArray) -> KvEvent:
    match event:
        case _StoredArray():
            salt = event.lora_name_or_salt.get("cache_salt") if isinstance(event.lora_name_or_salt, dict) else None
            return BlockStored(
                block_hashes=event.block_hashes,
                parent_block_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                lora_id=event.lora_id,
                medium=event.medium,
                lora_name=event.lora_name_or_salt if isinstance(event.lora_name_or_salt, str) else None,
                extra_keys=event.extra_keys if isinstance(event.extra_keys, list) else None,
                cache_salt=salt if isinstance(salt, str) else None,
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
class PublishedMessage:
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
        raise BadEvents(f"a sequence number has {len(frame)} bytes instead of {_SEQ_BYTES}")
    return int.from_bytes(frame, "big", signed=True)


def message_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames that a worker publishes."""
    return [topic, encode_seq(seq), payload]


def read_message(frames: Sequence[bytes]) -> PublishedMessage:
    if len(frames) != 3:
        raise BadEvents(f"a published message has {len(frames)} frames instead of 3: topic, number and batch")
    return PublishedMessage(bytes(frames[0]), decode_seq(frames[1]), bytes(frames[2]))


def replay_request(start_seq: int) -> list[bytes]:
    """Return the frames to send from a DEALER socket. The empty frame is what a REQ socket would add."""
    return [b"", encode_seq(start_seq)]


def read_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the identity of the sender and the first number that it needs. For the ROUTER socket."""
    if len(frames) != 3 or frames[1]:
        raise BadEvents(f"a replay request has {len(frames)} frames instead of 3: sender, an empty frame and a number")
    return bytes(frames[0]), decode_seq(frames[2])


def replay_frames(recipient: bytes, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the frames that send one message again, as vLLM does. For the ROUTER socket."""
    return [recipient, b"", topic, encode_seq(seq), payload]


def replay_end_frames(recipient: bytes, topic: bytes = KV_TOPIC) -> list[bytes]:
    return replay_frames(recipient, topic, END_SEQ, b"")


def read_replay(frames: Sequence[bytes]) -> PublishedMessage:
    """Decode a message that was sent again, for the DEALER socket.

    vLLM and our workers send a topic, SGLang does not. The empty frame may have been removed already.
    """
    parts = list(frames[1:]) if frames and not frames[0] and len(frames) > 2 else list(frames)
    if len(parts) == 2:
        parts.insert(0, b"")
    return read_message(parts)
