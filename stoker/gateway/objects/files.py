"""`/v1/files`: upload, list, read and delete files. They are the input and the output of batches."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from urllib.parse import parse_qs

from stoker.base.errors import InvalidRequest, NotFound, StokerError
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.api.reply import Reply, json_reply, method_not_allowed
from stoker.gateway.http import HttpRequest
from stoker.gateway.objects import file_table as table
from stoker.gateway.objects.file_table import FILE_TABLES, PIECE_BYTES, StoredFile
from stoker.gateway.objects.multipart import FormPart, read_form
from stoker.gateway.objects.object_ids import is_object_id
from stoker.gateway.objects.object_settings import BatchSettings
from stoker.gateway.objects.pages import list_object, page_of, small_number
from stoker.gateway.objects.quota import QUOTA_TABLES, add_bytes
from stoker.gateway.objects.slow_clients import wait_for_room
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads

PATH = b"/v1/files"
_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_EXPIRY_S = (3600, 2_592_000)  # what `expires_after` may ask for
_MAX_LIMIT = 10_000
_MAX_NAME_CHARS = 512
_PIECES_AT_ONCE = 8  # in one transaction, so that other writers do not wait long


class FilesEndpoint:
    """Answers requests for files."""

    def __init__(
        self, store: StoreThreads, keys: ApiKeys, settings: BatchSettings, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._keys = keys
        self._settings = settings
        self._unix_time = unix_time
        self._max_tenant_bytes = int(settings.max_tenant_mib * (1 << 20))
        store.store.declare(QUOTA_TABLES)
        store.store.declare(FILE_TABLES)

    async def answer(self, request: HttpRequest) -> Reply | None:
        caller = self._keys.authenticate(request)
        file_id, _, part = request.path.removeprefix(PATH).removeprefix(b"/").decode("ascii").partition("/")
        match file_id, part, request.method:
            case "", "", b"POST":
                return await self._upload(request, caller)
            case "", "", b"GET":
                return await self._list(request, caller)
            case "", "", _:
                return method_not_allowed(request.path, request.method, [b"GET", b"POST"])
            case _, "", b"GET":
                return json_reply((await self._get(caller, file_id)).shown())
            case _, "", b"DELETE":
                return await self._delete(caller, file_id)
            case _, "content", b"GET":
                await self._content(request, caller, file_id)
                return None
            case _, "" | "content", _:
                return method_not_allowed(request.path, request.method, [b"GET"])
        raise NotFound(f"No such path: {request.path.decode('latin-1')}.", code="unknown_url")

    async def _upload(self, request: HttpRequest, caller: Caller) -> Reply:
        form = read_form(request.header(b"content-type"), request.body)
        file = self._described(form, caller)
        try:
            await self._write(file, form["file"].data)
        except StokerError:
            # The pieces must not stay until they expire: a tenant above its limit could fill the disk with them.
            with suppress(StokerError):
                await self._store.write(partial(table.delete_file, tenant=file.tenant, file_id=file.id))
            raise
        return json_reply(file.shown())

    async def _write(self, file: StoredFile, data: memoryview) -> None:
        await self._store.write(partial(table.begin_file, file=file))
        numbers = range(max(1, -(-len(data) // PIECE_BYTES)))
        for start in numbers[::_PIECES_AT_ONCE]:
            some = [
                (number, data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
                for number in numbers[start : start + _PIECES_AT_ONCE]
            ]
            file.stored_bytes += await self._store.write(partial(_put, file_id=file.id, pieces=some))
        await self._store.write(partial(self._add, file=file))

    def _add(self, changes: Transaction, file: StoredFile) -> None:
        if add_bytes(changes, file.tenant, table.KIND, 0) + file.stored_bytes > self._max_tenant_bytes:
            raise InvalidRequest(
                f"The files of this tenant have reached their limit of {self._max_tenant_bytes} bytes; delete some.",
                param="file",
                code="file_quota_exceeded",
            )
        table.complete_file(changes, file)

    def _described(self, form: dict[str, FormPart], caller: Caller) -> StoredFile:
        for name in ("file", "purpose"):
            if name not in form:
                raise InvalidRequest(
                    f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
                )
        purpose = bytes(form["purpose"].data).decode("utf-8", "replace")
        if purpose not in _PURPOSES:
            raise InvalidRequest(
                f"Invalid value for 'purpose': {purpose[:40]!r}. Expected one of: {', '.join(_PURPOSES)}.",
                param="purpose",
            )
        now_s, file = self._unix_time(), form["file"]
        return StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            tenant=caller.tenant,
            purpose=purpose,
            filename=(file.filename or "upload").replace("\0", "")[:_MAX_NAME_CHARS],
            created_s=now_s,
            expires_s=now_s + min(self._settings.retention_s, _expiry_s(form)),
            num_bytes=len(file.data),
        )

    async def _list(self, request: HttpRequest, caller: Caller) -> Reply:
        page = page_of(request.query, max_limit=_MAX_LIMIT)
        purpose = parse_qs(request.query.decode("ascii")).get("purpose", [None])[-1]
        if purpose is not None and purpose not in (*_PURPOSES, "batch_output"):
            raise InvalidRequest(f"Invalid value for 'purpose': {purpose[:40]!r}.", param="purpose")

        def work(reader: Transaction) -> list[StoredFile]:
            after = None if page.after is None else table.get_file(reader, caller.tenant, page.after)
            if page.after is not None and after is None:
                raise InvalidRequest(f"Invalid value for 'after': no file {page.after[:80]!r}.", param="after")
            return table.list_files(reader, caller.tenant, purpose, after, page.limit + 1, page.is_ascending)

        found = await self._store.read(work)
        shown = [file.shown() for file in found[: page.limit]]
        return json_reply(list_object(shown, has_more=len(found) > page.limit))

    async def _content(self, request: HttpRequest, caller: Caller, file_id: str) -> None:
        """Stream the content, because a file may be larger than memory allows."""
        file = await self._get(caller, file_id)
        request.on_gone = request.task.cancel
        request.start(200, [(b"content-type", b"application/octet-stream")])
        number, num_left = 0, file.num_bytes
        try:
            while (data := await self._store.read(partial(table.piece, file_id=file.id, number=number))) is not None:
                request.write(data)
                await wait_for_room(request)
                number, num_left = number + 1, num_left - len(data)
        except asyncio.CancelledError:
            if not request.gone:
                raise
            return
        if num_left:
            request.abort()  # it was deleted meanwhile: the client must not take a part for the whole
        else:
            request.finish()

    async def _delete(self, caller: Caller, file_id: str) -> Reply:
        if not is_object_id(file_id) or not await self._store.write(
            lambda changes: table.delete_file(changes, caller.tenant, file_id)
        ):
            raise _not_found(file_id)
        return json_reply({"id": file_id, "object": "file", "deleted": True})

    async def _get(self, caller: Caller, file_id: str) -> StoredFile:
        read = partial(table.get_file, tenant=caller.tenant, file_id=file_id)
        file = await self._store.read(read) if is_object_id(file_id) else None
        if file is None:
            raise _not_found(file_id)
        return file


def _put(changes: Transaction, file_id: str, pieces: list[tuple[int, memoryview]]) -> int:
    return sum(table.put_piece(changes, file_id, number, data) for number, data in pieces)


def _expiry_s(form: dict[str, FormPart]) -> float:
    """Return what the form's `expires_after` says. Infinity if it says nothing."""
    given = form.get("expires_after[seconds]")
    if given is None:
        return float("inf")
    text = bytes(given.data).decode("ascii", "replace")
    least, most = _EXPIRY_S
    if (seconds := small_number(text)) is None or not least <= seconds <= most:
        raise InvalidRequest(
            f"Invalid value for 'expires_after.seconds': {text[:40]!r}. Expected {least} to {most}.",
            param="expires_after.seconds",
        )
    return float(seconds)


def _not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:80]}", param="id", code="not_found")
