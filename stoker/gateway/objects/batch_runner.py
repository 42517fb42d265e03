"""Works on the batches of all tenants: claims lines under a lease, runs them as flex requests, and writes each result once.

All gateways of a store work on the same batches. The lines of a gateway that died are claimed by another one when their lease
expires. A line may then run twice, but only one result is kept. A line that an interactive request preempts, or that a busy or
broken fleet refuses, runs again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import Raw

from stoker.base.errors import StokerError
from stoker.base.log import EventLog
from stoker.base.long_task import TaskErrors, repeat
from stoker.gateway.admission.api_keys import ApiKeys, Caller
from stoker.gateway.http import Headers, HttpRequest, InternalRequest, internal_head
from stoker.gateway.objects import batch_table as table
from stoker.gateway.objects.batch_files import BatchFiles, line_id
from stoker.gateway.objects.batch_table import BatchLine, LineResult, StoredBatch
from stoker.gateway.objects.line_usage import LineUsage, usage_of
from stoker.gateway.objects.object_settings import BatchSettings
from stoker.gateway.store.store_threads import StoreThreads

RunLine = Callable[[HttpRequest], Awaitable[None]]

_MAX_BATCHES = 1000  # that a gateway looks at
_GATHER_S = 0.02  # results of this time are written together
_BUSY = frozenset({429, 503})  # the line waits
_BROKEN = frozenset({500, 502, 504})  # the line is tried again a few times
_MAX_ATTEMPTS = 3
_RETRY_S = 0.25
_MAX_RETRY_S = 10.0
_ERROR_S = 2.0  # pause after the store failed
_DEFECT_S = 30.0  # pause of a batch after an unexpected error
_DEFECT = b'{"error":{"message":"The gateway failed.","type":"server_error","param":null,"code":"internal_error"}}'

log = EventLog("batch")


class LineSink:
    """Keeps the answer to one line."""

    paused = False

    def __init__(self, status: int = 0, body: bytes = b"") -> None:
        self.status = status
        self.body = body

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.status, self.body = status, body

    def start(self, status: int, headers: Headers) -> None:
        self.status = status  # a worker that streams although it was not asked to

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None: ...


class BatchRunner:
    """The part of all batches that this gateway works on."""

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
        self._owner = owner
        self._lease_s = lease_s
        self._unix_time = unix_time
        self._errors = errors or TaskErrors()
        self._files = BatchFiles(store, settings, unix_time)
        self._run: RunLine | None = None
        self._worker: asyncio.Task[None] | None = None
        self._jobs: dict[str, asyncio.Task[None]] = {}  # on whole batches
        self._lines: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._running: set[str] = set()  # the batches whose lines may run
        self._requests: dict[tuple[str, int], InternalRequest] = {}
        self._results: list[LineResult] = []  # not written yet
        self._returned: list[tuple[str, int]] = []  # lines that ended without a result, to give back
        self._insisting: BatchLine | None = None  # the one line that is not preempted
        self._is_draining = False
        self._wake = asyncio.Event()
        self._renewed_s = 0.0

    @property
    def num_running(self) -> int:
        return len(self._lines)

    def open(self, run: RunLine) -> None:
        """Begin to work. `run` answers the request of a line."""
        self._run = run
        self._worker = asyncio.get_running_loop().create_task(repeat("batches", self._work, self._errors))

    async def close(self) -> None:
        """Stop. Results are written, and lines that run are given back."""
        tasks = [task for task in (self._worker, *self._jobs.values(), *self._lines.values()) if task is not None]
        lines = list(self._lines)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._returned += lines
        if self._returned or self._results:
            with suppress(StokerError):  # otherwise the leases expire by themselves
                await self._write_results()

    def begin_drain(self) -> None:
        """Stop the lines that run and claim no others, so that the gateway can stop."""
        self._is_draining = True
        self._wake.set()

    def wake(self) -> None:
        """Look for work now."""
        self._wake.set()

    async def _work(self) -> None:
        try:
            await self._write_results()
            await self._look()
        except StokerError as error:
            log.warning("batches_wait", reason=error.message)
            await asyncio.sleep(_ERROR_S)
        self._wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.poll_s):
                await self._wake.wait()
        await asyncio.sleep(_GATHER_S)

    async def _write_results(self) -> None:
        if self._results:
            results = list(self._results)
            await self._store.write(partial(table.end_lines, owner=self._owner, results=results))
            del self._results[: len(results)]
        if self._returned:
            returned, self._returned = self._returned, []
            await self._store.write(partial(table.renew_lines, owner=self._owner, lines=returned, lease_s=0.0))

    async def _look(self) -> None:
        """Begin what can be begun, stop what must stop, and keep the leases."""
        now_s = self._unix_time()
        if self._lines and time.monotonic() - self._renewed_s > self._lease_s / 3:
            self._renewed_s = time.monotonic()
            lease = partial(
                table.renew_lines, owner=self._owner, lines=list(self._lines), lease_s=now_s + self._lease_s
            )
            await self._store.write(lease)
        batches = await self._store.read(partial(table.open_batches, limit=_MAX_BATCHES))
        open_now = [] if self._is_draining else batches
        running = self._running = {one.id for one in open_now if one.status == "in_progress" and one.due_s > now_s}
        for (batch_id, _), request in list(self._requests.items()):
            if batch_id not in running:
                request.lose()
        if self._is_draining:
            return
        by_tenant: dict[str, list[StoredBatch]] = {}
        for batch in batches:
            if batch.id in running:
                by_tenant.setdefault(batch.tenant, []).append(batch)
            else:
                self._begin_job(batch)
        for mine in by_tenant.values():
            await self._claim(mine, -(-self._settings.running // len(by_tenant)), now_s)

    async def _claim(self, batches: list[StoredBatch], most: int, now_s: float) -> None:
        """Claim lines of one tenant's batches, the oldest first. The tenant may have `most` lines at a time."""
        ids = {batch.id for batch in batches}
        for batch in batches:
            caller = self._keys.caller(batch.key_id)
            if caller is None or caller.tenant != batch.tenant:
                continue  # its key was revoked: it waits, and expires
            limit = min(
                most - sum(batch_id in ids for batch_id, _ in self._lines),
                self._settings.running - len(self._lines) - len(self._results),
            )
            if limit <= 0:
                return
            claim = partial(
                table.claim_lines,
                batch_id=batch.id,
                owner=self._owner,
                now_s=now_s,
                lease_s=now_s + self._lease_s,
                limit=limit,
            )
            lines = [line for line in await self._store.write(claim) if (batch.id, line.line) not in self._lines]
            for line in lines:
                self._begin_line(batch, line, caller)
            if not lines and batch.completed + batch.failed >= batch.total:
                self._begin_job(batch)

    # ---- whole batches

    def _begin_job(self, batch: StoredBatch) -> None:
        if batch.id in self._jobs:
            return
        task = asyncio.get_running_loop().create_task(self._job(batch.id))
        self._jobs[batch.id] = task
        task.add_done_callback(lambda _: self._jobs.pop(batch.id, None))

    async def _job(self, batch_id: str) -> None:
        """Take a batch one step further, if no other gateway does."""
        keeper: asyncio.Task[None] | None = None
        try:
            batch = await self._lease(batch_id)
            if batch is None:
                return
            keeper = asyncio.create_task(self._keep(batch_id))
            match batch.status:
                case "validating":
                    await self._files.read_input(batch)
                case "in_progress":
                    await self._stop_running(batch)
                case "finalizing" | "cancelling":
                    await self._files.write_output(batch)
            self._wake.set()
        except StokerError as error:
            log.warning("batch_waits", batch=batch_id, reason=error.message)
            await asyncio.sleep(_ERROR_S)
        except Exception as error:  # `_look` begins it again
            self._errors.note("batch_job", error)
            await asyncio.sleep(_DEFECT_S)
        finally:
            if keeper is not None:
                keeper.cancel()

    async def _stop_running(self, batch: StoredBatch) -> None:
        """End the running of a batch if all lines have results, or its time is over."""
        now_s = self._unix_time()
        is_left = await self._store.read(partial(table.num_waiting_lines, batch_id=batch.id))
        if is_left and batch.due_s > now_s:
            return
        batch.status, batch.details.finalizing_at = "finalizing", int(now_s)
        await self._store.write(partial(table.set_status, batch=batch, was=("in_progress",)))

    async def _lease(self, batch_id: str) -> StoredBatch | None:
        now_s = self._unix_time()
        claim = partial(
            table.claim_batch, batch_id=batch_id, owner=self._owner, now_s=now_s, lease_s=now_s + self._lease_s
        )
        return await self._store.write(claim)

    async def _keep(self, batch_id: str) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            with suppress(StokerError):
                await self._lease(batch_id)

    # ---- lines

    def _begin_line(self, batch: StoredBatch, line: BatchLine, caller: Caller) -> None:
        key = line.batch_id, line.line
        task = asyncio.get_running_loop().create_task(self._run_line(batch, line, caller))
        self._lines[key] = task
        task.add_done_callback(lambda _: self._line_ended(key))

    def _line_ended(self, key: tuple[str, int]) -> None:
        self._lines.pop(key, None)
        self._requests.pop(key, None)
        if self._insisting is not None and (self._insisting.batch_id, self._insisting.line) == key:
            self._insisting = None
        if not any((result.line.batch_id, result.line.line) == key for result in self._results):
            self._returned.append(key)
        self._wake.set()

    async def _run_line(self, batch: StoredBatch, line: BatchLine, caller: Caller) -> None:
        num_broken, num_preempted, wait_s = 0, 0, _RETRY_S
        while line.batch_id in self._running:
            if num_preempted >= self._settings.insist_after and self._insisting is None:
                self._insisting = line
            try:
                sink, was_preempted = await self._attempt(batch, line, caller)
            except Exception as error:
                self._errors.note("batch_line", error)
                sink, was_preempted = LineSink(500, _DEFECT), False
            if was_preempted:
                num_preempted += 1
                continue
            if sink.status in _BROKEN:
                num_broken += 1
            if sink.status not in _BUSY and (sink.status not in _BROKEN or num_broken >= _MAX_ATTEMPTS):
                self._results.append(_result(line, sink))
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    async def _attempt(self, batch: StoredBatch, line: BatchLine, caller: Caller) -> tuple[LineSink, bool]:
        """Run a line once, in a task of its own, because a request that is preempted cancels its task."""
        assert self._run is not None
        answer, sink = self._run, LineSink()
        head = internal_head(batch.endpoint.encode(), [(b"x-request-id", line_id(line.batch_id, line.line).encode())])

        async def run() -> bool:
            request = InternalRequest(head, line.request, caller, sink)
            request.on_preempt = None if self._insisting is line else request.lose
            self._requests[line.batch_id, line.line] = request
            try:
                await answer(request)
            except asyncio.CancelledError:
                if not request.gone:
                    raise
            return request.gone

        return sink, await asyncio.create_task(run())


def _result(line: BatchLine, sink: LineSink) -> LineResult:
    name = line_id(line.batch_id, line.line)
    try:
        body = Raw(msgspec.json.encode(msgspec.json.decode(sink.body)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = Raw(msgspec.json.encode(sink.body.decode("utf-8", "replace")))
    response = {"status_code": sink.status, "request_id": name, "body": body}
    output = msgspec.json.encode({"id": name, "custom_id": line.custom_id, "response": response, "error": None})
    succeeded = sink.status == 200
    return LineResult(line, succeeded, output, usage_of(sink.body) if succeeded else LineUsage())
