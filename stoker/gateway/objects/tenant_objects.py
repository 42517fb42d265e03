"""All objects that tenants keep in the store, as one part of the gateway: their endpoints, their tasks, their expiry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from stoker.base.errors import NotFound, StokerError
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.client_body import EndpointKind
from stoker.gateway.api.reply import Reply
from stoker.gateway.http import HttpRequest
from stoker.gateway.objects import batch_table, file_table, response_table
from stoker.gateway.objects.batch_runner import RunLine
from stoker.gateway.objects.batches import PATH as BATCHES_PATH
from stoker.gateway.objects.batches import BatchesEndpoint
from stoker.gateway.objects.files import PATH as FILES_PATH
from stoker.gateway.objects.files import FilesEndpoint
from stoker.gateway.objects.object_settings import BatchSettings, ResponsesSettings
from stoker.gateway.objects.response_runs import Generate
from stoker.gateway.objects.responses import StoredResponses
from stoker.gateway.store.store_threads import StoreThreads

OBJECT_PREFIXES = (b"/v1/responses/", FILES_PATH, BATCHES_PATH)
UPLOAD_PATHS = frozenset({FILES_PATH, BATCHES_PATH})  # these take large bodies
_EXPIRY_S = 30.0  # how often expired objects are deleted
_EXPIRE_AT_ONCE = 200  # rows in one transaction, so that other writers do not wait long

log = EventLog("objects")


class NoObjects:
    """A gateway without a store: the Responses API has no state, and nothing can be kept."""

    def open(self, generate: Generate, run_line: RunLine) -> None: ...

    def begin_drain(self) -> None: ...

    async def close(self) -> None: ...

    async def create_response(self, request: HttpRequest, generate: Generate) -> None:
        await generate(request, EndpointKind.RESPONSES)  # workers refuse the fields that need state

    async def counted_body(self, caller: Caller, body: bytes) -> bytes:
        return body  # workers refuse the fields that need state

    async def answer(self, request: HttpRequest) -> Reply | None:
        raise NotFound("This gateway keeps nothing: it was started with `--store none`.", code="not_found")


class TenantObjects:
    """The objects of all tenants, in one store."""

    def __init__(
        self,
        store: StoreThreads,
        keys: ApiKeys,
        settings: ResponsesSettings,
        batch_settings: BatchSettings,
        *,
        name: str,
        max_body_bytes: int,
        max_held_bytes: int,
        model_of: Callable[[str | None], str],
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        """`name` is that of this gateway; no other one has it."""
        self._store = store
        self._unix_time = unix_time
        self._errors = errors or TaskErrors()
        self.responses = StoredResponses(
            store,
            keys,
            settings,
            name=name,
            max_body_bytes=max_body_bytes,
            max_held_bytes=max_held_bytes,
            model_of=model_of,
            clock=clock,
            unix_time=unix_time,
            errors=self._errors,
        )
        self.files = FilesEndpoint(store, keys, batch_settings, unix_time)
        self.batches = BatchesEndpoint(
            store,
            keys,
            batch_settings,
            owner=name,
            lease_s=settings.lease_s,
            unix_time=unix_time,
            errors=self._errors,
        )
        self._expiry: asyncio.Task[None] | None = None

    def open(self, generate: Generate, run_line: RunLine) -> None:
        """Begin to run what runs in the background: responses with `generate`, lines of batches with `run_line`."""
        self.responses.runs.open(generate)
        self.batches.runner.open(run_line)
        self._expiry = asyncio.get_running_loop().create_task(repeat("object_expiry", self._expire_all, self._errors))

    def begin_drain(self) -> None:
        """Stop work that other gateways can do. Responses that run in the background go on."""
        self.batches.runner.begin_drain()

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        await self.batches.runner.close()
        await self.responses.runs.close()

    async def create_response(self, request: HttpRequest, generate: Generate) -> None:
        await self.responses.create(request, generate)

    async def counted_body(self, caller: Caller, body: bytes) -> bytes:
        return await self.responses.counted_body(caller, body)

    async def answer(self, request: HttpRequest) -> Reply | None:
        """Answer a request whose path begins with one of OBJECT_PREFIXES. None: the answer was streamed."""
        if _is_below(request.path, FILES_PATH):
            return await self.files.answer(request)
        if _is_below(request.path, BATCHES_PATH):
            return await self.batches.answer(request)
        return await self.responses.answer(request)

    async def _expire_all(self) -> None:
        try:
            while await self.expire_some() >= _EXPIRE_AT_ONCE:
                pass
        except StokerError as error:
            log.warning("objects_not_expired", reason=error.message)
        await asyncio.sleep(_EXPIRY_S)

    async def expire_some(self) -> int:
        """Delete some objects whose time is over, and return how many."""
        now_s = self._unix_time()
        num_expired = 0
        for expire in (response_table.expire, file_table.expire_files, batch_table.expire_batches):
            num_expired += await self._store.write(partial(expire, now_s=now_s, limit=_EXPIRE_AT_ONCE))
        return num_expired


def _is_below(path: bytes, prefix: bytes) -> bool:
    return path == prefix or path.startswith(prefix + b"/")
