"""Hand-off of an answer's KV from a prefill worker to a decode worker: `kv_transfer_params`, lease ids and hints.

`kv_transfer_params` has the shape of vLLM's, so that vLLM's proxies pass it on. A request with `do_remote_decode` makes a
worker keep the KV under a lease, and its answer says where. A request with `do_remote_prefill` makes a worker pull it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stoker.base.address import join_address, split_address
from stoker.kv.blocks.transfer import KvTicket
from stoker.proto.openai.field_types import CountOrZero, Ignored

PARAM = "kv_transfer_params"
STOKER_MODE = "stoker"  # the `transfer_mode` of our workers

TransferId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}\Z")]
LeaseId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,144}\Z")]


def lease_id(transfer_id: str, choice: int) -> str:
    """Return the id of the lease on one choice's KV. The gateway knows it before the worker has granted the lease."""
    return f"{transfer_id}-{choice}"


# ---- in a request to the prefill worker


class HandoffFlags(msgspec.Struct):
    """The two fields that say which side of a hand-off the receiver is."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class KeepParams(msgspec.Struct):
    """`kv_transfer_params` with `do_remote_decode`. The lease ids start with `transfer_id`, which the worker generates if
    it is missing."""

    transfer_id: TransferId | None = None


def encode_keep_params(transfer_id: str) -> bytes:
    return b'{"do_remote_decode":true,"transfer_id":"%b"}' % transfer_id.encode()


# ---- in the answer of the prefill worker, and in the request to the decode worker


class KvTransfer(msgspec.Struct, kw_only=True):
    """The place from which the KV of one choice can be pulled. `transfer_mode` distinguishes our workers from other engines."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    remote_engine_id: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_host: Annotated[str, Meta(min_length=1, max_length=256)]
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_request_id: LeaseId
    remote_num_tokens: CountOrZero = 0  # 0: not known yet, in a hint that is sent while prefill runs
    remote_block_ids: Ignored = []  # always empty: our blocks have keys. vLLM's proxies require the field.
    lease_s: Annotated[float, Meta(gt=0, le=1e6)] = 30.0

    @classmethod
    def of_ticket(cls, ticket: KvTicket) -> KvTransfer:
        host, port = split_address(ticket.address)
        return cls(
            remote_engine_id=ticket.engine_id,
            remote_host=host,
            remote_port=port,
            remote_request_id=ticket.lease_id,
            remote_num_tokens=ticket.num_tokens,
            lease_s=ticket.lease_s,
        )

    @classmethod
    def announced(cls, engine_id: str, kv_address: str, lease: str) -> KvTransfer:
        """Describe a lease that the worker has not granted yet."""
        host, port = split_address(kv_address)
        return cls(remote_engine_id=engine_id, remote_host=host, remote_port=port, remote_request_id=lease)

    def ticket(self) -> KvTicket:
        return KvTicket(
            engine_id=self.remote_engine_id,
            address=join_address(self.remote_host, self.remote_port),
            lease_id=self.remote_request_id,
            num_tokens=self.remote_num_tokens,
            lease_s=self.lease_s,
        )


class KvTransfers(msgspec.Struct, kw_only=True):
    """The places from which the KV of several choices can be pulled. An entry is null if its choice has ended."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_mode: Literal["stoker"] = "stoker"
    choices: list[KvTransfer | None]


KvTransferParams = KvTransfer | KvTransfers


def has_kv_of(params: bytes) -> bool:
    """Return True if these `kv_transfer_params` of a Stoker worker name at least one lease."""
    return b'"remote_request_id":' in params


# ---- hints from the gateway: bodies of POST `PREFETCH_PATH` and `RELEASE_PATH`


class PrefetchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ask a worker to load KV before the request for it arrives.

    `request` is the whole body of a request to the endpoint `path`. Without it, the worker pulls all KV that the lease in
    `kv_transfer_params` covers.
    """

    path: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"] = "/v1/chat/completions"
    request: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: dict[str, Any] | None = None


def encode_prefetch(transfer: KvTransfer) -> bytes:
    return msgspec.json.encode({PARAM: transfer})


class ReleaseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tell a prefill worker that no decode worker will pull the KV that it keeps under `transfer_id`."""

    transfer_id: TransferId
    num_choices: Annotated[int, Meta(ge=1, le=4096)] = 1


def encode_release(transfer_id: str, num_choices: int) -> bytes:
    return msgspec.json.encode(ReleaseRequest(transfer_id=transfer_id, num_choices=num_choices))
