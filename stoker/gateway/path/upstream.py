"""The gateway's side of each worker: its connections, and what was learnt about how it wants to be spoken to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.gateway.http import ClientLimits, HeaderFilter, Origin, Pool, header_block
from stoker.proto.internal_http import INTERNAL_HEADER_PREFIX

# Authorization is the client's towards us. No accept-encoding: answers are looked into. The rest would speak to workers in
# the gateway's name.
_NOT_FOR_WORKERS = frozenset(
    {
        b"accept-encoding",
        b"authorization",
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
_NOT_FOR_CLIENTS = frozenset({b"x-request-id", b"server", b"date", b"set-cookie"})


class Lifeline:
    """Ties a try to its workers: one that is found dead ends the try, whatever it waits for. TCP alone would wait for hours
    on a machine that has stopped without a word."""

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
        """Asked once, when the try was cancelled. False: somebody else wants the whole request to end."""
        return self.lost_worker is not None and self._task.uncancel() == 0


@dataclass(slots=True, eq=False)
class Upstream:
    url: str
    pool: Pool
    origin: Origin
    headers: bytes  # what every request to this worker carries: its own key
    to_worker: HeaderFilter  # what of a client's headers it may see
    to_client: HeaderFilter  # what of its own headers clients may see
    refuses_usage: bool = False  # it answered 400 to a stream that asked for a usage chunk
    lifelines: set[Lifeline] = field(default_factory=set)
    num_prefilling: int = 0  # requests sent that have not brought a first token
    engines: dict[str, str] = field(default_factory=dict)  # vLLM behind Mooncake: engine id by data-parallel rank


class Upstreams:
    """One Upstream for each worker, made when it is first needed."""

    def __init__(self, limits: ClientLimits | None = None, api_keys: Mapping[str, str] | None = None) -> None:
        self._limits = limits or ClientLimits()
        self._api_keys = api_keys or {}  # by worker url
        self._known: dict[WorkerId, Upstream] = {}
        self._to_worker = HeaderFilter(_NOT_FOR_WORKERS, _INTERNAL_PREFIXES)
        self._to_client = HeaderFilter(_NOT_FOR_CLIENTS, (INTERNAL_HEADER_PREFIX.encode(),))

    def of(self, member: Member) -> Upstream:
        known = self._known.get(member.spec.worker_id)
        if known is not None and known.url == member.spec.url:
            return known
        if known is not None:  # it came back under its name, elsewhere
            known.pool.close()
        origin = Origin.from_url(member.spec.url)
        key = self._api_keys.get(member.spec.url)
        headers = b"" if key is None else header_block([(b"authorization", b"Bearer " + key.encode())])
        pool = Pool(origin, self._limits)
        made = Upstream(member.spec.url, pool, origin, headers, self._to_worker, self._to_client)
        self._known[member.spec.worker_id] = made
        return made

    def cut(self, worker_id: WorkerId) -> None:
        """The worker is gone, or no longer answers: who waits for it is told now. What can go on elsewhere does."""
        known = self._known.get(worker_id)
        if known is not None:
            for lifeline in list(known.lifelines):
                lifeline.cut(worker_id)
            self.let_go(worker_id)

    def let_go(self, worker_id: WorkerId) -> None:
        """Nothing new is sent there; answers that have begun go on to their end."""
        known = self._known.pop(worker_id, None)
        if known is not None:
            known.pool.close()

    def close(self) -> None:
        for worker_id in list(self._known):
            self.cut(worker_id)
