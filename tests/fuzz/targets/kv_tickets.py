"""Tickets and lease ids in client and gateway bodies, hints, and resumed answers, as a worker decodes them."""

from __future__ import annotations

import json
import random

import msgspec

from stoker.base.errors import InvalidRequest
from stoker.base.log import EventLog
from stoker.proto.handoff import PrefetchRequest, ReleaseRequest, encode_release, lease_id
from stoker.proto.messages import EngineInfo
from stoker.proto.openai.decode import decode
from stoker.proto.resume_notes import Resume
from stoker.worker.handoff import resolve_handoff
from tests.fuzz.target import FuzzTarget

_INFO = EngineInfo(
    model_fingerprint="f", device="cpu", dtype="float32", vocab_size=100, max_model_tokens=64, block_tokens=16,
    num_blocks=8, max_rows=2, load_s=0.0, engine_id="e", kv_address="127.0.0.1:9",
)  # fmt: skip
_LOG = EventLog("fuzz")


def execute(data: bytes, rng: random.Random) -> None:
    for struct in (PrefetchRequest, ReleaseRequest, Resume):
        try:
            decode(struct, data)
        except InvalidRequest:
            continue
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if isinstance(given, dict):
        handoff = resolve_handoff(given.get("kv_transfer_params", given), 2, _INFO, _LOG)
        for index in range(2):
            ticket = handoff.ticket(index)
            assert ticket is None or len(ticket.lease_id) <= 144
            assert len(handoff.lease_id(index) or "") <= 144


def seeds() -> list[bytes]:
    one = {
        "do_remote_prefill": True, "transfer_mode": "stoker", "remote_engine_id": "e", "remote_host": "10.0.0.1",
        "remote_port": 5000, "remote_request_id": lease_id("t", 0), "remote_num_tokens": 40, "lease_s": 5.0,
    }  # fmt: skip
    bodies = [
        one,
        {"do_remote_prefill": True, "transfer_mode": "stoker", "choices": [one, None]},
        {"do_remote_decode": True, "transfer_id": "abc"},
        {"kv_transfer_params": one},
        {"created": 5, "choices": [{"token_ids": [1, [2, -0.5, [1], [-0.5]]], "finished": False}], "events": 2},
    ]
    return [*(json.dumps(body).encode() for body in bodies), encode_release("t", 3)]


TARGET = FuzzTarget(
    execute,
    seeds,
    errors=(InvalidRequest,),
    tokens=[
        b'"do_remote_decode":true,',
        b'"transfer_id":"',
        b'"choices":[',
        b"\\u0000",
        b"\\n",
        b"::1",
        b"null,",
        b"true",
        b'"../"',
    ],
)
