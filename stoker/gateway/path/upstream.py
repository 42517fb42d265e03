"""The gateway's state for each worker: its connection pool, header filters and observed capabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.gateway.http import ClientLimits, ConnectionPool, HeaderFilter, Origin, header_block
from stoker.gateway.watch.worker_signers import WorkerSigners
from stoker.proto.internal_http import INTERNAL_HEADER_PREFIX, READY_PATH

# Client headers that are not forwarded to workers. `authorization`, `cookie` and `x-api-key` are for the gateway.
# `accept-encoding` would compress responses, which the gateway must read. `content-encoding` and the character set in
# `content-type` would make a worker read other bytes than the gateway has checked. The others control workers, and only the gateway
# may set them.
_NOT_FOR_WORKERS = frozenset(
    {
        b"accept-encoding",
        b"authorization",
        b"content-encoding",
        b"content-type",
        b"cookie",
        b"x-admin-token",
        b"x-api-key",
        b"x-data-parallel-rank",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-prefiller-host-port",
        b"x-reject-if-busy",
        b"x-request-id",
        b"x-vllm-priority",
    }
)
_INTERNAL_PREFIXES = (INTERNAL_HEADER_PREFIX.encode(), b"x-override-", b"x-smg-", b"x-llm-d-")
_CROSS_ORIGIN = b"access-control-"  # the gateway decides itself which pages may call it
_NOT_FOR_CLIENTS = frozenset({b"x-request-id", b"server", b"date", b"set-cookie"})


class CancelOnLoss:
    """Cancels an attempt when one of its workers is found dead. TCP alone may wait for hours on a machine that vanished."""

    __slots__ = ("_task", "lost_worker")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.lost_worker: WorkerId | None = None

    def cut(self, worker_id: WorkerId) -> None:
        if self.lost_worker is None:
            self.lost_worker = worker_id
            self._task.cancel()

    @property
    def explains_cancel(self) -> bool:
        """Return True if the cancellation came only from this guard; False if the whole request is cancelled.

        Call it once, after the attempt was cancelled.
        """
        return self.lost_worker is not None and self._task.uncancel() == 0


@dataclass(slots=True, eq=False)
class Upstream:
    """The gateway's state for one worker."""

    url: str
    pool: ConnectionPool
    origin: Origin
    headers: bytes  # sent with every request to this worker: its API key
    to_worker: HeaderFilter  # which client headers are forwarded to it
    to_client: HeaderFilter  # which of its response headers are forwarded to clients
    refuses_usage_until_s: float = 0.0  # until then, stream_options.include_usage is not added to requests
    loss_guards: set[CancelOnLoss] = field(default_factory=set)
    num_prefilling: int = 0  # requests sent whose first token has not arrived
    engines: dict[str, str] = field(default_factory=dict)  # vLLM with Mooncake: engine id by data-parallel rank


class Upstreams:
    """One Upstream for each worker, created on first use."""

    def __init__(
        self,
        limits: ClientLimits | None = None,
        api_keys: Mapping[str, str] | None = None,
        signers: WorkerSigners | None = None,
    ) -> None:
        self._limits = limits or ClientLimits()
        self._signers = signers or WorkerSigners()
        self._api_keys = api_keys or {}  # by worker URL
        self._known: dict[WorkerId, Upstream] = {}
        self._to_worker = HeaderFilter(_NOT_FOR_WORKERS, _INTERNAL_PREFIXES)
        self._to_client = HeaderFilter(_NOT_FOR_CLIENTS, (INTERNAL_HEADER_PREFIX.encode(), _CROSS_ORIGIN))

    def of(self, member: Member) -> Upstream:
        """Return the state for a worker."""
        known = self._known.get(member.spec.worker_id)
        if known is not None and known.url == member.spec.url:
            return known
        if known is not None:  # the worker registered again with another URL
            known.pool.close()
        upstream = self._known[member.spec.worker_id] = self.apart(member)
        return upstream

    def apart(self, member: Member) -> Upstream:
        """Return a new state for a worker, with connections of its own, which the caller must close."""
        origin = Origin.from_url(member.spec.url)
        key = self._api_keys.get(member.spec.url)
        headers = b"" if key is None else header_block([(b"authorization", b"Bearer " + key.encode())])
        pool = ConnectionPool(origin, self._limits, self._signers.signer(member.spec), READY_PATH.encode())
        return Upstream(member.spec.url, pool, origin, headers, self._to_worker, self._to_client)

    def cut(self, worker_id: WorkerId) -> None:
        """Cancel all attempts that wait for a worker that is gone or hangs. They continue on other workers if possible."""
        known = self._known.get(worker_id)
        if known is not None:
            for loss_guard in list(known.loss_guards):
                loss_guard.cut(worker_id)
            self.let_go(worker_id)

    def let_go(self, worker_id: WorkerId) -> None:
        """Send nothing new to this worker. Responses that have begun continue to their end."""
        known = self._known.pop(worker_id, None)
        if known is not None:
            known.pool.close()

    def close(self) -> None:
        for worker_id in list(self._known):
            self.cut(worker_id)
