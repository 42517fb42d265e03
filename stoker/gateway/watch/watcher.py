"""Watches one worker: is it there, what does it serve, how loaded is it, which blocks does it hold.

A task asks in turns; what it hears goes to the fleet, the prefix indexes and the key makers, which do no asking of their
own. Questions have deadlines and connections of their own, so that a worker busy with requests is still seen to be there,
and one that hangs is seen to hang. Nothing here is on the path of a request.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec
import zmq

from stoker.base import log as logs
from stoker.base.errors import ModelFilesError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.gateway.http import AnswerLost, ClientLimits, ConnectTimeout, NoSocketLeft, Origin, Pool, Unreachable
from stoker.gateway.prefix.conversation import KeyMakers
from stoker.gateway.prefix.token_keys import TokenKeys, TokenText
from stoker.gateway.watch import scrape
from stoker.gateway.watch.kv_events import KvFollower, LoadListener
from stoker.gateway.watch.rekey import Rekeyer, StoreBlocks, WorkerIndex
from stoker.proto.internal_http import SECRET_HEADER, TOKENIZER_PATH, WORKER_INFO_PATH
from stoker.proto.messages import TokenizerFiles, WorkerInfo, WorkerReport
from stoker.routing.router import PrefixIndexes

_ANSWER_BYTES = 4 << 20
_TOKENIZER_BYTES = 128 << 20
_OURS = "stoker"

log = logs.EventLog("watch")


@dataclass(frozen=True, slots=True)
class WatchSettings:
    probe_s: float = 1.0
    jitter: float = 0.1
    connect_s: float = 1.0
    answer_s: float = 3.0
    tokenizer_s: float = 30.0
    learn_s: float = 30.0  # how often the models and the worker's own description are asked for again
    late_probes: int = 3  # so many without an answer in time, one after the other: it is not there
    tokenize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all watchers tell things to."""

    fleet: Fleet
    indexes: PrefixIndexes
    key_makers: KeyMakers
    settings: WatchSettings
    clock: Callable[[], float]
    secret: str | None
    on_lost: Callable[[WorkerId], None]
    zmq_context: zmq.Context[zmq.Socket[bytes]]
    stores: WeakValueDictionary[str, StoreBlocks] = field(
        default_factory=WeakValueDictionary
    )  # while anybody follows one


