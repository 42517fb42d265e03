"""Gateways and workers of this version and of the previous release (0.1.0) understand each other.

The frames were recorded with that release. Its structs ignore fields that they do not know, and ours have defaults for new ones.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stoker.base.ids import WorkerId
from stoker.proto.messages import WorkerInfo, WorkerRegistration, WorkerReport
from stoker.proto.work import WorkChange

REPORT = bytes.fromhex(
    "8fa9776f726b65725f6964a3772d31a66e756d62657203a4726f6c65a66465636f6465a57265616479c3a8647261696e696e67c2b17761"
    "6974696e675f73657175656e63657301ae77616974696e675f746f6b656e7314b172756e6e696e675f73657175656e63657302ab667265"
    "655f626c6f636b7305aa6e756d5f626c6f636b7309ac626c6f636b5f746f6b656e7310b470726566696c6c5f746f6b656e735f7065725f"
    "73cb4029000000000000a6737465705f73cb3fd0000000000000a76368616e676573919607a56669727374a1670a141ea96f70656e5f77"
    "6f726b919607a6616363657074a1670a141e"
)
REGISTRATION = (
    b'{"worker_id":"w-1","role":"decode","models":["m"],"fingerprint":"f","block_tokens":16,"num_blocks":9,"max'
    b'_model_tokens":100,"events":"tcp://h:1","replay":"tcp://h:2","tokenizer":"t","engine_id":"e","kv_address"'
    b':"h:3","stores":{"CPU":"s"},"volatile_lines":["x"],"url":"http://h:1"}'
)


class PreviousReport(msgspec.Struct, frozen=True, kw_only=True):
    """`WorkerReport` as a gateway of the previous release decodes it."""

    worker_id: str
    number: int
    role: Literal["unified", "prefill", "decode"]
    ready: bool
    draining: bool
    waiting_sequences: int
    waiting_tokens: int
    running_sequences: int
    free_blocks: int
    num_blocks: int
    block_tokens: int
    prefill_tokens_per_s: float | None
    step_s: float | None
    changes: list[WorkChange] = []
    open_work: list[WorkChange] | None = None


class PreviousRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """`WorkerRegistration` as a gateway of the previous release decodes it."""

    worker_id: str
    role: Literal["unified", "prefill", "decode"]
    models: list[str]
    fingerprint: str
    block_tokens: int
    num_blocks: int
    max_model_tokens: int
    events: str | None
    replay: str | None
    tokenizer: str
    url: str
    engine_id: str | None = None
    kv_address: str | None = None
    stores: dict[str, str] = {}
    volatile_lines: list[str] = []


def test_a_report_of_the_previous_release_is_read() -> None:
    """Its worker neither moves requests nor changes its role."""
    report = msgspec.msgpack.decode(REPORT, type=WorkerReport)
    assert (report.worker_id, report.role, report.waiting_tokens, report.step_s) == ("w-1", "decode", 20, 0.25)
    assert (report.moving, report.role_assigned) == (False, False)
    assert report.changes == [WorkChange(7, "first", "g", 10, 20, 30)]


def test_the_previous_release_reads_our_reports() -> None:
    ours = msgspec.structs.replace(
        msgspec.msgpack.decode(REPORT, type=WorkerReport), moving=True, role_assigned=True, draining=True
    )
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=PreviousReport)
    assert (theirs.role, theirs.draining, theirs.num_blocks) == ("decode", True, 9)


def test_a_registration_of_the_previous_release_is_read() -> None:
    registration = msgspec.json.decode(REGISTRATION, type=WorkerRegistration)
    assert (registration.url, registration.kv_address, registration.moving) == ("http://h:1", "h:3", False)
    assert msgspec.json.decode(REGISTRATION, type=WorkerInfo).worker_id == WorkerId("w-1")


def test_the_previous_release_reads_our_registrations() -> None:
    ours = msgspec.structs.replace(msgspec.json.decode(REGISTRATION, type=WorkerRegistration), moving=True)
    theirs = msgspec.json.decode(msgspec.json.encode(ours), type=PreviousRegistration)
    assert (theirs.url, theirs.stores) == ("http://h:1", {"CPU": "s"})
