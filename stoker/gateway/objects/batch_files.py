"""Reads the input of a batch into lines, and writes its results to files. Both can be interrupted and begun again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial

import msgspec

from stoker.gateway.objects import batch_table as table
from stoker.gateway.objects import file_table
from stoker.gateway.objects.batch_file import BatchReader
from stoker.gateway.objects.batch_table import FAILED, SUCCEEDED, WAITING, StoredBatch
from stoker.gateway.objects.file_table import PIECE_BYTES, StoredFile
from stoker.gateway.objects.object_settings import BatchSettings
from stoker.gateway.store.store import Transaction
from stoker.gateway.store.store_threads import StoreThreads

_LINES_AT_ONCE = 200
_MAX_LINE_BYTES = 16 << 20
_LEFT = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


class BatchFiles:
    """The jobs of a gateway on whole batches. Its caller holds the lease of the batch."""

    def __init__(
        self, store: StoreThreads, settings: BatchSettings, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._settings = settings
        self._unix_time = unix_time

    async def read_input(self, batch: StoredBatch) -> None:
        """Read the input file into lines. The batch then runs, or has failed with what is wrong in each line."""
        await self._delete_lines(batch)  # of an earlier attempt
        reader = BatchReader(batch.endpoint, self._settings.max_lines, _MAX_LINE_BYTES)
        get_file = partial(file_table.get_file, tenant=batch.tenant, file_id=batch.input_file_id)
        file = await self._store.read(get_file)
        number, num_bytes = 0, 0
        read = partial(file_table.piece, file_id=batch.input_file_id)
        while not reader.is_hopeless and (data := await self._store.read(partial(read, number=number))) is not None:
            await self._add(batch, reader.push(data))
            number, num_bytes = number + 1, num_bytes + len(data)
        if not reader.is_hopeless and (file is None or num_bytes < file.num_bytes):
            reader.lost_input()  # its lines so far must not pass for all of it
        await self._add(batch, reader.finish())
        now = int(self._unix_time())
        if reader.errors:
            batch.status, batch.details.errors, batch.details.failed_at = "failed", reader.errors, now
        else:
            batch.status, batch.total, batch.details.in_progress_at = "in_progress", reader.num_requests, now
        await self._store.write(partial(table.set_status, batch=batch, was=("validating",)))
        if reader.errors:
            await self._delete_lines(batch)

    async def _delete_lines(self, batch: StoredBatch) -> None:
        while await self._store.write(partial(table.delete_lines, batch_id=batch.id, limit=_LINES_AT_ONCE)):
            pass

    async def _add(self, batch: StoredBatch, lines: list[tuple[int, str, bytes]]) -> None:
        for start in range(0, len(lines), _LINES_AT_ONCE):
            some = lines[start : start + _LINES_AT_ONCE]
            await self._store.write(partial(table.insert_lines, batch_id=batch.id, lines=some))

    async def write_output(self, batch: StoredBatch) -> None:
        """Write the results of a batch that no longer runs to its files, and end it."""
        was, now_s = batch.status, self._unix_time()
        num_left = await self._store.read(partial(table.num_waiting_lines, batch_id=batch.id))
        final = "cancelled" if was == "cancelling" else "expired" if num_left else "completed"
        output = await self._write_file(batch, "output", [SUCCEEDED], final)
        errors = await self._write_file(batch, "error", [FAILED, WAITING], final)
        batch.status = final
        batch.details.output_file_id = output.id if output.num_bytes else None
        batch.details.error_file_id = errors.id if errors.num_bytes else None
        setattr(batch.details, f"{final}_at", int(now_s))

        def work(changes: Transaction) -> None:
            if table.set_status(changes, batch, (was,)):
                for file in (output, errors):
                    if file.num_bytes:
                        file_table.complete_file(changes, file)

        await self._store.write(work)
        await self._delete_lines(batch)

    async def _write_file(self, batch: StoredBatch, name: str, states: list[int], final: str) -> StoredFile:
        """Write the results of lines in these states. The same batch always gives the same file."""
        now_s = self._unix_time()
        digest = hashlib.sha256(f"{batch.id}\n{name}".encode()).hexdigest()[:32]
        kept_s = min(self._settings.retention_s, batch.details.output_expires_s or self._settings.retention_s)
        file = StoredFile(
            id=f"file-{digest}",
            tenant=batch.tenant,
            purpose="batch_output",
            filename=f"{batch.id}_{name}.jsonl",
            created_s=now_s,
            expires_s=now_s + kept_s,
            num_bytes=0,
        )
        await self._store.write(partial(file_table.begin_file, file=file))
        pending, number = bytearray(), 0

        async def put(data: bytes) -> None:
            nonlocal number
            put_piece = partial(file_table.put_piece, file_id=file.id, number=number, data=data)
            file.stored_bytes += await self._store.write(put_piece)
            file.num_bytes += len(data)
            number += 1

        for state in states:
            line = 0
            while rows := await self._store.read(
                partial(table.results_after, batch_id=batch.id, state=state, line=line, limit=_LINES_AT_ONCE)
            ):
                for at, custom_id, result in rows:
                    pending += (result or left_line(batch.id, at, custom_id, final)) + b"\n"
                    line = at
                while len(pending) >= PIECE_BYTES:
                    await put(bytes(pending[:PIECE_BYTES]))
                    del pending[:PIECE_BYTES]
        if pending:
            await put(bytes(pending))
        return file


def line_id(batch_id: str, line: int) -> str:
    """Return the id of a line in the output. It is a function of the line, so that a second run has the same."""
    return "batch_req_" + hashlib.sha256(f"{batch_id}\n{line}".encode()).hexdigest()[:32]


def left_line(batch_id: str, line: int, custom_id: str, final: str) -> bytes:
    """Return the result of a line that was not executed."""
    code, message = _LEFT.get(final, _LEFT["expired"])
    error = {"code": code, "message": message}
    return msgspec.json.encode(
        {"id": line_id(batch_id, line), "custom_id": custom_id, "response": None, "error": error}
    )
