"""The two sides of a hand-off in a request: which KV the engine must keep, or pull from another worker.

`proto/handoff.py` has the format. The engine transfers the KV, and handles tickets that are no longer valid.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from stoker.base.errors import InvalidRequest
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.handoff import (
    PARAM,
    STOKER_MODE,
    HandoffFlags,
    KeepParams,
    KvTransfer,
    KvTransferParams,
    KvTransfers,
    lease_id,
)
from stoker.proto.messages import EngineInfo
from stoker.proto.openai.decode import convert


class HasTicket(Protocol):
    """The part of a `Choice` that is needed here."""

    @property
    def ticket(self) -> KvTicket | None: ...


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a request asks for: to keep its KV, to pull KV from another worker, or neither."""

    transfer_id: str | None = None  # keep the KV: the leases' ids start with this
    tickets: Sequence[KvTicket | None] = ()  # pull the KV: one ticket per choice

    def lease_id(self, index: int) -> str | None:
        return None if self.transfer_id is None else lease_id(self.transfer_id, index)

    def ticket(self, index: int) -> KvTicket | None:
        return self.tickets[index] if index < len(self.tickets) else None


NO_HANDOFF = Handoff()


def resolve_handoff(given: dict[str, Any] | None, num_choices: int, info: EngineInfo, log: EventLog) -> Handoff:
    """Decode and check the `kv_transfer_params` of a request."""
    if not given:
        return NO_HANDOFF
    flags = convert(HandoffFlags, given, PARAM)
    if flags.do_remote_decode and flags.do_remote_prefill:
        raise InvalidRequest(
            f"Invalid '{PARAM}': 'do_remote_decode' keeps KV for another worker, 'do_remote_prefill' pulls it from one; "
            "give only one of them.",
            param=PARAM,
        )
    if flags.do_remote_decode:
        return _keep(given, info)
    if flags.do_remote_prefill:
        return _pull(given, num_choices, log)
    return NO_HANDOFF


def _keep(given: dict[str, Any], info: EngineInfo) -> Handoff:
    if info.kv_address is None:
        param = f"{PARAM}.do_remote_decode"
        raise InvalidRequest(
            f"Invalid value for '{param}': this worker keeps no KV for others; start it with --role prefill.",
            param=param,
        )
    return Handoff(transfer_id=convert(KeepParams, given, PARAM).transfer_id or uuid.uuid4().hex)


def _pull(given: dict[str, Any], num_choices: int, log: EventLog) -> Handoff:
    if given.get("transfer_mode") != STOKER_MODE:
        # The KV of another engine cannot be used here. The request holds the whole prompt, so it is computed.
        log.event("foreign_ticket", engine=str(given.get("remote_engine_id"))[:64])
        return NO_HANDOFF
    if "choices" not in given:
        return Handoff(tickets=[convert(KvTransfer, given, PARAM).ticket()])
    transfers = convert(KvTransfers, given, PARAM).choices
    if len(transfers) != num_choices:
        param = f"{PARAM}.choices"
        raise InvalidRequest(
            f"Invalid '{param}': {len(transfers)} entries were given, but the answer has {num_choices} choices.",
            param=param,
        )
    return Handoff(tickets=[None if transfer is None else transfer.ticket() for transfer in transfers])


def moved_params(choices: Sequence[HasTicket]) -> KvTransferParams:
    """Return the `kv_transfer_params` of an answer that moves to another worker. It may have no KV."""
    params = transfer_params(choices)
    return KvTransfers(choices=[None] * len(choices)) if isinstance(params, UnsetType) else params


def transfer_params(choices: Sequence[HasTicket]) -> KvTransferParams | UnsetType:
    """Return the `kv_transfer_params` for the decode worker, or UNSET if no KV was kept."""
    if all(choice.ticket is None for choice in choices):
        return UNSET
    transfers = [None if choice.ticket is None else KvTransfer.of_ticket(choice.ticket) for choice in choices]
    first = transfers[0]
    return first if len(transfers) == 1 and first is not None else KvTransfers(choices=transfers)
