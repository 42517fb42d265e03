"""KV events: those of vLLM and SGLang are decoded, and ours have the format that vLLM's readers expect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stoker.proto.events import (
    END_SEQ,
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
    replay_end_frames,
    replay_frames,
    replay_request,
)

STORED = BlockStored(
    block_hashes=[b"a" * 16, b"b" * 16],
    parent_block_hash=None,
    token_ids=[1, 2, 3, 4],
    block_size=2,
    medium="GPU",
    extra_keys=[["salt"], None],
)
REMOVED = BlockRemoved(block_hashes=[b"a" * 16], medium="GPU")


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def test_our_events_are_decoded_as_they_were_encoded() -> None:
    batch = EventBatch(1.5, [STORED, REMOVED, AllBlocksCleared()], 3)
    assert decode_batch(encode_batch(batch)) == batch


def test_our_events_are_maps_with_a_type_in_an_array() -> None:
    ts, events, rank = msgspec.msgpack.decode(encode_batch(EventBatch(1.5, [STORED, AllBlocksCleared()])))
    assert (ts, rank) == (1.5, None)
    assert events[0]["type"] == "BlockStored"
    assert events[0]["block_hashes"] == [b"a" * 16, b"b" * 16]
    assert events[0]["parent_block_hash"] is None
    assert events[0]["medium"] == "GPU"
    assert events[1] == {"type": "AllBlocksCleared"}


def test_unknown_fields_of_vllms_events_are_skipped() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, -5],
        "parent_block_hash": 7,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "locality": "LOCAL",
        "session_id": "s",
        "extra_keys": [None, ["x", ["nested", 1]]],
        "invented": {"later": True},
    }
    batch = decode_batch(pack([2.0, [stored]]))
    assert batch.data_parallel_rank is None
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [2**64 - 1, -5]
    assert event.medium == "CPU"


def test_sglang_arrays() -> None:
    events = [
        ["BlockStored", [11, 12], 10, [1, 2], 1, None, "CPU_PINNED", {"cache_salt": "t"}],
        ["BlockStored", [13], None, [1], 1],
        ["BlockRemoved", [11]],
        ["BlockRemoved", [12], "GPU"],
        ["AllBlocksCleared"],
    ]
    found = decode_batch(pack([2.0, events, 1])).events
    first, second, third, fourth, fifth = found
    assert isinstance(first, BlockStored)
    assert (first.medium, first.cache_salt, first.parent_block_hash) == ("CPU_PINNED", "t", 10)
    assert isinstance(second, BlockStored)
    assert second.medium is None
    assert third == BlockRemoved(block_hashes=[11])
    assert fourth == BlockRemoved(block_hashes=[12], medium="GPU")
    assert fifth == AllBlocksCleared()


def test_older_vllm_arrays_have_the_lora_name_sixth() -> None:
    event = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", "adapter", [["salt"]], 0, "sliding_window", 128]
    (found,) = decode_batch(pack([0.0, [event]])).events
    assert isinstance(found, BlockStored)
    assert (found.lora_name, found.extra_keys) == ("adapter", [["salt"]])
    assert (found.group_idx, found.kv_cache_spec_kind) == (0, "sliding_window")


def test_unknown_types_are_skipped() -> None:
    events: list[Any] = [
        {"type": "BlockMigrated", "block_hashes": [1]},
        ["BlockMigrated", [1], "there"],
        {"type": "BlockRemoved", "block_hashes": [4]},
        {},
        [],
    ]
    assert decode_batch(pack([0.0, events])).events == [BlockRemoved(block_hashes=[4])]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack("text"),
        pack([1.0]),
        pack([1.0, [{"type": "BlockStored", "block_hashes": "no"}]]),
        pack([1.0, [["BlockRemoved", "no"]]]),
        encode_batch(EventBatch(1.0, [STORED]))[:-3],
    ],
)
def test_a_batch_that_cannot_be_decoded_is_an_error_as_a_whole(data: bytes) -> None:
    with pytest.raises(BadEvents):
        decode_batch(data)


def test_frames() -> None:
    message = read_message(message_frames(b"kv", 2**40, b"x"))
    assert (message.topic, message.seq, message.payload, message.is_end) == (b"kv", 2**40, b"x", False)
    assert message_frames(b"kv", 1, b"x")[1] == b"\0\0\0\0\0\0\0\1"
    with pytest.raises(BadEvents):
        read_message([b"kv", b"\0" * 7, b"x"])
    with pytest.raises(BadEvents):
        read_message([b"kv"])


def test_a_replay_is_decoded_with_and_without_its_topic() -> None:
    assert read_replay_request([b"me", *replay_request(7)]) == (b"me", 7)
    ours = replay_frames(b"me", b"kv", 7, b"x")[1:]
    assert read_replay(ours).seq == 7
    assert read_replay(ours[1:]).payload == b"x"
    sglang = [b"", ours[2], b"x"]
    assert (read_replay(sglang).seq, read_replay(sglang).topic) == (7, b"")
    end = read_replay(replay_end_frames(b"me")[1:])
    assert end.is_end
    assert end.seq == END_SEQ
    bare_end = read_replay([b"", (-1).to_bytes(8, "big", signed=True), b""])
    assert bare_end.is_end
