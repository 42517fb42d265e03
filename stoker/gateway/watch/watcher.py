"""Watches one worker: whether it is alive, which models it serves, its load, and which blocks it holds.

A task polls the worker and passes the results to the fleet, the prefix indexes and the key makers, which do no I/O. Polls
have their own deadlines and connections, so that a worker busy with requests still answers them and a hanging one is
detected. Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from stoker.base import log as logs
from stoker.base.errors import ModelFilesError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.gateway.http import (
    ClientLimits,
    ConnectionPool,
    ConnectTimeout,
    NoSocketLeft,
    Origin,
    ResponseLost,
    Unreachable,
)
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.prefix.token_prefix_keys import TokenPrefixKeys, TokenText
from stoker.gateway.watch import scrape
from stoker.gateway.watch.kv_events import BadEventsAddress, KvFollower, LoadListener
from stoker.gateway.watch.load_probe import LoadProbe, LoadUnavailable
from stoker.gateway.watch.other_work import OtherWork
from stoker.gateway.watch.rekey import Rekeyer, StoreBlocks, WorkerIndex
from stoker.gateway.watch.worker_signers import WorkerSigners
from stoker.gateway.watch.zmq_reader import LazyZmqContext
from stoker.proto.event_keys import event_security
from stoker.proto.internal_http import READY_PATH, TOKENIZER_PATH, WORKER_INFO_PATH
from stoker.proto.messages import TokenizerFiles, WorkerInfo, WorkerReport
from stoker.proto.signed_http import PROOF_HEADER
from stoker.routing.router import PrefixIndexes

_ANSWER_BYTES = 4 << 20
_TOKENIZER_BYTES = 128 << 20
_STOKER = "stoker"  # the dialect of Stoker workers
_PROOF = PROOF_HEADER.encode()
_TOKENIZER_FILES = msgspec.json.Decoder(TokenizerFiles)  # used on threads, which must not make it at the same time

log = logs.EventLog("watch")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Intervals and deadlines of the polls."""

    probe_s: float = 1.0  # interval of the health checks
    jitter: float = 0.1  # the interval varies by this share, so that workers are not polled in step
    connect_s: float = 1.0
    answer_s: float = 3.0
    tokenizer_s: float = 30.0  # deadline for downloading a worker's tokenizer
    learn_s: float = 30.0  # how often the models and the worker's description are read again
    late_probes: int = 3  # a worker that misses this many health checks in a row counts as down
    tokenize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchContext:
    """What all watchers share: where their results go, and the settings."""

    fleet: Fleet
    indexes: PrefixIndexes
    key_makers: PrefixKeyMakers
    settings: WatchSettings
    clock: Callable[[], float]
    signers: WorkerSigners
    on_lost: Callable[[WorkerId], None]
    on_moving: Callable[[WorkerId], None]  # the worker drains, and wants its requests to continue elsewhere
    on_role: Callable[[WorkerId, Role], None]  # the worker was given this role while it ran
    other_work: OtherWork
    zmq_context: LazyZmqContext
    # The shared KV stores by name, each kept while a watcher follows a worker that uses it.
    stores: WeakValueDictionary[str, StoreBlocks] = field(default_factory=WeakValueDictionary)
    tokenizers: dict[WorkerId, str] = field(default_factory=dict)  # the digest of each worker's tokenizer