class Watcher:
    def __init__(self, spec: WorkerSpec, around: Surroundings, api_key: str | None = None) -> None:
        self.spec = spec
        self._around = around
        self._settings = around.settings
        self._pool = Pool(Origin.from_url(spec.url), ClientLimits(max_idle=2))
        self._headers = [] if api_key is None else [(b"authorization", b"Bearer " + api_key.encode())]
        if around.secret is not None and spec.dialect == _OURS:
            self._headers.append((SECRET_HEADER.encode(), around.secret.encode()))
        self._random = random.Random(spec.worker_id)
        self._state: tuple[bool, bool] | None = None  # live, ready: as last seen
        self._is_told = False  # and whether the fleet knows
        self._num_late = 0
        self._models: tuple[str, ...] = spec.models
        self._learnt_s = float("-inf")
        self._page_tokens: int | None = None
        self._info: WorkerInfo | None = None
        self._follower: KvFollower | LoadListener | None = None
        self._following: tuple[object, ...] = ()
        self._complaints: set[str] = set()
        self._task = asyncio.create_task(self._run(), name=f"watch-{spec.worker_id}")

    @property
    def follower(self) -> KvFollower | LoadListener | None:
        return self._follower

    @property
    def info(self) -> WorkerInfo | None:
        return self._info

    def look_again(self) -> None:
        """What we know of it may be of the process before."""
        self._is_told = False
        self._learn_soon()

    def _learn_soon(self) -> None:
        self._learnt_s = float("-inf")

    def end(self) -> None:
        self._task.cancel()
        self._unfollow()
        self._pool.close()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        settings = self._settings
        while True:
            try:
                await self._look()
            except (Unreachable, NoSocketLeft, AnswerLost, TimeoutError) as lost:
                self._complain("question_failed", reason=str(lost) or "no answer in time")
            except Exception:  # a watcher that ends would leave its worker as it was last seen, for good
                log.error("watch_failed", exc_info=True, worker=self.spec.worker_id)
            await asyncio.sleep(settings.probe_s * (1 + settings.jitter * self._random.uniform(-1, 1)))

    # ---- is it there

    async def _look(self) -> None:
        seen = await self._probe()
        if seen is None:
            return
        live, ready = seen
        if not live:
            self._tell(False, False)
            return
        if self._state is None or not self._state[0]:
            self._learn_soon()
            self._complaints.clear()
        try:
            if self._around.clock() - self._learnt_s >= self._settings.learn_s:
                await self._learn()
            await self._scrape()
            self._follow()
        finally:
            self._tell(True, ready)

    async def _probe(self) -> tuple[bool, bool] | None:
        """Live and ready; None: late, which says nothing yet."""
        try:
            status = await self._ready_status()
        except (ConnectTimeout, AnswerLost, TimeoutError):
            self._num_late += 1
            return (False, False) if self._num_late >= self._settings.late_probes else None
        except Unreachable:
            return False, False
        self._num_late = 0
        return True, 200 <= status < 300

    async def _ready_status(self) -> int:
        if self.spec.dialect == _OURS:
            return (await self._get(b"/ready"))[0]
        status, _ = await self._get(b"/health")
        if status in (404, 405):
            status, _ = await self._get(b"/v1/models")
        return status

    def _tell(self, live: bool, ready: bool) -> None:
        before, self._state = self._state, (live, ready)
        if before == self._state and self._is_told:
            return
        self._is_told = True
        if ready and before == (True, False):
            self._learn_soon()  # its engine may have begun another life: tickets name it, and where its KV is pulled
        around, worker_id = self._around, self.spec.worker_id
        around.fleet.saw_probe(worker_id, live=live, ready=ready, now=around.clock())
        log.event("worker_seen", worker=worker_id, live=live, ready=ready)
        if before is not None and before[0] and not live:
            around.on_lost(worker_id)
            if not isinstance(self._follower, KvFollower):
                for model in self._models:  # a process that is gone took its cache with it
                    around.indexes[model].cleared(worker_id)

    # ---- what it is

    async def _learn(self) -> None:
        self._learnt_s = self._around.clock()
        try:
            await self._ask()
        except (Unreachable, NoSocketLeft, AnswerLost, TimeoutError):
            self._learn_soon()  # a worker whose models are not known gets no request
            raise

    async def _ask(self) -> None:
        if self.spec.dialect == _OURS and await self._learn_ours():
            return
        status, answer = await self._get(b"/v1/models")
        names = scrape.model_names(answer) if status == 200 else None
        if names is None:
            self._complain("models_unknown", status=status)
            self._learn_soon()
            return
        self._saw_models(names)
        if self.spec.dialect == "sglang" and self._page_tokens is None:
            for path in (b"/server_info", b"/get_server_info"):
                status, answer = await self._get(path)
                if status == 200:
                    self._page_tokens = scrape.page_size(answer)
                    break

    async def _learn_ours(self) -> bool:
        status, answer = await self._get(WORKER_INFO_PATH.encode())
        if status != 200:
            self._complain("worker_tells_nothing", status=status, answer=answer[:200].decode("utf-8", "replace"))
            return False
        try:
            info = msgspec.json.decode(answer, type=WorkerInfo)
        except msgspec.DecodeError as wrong:
            self._complain("worker_info_unreadable", reason=str(wrong))
            return False
        self._info = info
        if info.role != self.spec.role.value:
            self._complain("role_differs", configured=self.spec.role.value, own=info.role)
        self._models = self.spec.models or tuple(info.models)
        await self._learn_tokenizer(info)
        self._saw_models(
            info.models
        )  # requests come from here on: their conversations are known by tokens from the first on
        self._set_capacity(info.num_blocks, info.block_tokens)
        return True

    def _saw_models(self, names: list[str]) -> None:
        self._around.fleet.saw_models(self.spec.worker_id, names)
        self._models = self.spec.models or tuple(names)
        if self._info is not None and self._models:
            first = self._around.indexes[self._models[0]]
            for alias in self._models[1:]:  # one model under several names has one set of blocks
                self._around.indexes.setdefault(alias, first)

    async def _learn_tokenizer(self, info: WorkerInfo) -> None:
        makers = self._around.key_makers
        if not self._settings.tokenize:
            return
        known = next((maker for model in self._models if isinstance(maker := makers.exact(model), TokenKeys)), None)
        if known is None:
            status, answer = await self._get(TOKENIZER_PATH.encode(), self._settings.tokenizer_s, _TOKENIZER_BYTES)
            if status != 200:
                self._complain("no_tokenizer", status=status)
                return
            try:
                known = await asyncio.to_thread(_token_keys, answer, info)
            except (msgspec.DecodeError, ModelFilesError) as wrong:
                self._complain("tokenizer_unreadable", reason=str(wrong))
                return
        elif known.digest != info.tokenizer:
            self._complain("tokenizer_differs", models=self._models, own=info.tokenizer, known=known.digest)
        for model in self._models:
            if makers.exact(model) is None:
                makers.set_exact(model, known)

    def _set_capacity(self, num_blocks: int | None, block_tokens: int | None) -> None:
        """How much may be assumed to be there, of a worker without events."""
        for model in self._models:
            blocks = None
            if num_blocks and block_tokens:
                blocks = max(1, num_blocks * block_tokens // self._around.key_makers.block_tokens(model))
            self._around.indexes[model].set_capacity(self.spec.worker_id, blocks)

    # ---- how loaded it is

    async def _scrape(self) -> None:
        match self.spec.dialect:
            case "vllm":
                status, page = await self._get(b"/metrics")
                load = scrape.vllm_load(page) if status == 200 else None
            case "sglang":
                status, page = await self._get(b"/v1/loads")
                load = scrape.sglang_loads(page, self._page_tokens) if status == 200 else None
                if load is None:
                    status, page = await self._get(b"/metrics")
                    load = scrape.sglang_load(page, self._page_tokens) if status == 200 else None
            case _:
                return
        if load is None:
            self._complain("no_load", status=status)
            return
        self._around.fleet.saw_report(self.spec.worker_id, load, self._around.clock())
        self._set_capacity(load.num_blocks, load.block_tokens)

    def _on_report(self, payload: bytes) -> None:
        try:
            report = msgspec.msgpack.decode(payload, type=WorkerReport)
        except msgspec.DecodeError as wrong:
            self._complain("report_unreadable", reason=str(wrong))
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
        self._around.fleet.saw_report(self.spec.worker_id, load, self._around.clock())
        self._tell(True, report.ready and not report.draining)
        if self._info is not None and report.worker_id != self._info.worker_id:
            self._info = None
            self._learn_soon()

    # ---- which blocks it holds

    def _follow(self) -> None:
        """Listens where there is something to listen to; anew when the worker is a new process, or is understood better."""
        spec, info = self.spec, self._info
        events = spec.events_url or (info.events if info else None)
        if events is None:
            return
        replay = spec.replay_url or (info.replay if info else None)
        makers = self._around.key_makers
        model = next((name for name in self._models if makers.exact(name) is not None), None)
        block_tokens = makers.block_tokens(model) if model is not None else None
        stores = dict(info.stores) if info else {}
        following = (events, replay, info.worker_id if info else None, block_tokens, self._models, stores)
        if following == self._following:
            return
        self._unfollow()
        self._following = following
        context = self._around.zmq_context
        ours = spec.dialect == _OURS
        if block_tokens is None:
            self._follower = LoadListener(context, events, self._on_report) if ours else None
            return
        indexes = {id(index): index for index in (self._around.indexes[name] for name in self._models)}
        told = WorkerIndex(spec.worker_id, list(indexes.values()))
        told.share(stores)
        told.cleared()
        blocks = {medium: self._around.stores.setdefault(name, StoreBlocks()) for medium, name in stores.items()}
        rekeyer = Rekeyer(told, block_tokens, hashes_salts=not ours, stores=blocks)
        on_report = self._on_report if ours else _ignore
        self._follower = KvFollower(
            spec.worker_id, context, events, replay, rekeyer, snapshots=ours, on_report=on_report
        )

    def _unfollow(self) -> None:
        self._following = ()
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    # ---- asking

    async def _get(
        self, path: bytes, answer_s: float | None = None, limit_bytes: int = _ANSWER_BYTES
    ) -> tuple[int, bytes]:
        settings = self._settings
        async with asyncio.timeout(answer_s or settings.answer_s):
            answer = await self._pool.send(b"GET", path, self._headers, b"", connect_s=settings.connect_s, head_s=None)
            return answer.status, await answer.read(limit_bytes)

    def _complain(self, event: str, **fields: object) -> None:
        """Once, until the worker comes back."""
        if event not in self._complaints:
            self._complaints.add(event)
            log.warning(event, worker=self.spec.worker_id, **fields)


def _token_keys(answer: bytes, info: WorkerInfo) -> TokenKeys:
    files = msgspec.json.decode(answer, type=TokenizerFiles).files
    return TokenKeys(TokenText.from_files(files), info.block_tokens, info.max_model_tokens)


def _ignore(payload: bytes) -> None: ...
