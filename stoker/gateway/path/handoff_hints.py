"""Hints to the two workers of a hand-off, sent beside their requests.

- To the decode worker: where to find the KV that the prefill worker is still computing, so that it can pull blocks early.
- To the prefill worker: release the lease, because no decode worker will pull its KV.

The gateway chooses the lease name itself, so it can write the ticket before the lease exists. Hints are optional: no
request waits for one, and a lost hint costs only the time that it would have saved.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress

from stoker.base.ids import WorkerId
from stoker.gateway.http import NoSocketLeft, ResponseAborted, ResponseLost, Unreachable, header_block
from stoker.gateway.path.upstream import Upstream
from stoker.proto.handoff import KvTransfer, encode_prefetch, encode_release, lease_id
from stoker.proto.internal_http import PREFETCH_PATH, RELEASE_PATH
from stoker.proto.messages import WorkerInfo
from stoker.routing.query import Leg

_PREFETCH = PREFETCH_PATH.encode()
_RELEASE = RELEASE_PATH.encode()
_WORTH_TOKENS = 1024  # uncached prompt tokens; for fewer, pulling the KV afterwards is faster than a hint
_MAX_AT_ONCE = 64
_ANSWER_S = 2.0
_MAX_ANSWER_BYTES = 1 << 16
_IN_RAM = "CPU"  # the medium of the tier that receives blocks pulled early


class HandoffHints:
    """Sends hand-off hints. `info_of` returns the latest `/stoker/worker` data of a worker, if known."""

    def __init__(self, info_of: Callable[[WorkerId], WorkerInfo | None] = lambda worker_id: None) -> None:
        self._info_of = info_of
        self._headers = header_block([(b"content-type", b"application/json")])
        self._tasks: set[asyncio.Task[None]] = set()

    def pull_early(self, prefill: Leg, decode: Leg, upstream: Upstream, transfer_id: str) -> asyncio.Task[None] | None:
        """Send the decode worker (`upstream`) a hint to pull early. The caller cancels the task when it is obsolete."""
        hint = self._hint(prefill, decode, transfer_id)
        if hint is None or len(self._tasks) >= _MAX_AT_ONCE:
            return None
        task = asyncio.create_task(self._post(upstream, _PREFETCH, hint), name="early-pull")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def release_lease(self, prefill: Leg, upstream: Upstream, transfer_id: str, num_choices: int) -> None:
        """Ask the prefill worker (`upstream`) to release its lease. No effect if the lease does not exist."""
        src = self._info_of(prefill.worker.worker_id)
        if src is not None and src.kv_address is not None:
            await self._post(upstream, _RELEASE, encode_release(transfer_id, num_choices))

    def _hint(self, prefill: Leg, decode: Leg, transfer_id: str) -> bytes | None:
        if prefill.reservation.prefill_tokens < _WORTH_TOKENS:
            return None
        src, dst = self._info_of(prefill.worker.worker_id), self._info_of(decode.worker.worker_id)
        if src is None or dst is None or src.engine_id is None or src.kv_address is None:
            return None
        if src.stores.get(_IN_RAM) is not None and src.stores.get(_IN_RAM) == dst.stores.get(_IN_RAM):
            return None  # both workers share this store: prefill's blocks arrive there anyway
        # Before decode begins only the prompt's blocks are useful, and the first choice has them.
        return encode_prefetch(KvTransfer.announced(src.engine_id, src.kv_address, lease_id(transfer_id, 0)))

    async def _post(self, upstream: Upstream, path: bytes, body: bytes) -> None:
        with suppress(Unreachable, NoSocketLeft, ResponseLost, ResponseAborted, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                headers = self._headers + upstream.headers
                answer = await upstream.pool.send(b"POST", path, headers, body, connect_s=_ANSWER_S, head_s=None)
                await answer.read(_MAX_ANSWER_BYTES)


def new_transfer_id() -> str:
    return secrets.token_hex(12)
