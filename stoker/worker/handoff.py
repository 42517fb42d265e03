"""A hand-off as HTTP sees it: `kv_transfer_params` of a request -> leases and tickets; tickets -> those of an answer.

Asked to keep (`do_remote_decode`), a worker ends after one token and its engine holds the KV under a lease; the answer says
where. Asked to pull (`do_remote_prefill`), it has its engine fetch what such an answer names. How KV moves, and what becomes
of a ticket that has gone stale, is unknown here.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stoker.base.address import join_address, split_address
from stoker.base.errors import InvalidRequest
from stoker.base.log import EventLog
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.messages import EngineInfo
from stoker.proto.openai.decode import convert
from stoker.proto.openai.handoff import KvTransfer, KvTransferParams, KvTransfers

PARAM = "kv_transfer_params"
_OURS = "stoker"

TransferId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]


def lease_name(transfer_id: str, index: int) -> str:
    """Of a request's choice, for whoever gave the request's KV a name of its own."""
    return f"{transfer_id}-{index}"


class _Which(msgspec.Struct):
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class _Keep(msgspec.Struct):
    transfer_id: TransferId | None = None


class HasTicket(Protocol):
    """What of a Choice is needed here."""

    @property
    def ticket(self) -> KvTicket | None: ...


@dataclass(frozen=True, slots=True)
class Handoff:
    """What is asked of one request's KV. Neither: an answer from here, whole. `lease`: what the leases' names begin with."""

    lease: str | None = None
    tickets: Sequence[KvTicket | None] = ()

    def lease_id(self, index: int) -> str | None:
        return None if self.lease is None else lease_name(self.lease, index)

    def ticket(self, index: int) -> KvTicket | None:
        return self.tickets[index] if index < len(self.tickets) else None


NO_HANDOFF = Handoff()


def resolve_handoff(given: dict[str, Any] | None, num_choices: int, info: EngineInfo, log: EventLog) -> Handoff:
    if not given:
        return NO_HANDOFF
    which = convert(_Which, given, PARAM)
    if which.do_remote_decode and which.do_remote_prefill:
        raise InvalidRequest(
            f"Invalid '{PARAM}': 'do_remote_decode' keeps KV for another worker, 'do_remote_prefill' pulls it from one; "
            "both were given.",
            param=PARAM,
        )
    if which.do_remote_decode:
        return _keep(given, info)
    if which.do_remote_prefill:
        return _pull(given, num_choices, log)
    return NO_HANDOFF


def _keep(given: dict[str, Any], info: EngineInfo) -> Handoff:
    if info.kv_address is None:
        param = f"{PARAM}.do_remote_decode"
        raise InvalidRequest(
            f"Invalid value for '{param}': this worker keeps no KV for others; it would, started with --role prefill.",
            param=param,
        )
    return Handoff(lease=convert(_Keep, given, PARAM).transfer_id or uuid.uuid4().hex)


def _pull(given: dict[str, Any], num_choices: int, log: EventLog) -> Handoff:
    if given.get("transfer_mode") != _OURS:
        # Another engine's KV means nothing here, but what it was made of is in the request.
        log.event("foreign_ticket", engine=str(given.get("remote_engine_id"))[:64])
        return NO_HANDOFF
    if "choices" not in given:
        return Handoff(tickets=[_ticket(convert(KvTransfer, given, PARAM))])
    transfers = convert(KvTransfers, given, PARAM).choices
    if len(transfers) != num_choices:
        param = f"{PARAM}.choices"
        raise InvalidRequest(
            f"Invalid '{param}': {len(transfers)} were given, but the answer has {num_choices}.", param=param
        )
    return Handoff(tickets=[None if transfer is None else _ticket(transfer) for transfer in transfers])


def _ticket(transfer: KvTransfer) -> KvTicket:
    return KvTicket(
        engine_id=transfer.remote_engine_id,
        address=join_address(transfer.remote_host, transfer.remote_port),
        lease_id=transfer.remote_request_id,
        num_tokens=transfer.remote_num_tokens,
        lease_s=transfer.lease_s,
    )


def transfer_params(choices: Sequence[HasTicket]) -> KvTransferParams | UnsetType:
    """What whoever goes on with the answer is to be sent. Unset: no KV was kept."""
    if all(choice.ticket is None for choice in choices):
        return UNSET
    transfers = [None if choice.ticket is None else _transfer(choice.ticket) for choice in choices]
    first = transfers[0]
    return first if len(transfers) == 1 and first is not None else KvTransfers(choices=transfers)


def _transfer(ticket: KvTicket) -> KvTransfer:
    host, port = split_address(ticket.address)
    return KvTransfer(
        remote_engine_id=ticket.engine_id,
        remote_host=host,
        remote_port=port,
        remote_request_id=ticket.lease_id,
        remote_num_tokens=ticket.num_tokens,
        lease_s=ticket.lease_s,
    )