class Watcher:
    """Polls one worker and follows its events, from construction until `end()`."""

    def __init__(
        self, spec: WorkerSpec, context: WatchContext, load_probe: LoadProbe, api_key: str | None = None
    ) -> None:
        self.spec = spec
        self._context = context
        self._settings = context.settings
        self._load_probe = load_probe
        self._signer = context.signers.signer(spec)
        self._is_proven = self._signer is None  # whether the worker's last answer proved that it has the fleet's secret
        self._pool = ConnectionPool(Origin.from_url(spec.url), ClientLimits(max_idle=2), self._signer)
        self._headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
        self._random = random.Random(spec.worker_id)
        self._state: tuple[bool, bool] | None = None  # (live, ready) from the last health check
        self._is_reported = False  # whether `_state` was reported to the fleet
        self._num_late = 0
        self._models: tuple[str, ...] = spec.models
        self._learned_s = float("-inf")
        self._info: WorkerInfo | None = None
        self._reporter: WorkerId | None = None  # the worker's own id, from the last load report
        self._process_id: WorkerId | None = None  # the worker's own id, from the last description
        self._follower: KvFollower | LoadListener | None = None
        self._following: tuple[object, ...] = ()
        self._warned: set[str] = set()
        self._task = asyncio.create_task(self._run(), name=f"watch-{spec.worker_id}")

    @property
    def info(self) -> WorkerInfo | None:
        return self._info

    async def metrics_page(self) -> bytes | None:
        """Return the worker's /metrics, or None if it does not answer."""
        try:
            status, page = await self._get(b"/metrics")
        except (Unreachable, NoSocketLeft, ResponseLost, TimeoutError):
            return None
        return page if status == 200 else None

    def refresh(self) -> None:
        """Read everything again: the worker is a new process, so what is known may be outdated."""
        self._is_reported = False
        self._learn_soon()

    def _learn_soon(self) -> None:
        self._learned_s = float("-inf")

    def end(self) -> None:
        self._task.cancel()
        self._context.tokenizers.pop(self.spec.worker_id, None)
        self._unfollow()
        self._pool.close()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        settings = self._settings
        while True:
            try:
                await self._poll()
            except (Unreachable, NoSocketLeft, ResponseLost, TimeoutError) as lost:
                self._warn_once("poll_failed", reason=str(lost) or "no answer before the deadline")
            except Exception:  # the watcher must go on: without it, the worker's last state would stay forever
                log.error("watch_failed", exc_info=True, worker=self.spec.worker_id)
            await asyncio.sleep(settings.probe_s * (1 + settings.jitter * self._random.uniform(-1, 1)))

    # ---- health

    async def _poll(self) -> None:
        seen = await self._check_health()
        if seen is None:
            return
        live, ready = seen
        if not live:
            self._report_state(False, False)
            return
        if self._state is None or not self._state[0]:
            self._learn_soon()
            self._warned.clear()
        elif ready and not self._state[1]:
            self._learn_soon()  # the engine has restarted, perhaps with another model
        try:
            if self._context.clock() - self._learned_s >= self._settings.learn_s:
                await self._learn()
            await self._read_load()
            try:
                self._follow()
            except BadEventsAddress as bad:
                self._warn_once("bad_events_address", reason=bad.message)
        finally:
            self._report_state(True, ready)

    async def _check_health(self) -> tuple[bool, bool] | None:
        """Return (live, ready), or None if the answer is late, which is not conclusive yet."""
        try:
            status = await self._ready_status()
        except (ConnectTimeout, ResponseLost, TimeoutError):
            self._num_late += 1
            return (False, False) if self._num_late >= self._settings.late_probes else None
        except Unreachable:
            return False, False
        self._num_late = 0
        if not self._is_proven:
            self._warn_once(
                "worker_not_proven",
                hint="its answer has no proof of the fleet's secret, so it gets no requests; "
                "give worker and gateway the same --secret-file",
            )
        return True, 200 <= status < 300 and self._is_proven

    async def _ready_status(self) -> int:
        if self.spec.dialect == _STOKER:
            return (await self._get(READY_PATH.encode()))[
                0
            ]  # signed if there is a secret, so that the answer has a proof
        status, _ = await self._get(b"/health")
        if status in (404, 405):
            status, _ = await self._get(b"/v1/models")
        return status

    def _report_state(self, live: bool, ready: bool) -> None:
        before, self._state = self._state, (live, ready)
        if before == self._state and self._is_reported:
            return
        self._is_reported = True
        if ready and before == (True, False):
            self._learn_soon()  # the engine may have restarted: hand-off tickets need its new id and KV address
        context, worker_id = self._context, self.spec.worker_id
        context.fleet.saw_probe(worker_id, live=live, ready=ready, now=context.clock())
        log.event("worker_seen", worker=worker_id, live=live, ready=ready)
        if before is not None and before[0] and not live:
            context.on_lost(worker_id)
            if not isinstance(self._follower, KvFollower):
                for model in self._models:  # the cache was lost with the process
                    context.indexes[model].cleared(worker_id)

    # ---- models and description

    async def _learn(self) -> None:
        self._learned_s = self._context.clock()
        try:
            await self._learn_models()
        except (Unreachable, NoSocketLeft, ResponseLost, TimeoutError):
            self._learn_soon()  # a worker whose models are unknown gets no requests
            raise

    async def _learn_models(self) -> None:
        if self.spec.dialect == _STOKER and await self._learn_worker_info():
            return
        if not self._is_proven:
            self._learn_soon()
            return
        status, answer = await self._get(b"/v1/models")
        names = scrape.model_names(answer) if status == 200 else None
        if names is None:
            self._warn_once("models_unknown", status=status)
            self._learn_soon()
            return
        self._saw_models(names)
        await self._load_probe.learn(self._get)

    async def _learn_worker_info(self) -> bool:
        """Read a Stoker worker's description of itself; False if it gives none (an old version, or a wrong secret)."""
        status, answer = await self._get(WORKER_INFO_PATH.encode())
        if status != 200 or not self._is_proven:
            text = answer[:200].decode("utf-8", "replace")
            self._warn_once("worker_info_unavailable", status=status, answer=text)
            return False
        try:
            info = msgspec.json.decode(answer, type=WorkerInfo)
        except msgspec.DecodeError as wrong:
            self._warn_once("worker_info_unreadable", reason=str(wrong))
            return False
        self._info, self._process_id = info, info.worker_id
        if info.role != self.spec.role.value:
            self._warn_once("role_differs", configured=self.spec.role.value, own=info.role)
        self._set_models(info.models)
        # The tokenizer first: the worker gets requests as soon as its models are known, and their keys must be exact.
        await self._learn_tokenizer(info)
        self._saw_models(info.models)
        self._set_capacity(info.num_blocks, info.block_tokens)
        return True

    def _saw_models(self, names: list[str]) -> None:
        self._context.fleet.saw_models(self.spec.worker_id, names)
        self._set_models(names)
        if self._info is not None and self._models:
            first = self._context.indexes[self._models[0]]
            for alias in self._models[1:]:  # the names are aliases of one model, so they share one index
                self._context.indexes.setdefault(alias, first)

    def _set_models(self, names: Sequence[str]) -> None:
        before, self._models = self._models, self.spec.models or tuple(names)
        for model in set(before) - set(self._models):  # the worker was given another model
            self._context.indexes[model].cleared(self.spec.worker_id)

    async def _learn_tokenizer(self, info: WorkerInfo) -> None:
        makers, tokenizers = self._context.key_makers, self._context.tokenizers
        if not self._settings.tokenize:
            return
        known = next(
            (maker for model in self._models if isinstance(maker := makers.exact(model), TokenPrefixKeys)), None
        )
        tokenizers[self.spec.worker_id] = info.tokenizer
        is_outdated = known is not None and known.digest not in tokenizers.values()
        if known is None or is_outdated:
            status, answer = await self._get(TOKENIZER_PATH.encode(), self._settings.tokenizer_s, _TOKENIZER_BYTES)
            if status != 200:
                self._warn_once("no_tokenizer", status=status)
                return
            try:
                known = await asyncio.to_thread(_token_keys, answer, info)
            except (msgspec.DecodeError, ModelFilesError) as wrong:
                self._warn_once("tokenizer_unreadable", reason=str(wrong))
                return
        elif known.digest != info.tokenizer:
            self._warn_once("tokenizer_differs", models=self._models, own=info.tokenizer, known=known.digest)
        for model in self._models:
            if makers.exact(model) is None or is_outdated:
                makers.set_exact(model, known)

    def _set_capacity(self, num_blocks: int | None, block_tokens: int | None) -> None:
        """Set how many blocks the index may assume to be cached on a worker that publishes no KV events."""
        for model in self._models:
            blocks = None
            if num_blocks and block_tokens:
                blocks = max(1, num_blocks * block_tokens // self._context.key_makers.block_tokens(model))
            self._context.indexes[model].set_capacity(self.spec.worker_id, blocks)

    # ---- load

    async def _read_load(self) -> None:
        try:
            load = await self._load_probe.read(self._get)
        except LoadUnavailable as missing:
            self._warn_once("no_load", status=missing.status)
            return
        if load is not None:
            self._context.fleet.saw_report(self.spec.worker_id, load, self._context.clock())
            self._set_capacity(load.num_blocks, load.block_tokens)

    def _on_report(self, payload: bytes) -> None:
        try:
            report = msgspec.msgpack.decode(payload, type=WorkerReport)
        except msgspec.DecodeError as wrong:
            self._warn_once("report_unreadable", reason=str(wrong))
            return
        load = LoadReport(
            waiting_tokens=report.waiting_tokens,
            waiting_sequences=report.waiting_sequences,
            running_sequences=report.running_sequences,
            kv_used=1 - report.free_blocks / report.num_blocks if report.num_blocks else 0.0,
            num_blocks=report.num_blocks,
            block_tokens=report.block_tokens,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            step_s=report.step_s,
        )
        now = self._context.clock()
        self._context.fleet.saw_report(self.spec.worker_id, load, now)
        if self._reporter not in (None, report.worker_id):
            self._context.other_work.forget(self.spec.worker_id, now)  # the requests of the process before
        self._reporter = report.worker_id
        self._context.other_work.saw(self.spec.worker_id, report.changes, report.open_work, now)
        # A new process gets no requests before its models are known: the worker may have been given another one.
        is_known = self._process_id in (None, report.worker_id)
        self._report_state(True, is_known and report.ready and not report.draining and self._is_proven)
        if report.role_assigned and self._is_proven:
            self._context.on_role(self.spec.worker_id, Role(report.role))
        if report.draining and report.moving and self._is_proven:
            self._context.on_moving(self.spec.worker_id)
        if not is_known:
            self._info = None
            self._learn_soon()

    # ---- KV events

    def _follow(self) -> None:
        """Subscribe to the worker's events, if it publishes any.

        Subscribe again when the worker is a new process, or when its models, tokenizer or stores have become known.
        """
        spec, info = self.spec, self._info
        events = spec.events_url or (info.events if info else None)
        if events is None:
            return
        replay = spec.replay_url or (info.replay if info else None)
        makers = self._context.key_makers
        model = next((name for name in self._models if makers.exact(name) is not None), None)
        block_tokens = makers.block_tokens(model) if model is not None else None
        stores = dict(info.stores) if info else {}
        key, secret_id = self._context.signers.key, info.secret_id if info else None
        following = (events, replay, info.worker_id if info else None, block_tokens, self._models, stores, secret_id)
        if following == self._following:
            return
        self._unfollow()
        self._following = following
        zmq_context = self._context.zmq_context.get()
        is_stoker = spec.dialect == _STOKER
        security = event_security(None if self._signer is None or key is None else key.with_id(secret_id))
        if block_tokens is None:
            if is_stoker:
                self._follower = LoadListener(zmq_context, events, self._on_report, security)
            return
        indexes = {id(index): index for index in (self._context.indexes[name] for name in self._models)}
        index = WorkerIndex(spec.worker_id, list(indexes.values()))
        index.share(stores)
        index.cleared()
        blocks = {medium: self._context.stores.setdefault(name, StoreBlocks()) for medium, name in stores.items()}
        rekeyer = Rekeyer(index, block_tokens, hashes_salts=not is_stoker, stores=blocks)
        on_report = self._on_report if is_stoker else _ignore
        self._follower = KvFollower(
            spec.worker_id,
            zmq_context,
            events,
            replay,
            rekeyer,
            snapshots=is_stoker,
            on_report=on_report,
            security=security,
        )

    def _unfollow(self) -> None:
        self._following = ()
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    # ---- HTTP

    async def _get(
        self, path: bytes, answer_s: float | None = None, limit_bytes: int = _ANSWER_BYTES
    ) -> tuple[int, bytes]:
        settings = self._settings
        async with asyncio.timeout(answer_s or settings.answer_s):
            answer = await self._pool.send(b"GET", path, self._headers, b"", connect_s=settings.connect_s, head_s=None)
            if self._signer is not None:
                self._is_proven = self._signer.is_proven(answer.header(_PROOF))
            return answer.status, await answer.read(limit_bytes)

    def _warn_once(self, event: str, **fields: object) -> None:
        """Log a warning once, until the worker has been down and is back."""
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, worker=self.spec.worker_id, **fields)


def _token_keys(answer: bytes, info: WorkerInfo) -> TokenPrefixKeys:
    files = _TOKENIZER_FILES.decode(answer).files
    text = TokenText.from_files(files)
    return TokenPrefixKeys(text, info.block_tokens, info.max_model_tokens, info.volatile_lines)


def _ignore(payload: bytes) -> None: ...
