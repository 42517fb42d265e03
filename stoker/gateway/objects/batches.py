"""`/v1/batches`: create, list, read and cancel batches. `batch_runner.py` works on them."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.base.long_task import TaskErrors
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.reply import Reply, json_reply, method_not_allowed
from stoker.gateway.http import HttpRequest
from stoker.gateway.objects import batch_table as table
from stoker.gateway.objects.batch_file import ENDPOINTS
from stoker.gateway.objects.batch_runner import BatchRunner
from stoker.gateway.objects.batch_table import BATCH_TABLES, BatchDetails, StoredBatch
from stoker.gateway.objects.file_table import get_file
from stoker.gateway.objects.object_ids import is_object_id
from stoker.gateway.objects.object_settings import BatchSettings
from stoker.gateway.objects.pages import list_object, page_of
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads
from stoker.proto.openai.decode import decode

PATH = b"/v1/batches"
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
_MAX_WINDOW_H = 168


class _OutputExpiry(msgspec.Struct):
    anchor: str
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class _NewBatch(msgspec.Struct):
    """The body of a request that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _OutputExpiry | None = None


class BatchesEndpoint:
    """Answers requests for batches."""

    def __init__(
        self,
        store: StoreThreads,
        keys: ApiKeys,
        settings: BatchSettings,
        *,
        owner: str,
        lease_s: float,
        unix_time: Callable[[], float] = time.time,
        errors: TaskErrors | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings
        self._unix_time = unix_time
        self.runner = BatchRunner(
            store, keys, settings, owner=owner, lease_s=lease_s, unix_time=unix_time, errors=errors
        )
        store.store.declare(BATCH_TABLES)

    async def answer(self, request: HttpRequest) -> Reply | None:
        caller = self._keys.authenticate(request)
        batch_id, _, part = request.path.removeprefix(PATH).removeprefix(b"/").decode("ascii").partition("/")
        match batch_id, part, request.method:
            case "", "", b"POST":
                return await self._create(request, caller)
            case "", "", b"GET":
                return await self._list(request, caller)
            case "", "", _:
                return method_not_allowed(request.path, request.method, [b"GET", b"POST"])
            case _, "", b"GET":
                return json_reply((await self._get(caller, batch_id)).shown())
            case _, "cancel", b"POST":
                return await self._cancel(caller, batch_id)
            case _, "" | "cancel", _:
                return method_not_allowed(request.path, request.method, [b"POST" if part else b"GET"])
        raise NotFound(f"No such path: {request.path.decode('latin-1')}.", code="unknown_url")

    async def _create(self, request: HttpRequest, caller: Caller) -> Reply:
        given = decode(_NewBatch, request.body)
        if given.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"Invalid value for 'endpoint': {given.endpoint[:80]!r}. Expected one of: {', '.join(ENDPOINTS)}.",
                param="endpoint",
                code="invalid_value",
            )
        now_s = self._unix_time()
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=caller.tenant,
            key_id=caller.key_id,
            created_s=now_s,
            status="validating",
            endpoint=given.endpoint,
            input_file_id=given.input_file_id,
            due_s=now_s + _window_s(given.completion_window),
            kept_until_s=now_s + _window_s(given.completion_window) + self._settings.retention_s,
            details=BatchDetails(
                metadata=_checked_metadata(given.metadata),
                completion_window=given.completion_window,
                output_expires_s=None if given.output_expires_after is None else given.output_expires_after.seconds,
            ),
        )

        def work(changes: Transaction) -> int:
            file_id = batch.input_file_id
            file = get_file(changes, caller.tenant, file_id) if is_object_id(file_id) else None
            if file is None:
                raise InvalidRequest(
                    f"Invalid value for 'input_file_id': no file {batch.input_file_id[:80]!r}.", param="input_file_id"
                )
            if file.purpose != "batch":
                raise InvalidRequest(
                    f"Invalid value for 'input_file_id': the purpose of the file is {file.purpose!r}, and must be 'batch'.",
                    param="input_file_id",
                )
            num_open = table.num_open(changes, caller.key_id)
            if num_open < self._settings.max_batches:
                table.insert_batch(changes, batch)
            return num_open

        num_open = await self._store.write(work)
        if num_open >= self._settings.max_batches:
            message = f"This key has {num_open} batches that have not ended, which is the limit; retry later."
            raise Overloaded(message, retry_after_s=60.0, code="rate_limited")
        self.runner.wake()
        return json_reply(batch.shown())

    async def _list(self, request: HttpRequest, caller: Caller) -> Reply:
        page = page_of(request.query)

        def work(reader: Transaction) -> list[StoredBatch]:
            after = None if page.after is None else table.get_batch(reader, caller.tenant, page.after)
            if page.after is not None and after is None:
                raise InvalidRequest(f"Invalid value for 'after': no batch {page.after[:80]!r}.", param="after")
            return table.list_batches(reader, caller.tenant, after, page.limit + 1)

        found = await self._store.read(work)
        shown: list[dict[str, Any]] = [batch.shown() for batch in found[: page.limit]]
        return json_reply(list_object(shown, has_more=len(found) > page.limit))

    async def _cancel(self, caller: Caller, batch_id: str) -> Reply:
        batch = await self._get(caller, batch_id)
        was = batch.status
        if was in ("cancelling", "cancelled"):
            return json_reply(batch.shown())
        if was not in ("validating", "in_progress"):
            raise InvalidRequest(f"Cannot cancel a batch with the status '{was}'.", code="invalid_value")
        batch.status, batch.details.cancelling_at = "cancelling", int(self._unix_time())
        if not await self._store.write(lambda changes: table.set_status(changes, batch, (was,))):
            return await self._cancel(caller, batch_id)  # it has moved on meanwhile
        self.runner.wake()
        return json_reply(batch.shown())

    async def _get(self, caller: Caller, batch_id: str) -> StoredBatch:
        read = partial(table.get_batch, tenant=caller.tenant, batch_id=batch_id)
        batch = await self._store.read(read) if is_object_id(batch_id) else None
        if batch is None:
            raise NotFound(f"No batch with id '{batch_id[:80]}' found.", param="id", code="not_found")
        return batch


def _window_s(window: str) -> float:
    found = _WINDOW.fullmatch(window)
    if found is None or int(found.group(1)) > _MAX_WINDOW_H:
        raise InvalidRequest(
            f"Invalid value for 'completion_window': {window[:40]!r}. Expected hours, from '1h' to '{_MAX_WINDOW_H}h'.",
            param="completion_window",
            code="invalid_value",
        )
    return 3600.0 * int(found.group(1))


def _checked_metadata(metadata: dict[str, str] | None) -> dict[str, str] | None:
    given = metadata or {}
    if len(given) > 16 or any(len(name) > 64 or len(value) > 512 for name, value in given.items()):
        raise InvalidRequest(
            "Invalid value for 'metadata': at most 16 pairs, keys of up to 64 and values of up to 512 characters.",
            param="metadata",
        )
    return metadata
