"""`/stoker/model`: gives a running worker another model.

The new model's files are read while the worker still serves. Then running requests finish, the engine ends, and the spare engine
process (or a new one, if there is no spare) loads the new model. To gateways the worker looks like a new process at the same
address. Until the old engine ends, the switch is cancelled if the client disconnects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from aiohttp import web

from stoker.base.errors import ConfigError, InvalidRequest, ModelFilesError, Overloaded
from stoker.proto.messages import EngineArguments
from stoker.proto.model_switch import ModelRequest, ModelSwitched
from stoker.proto.openai.decode import decode
from stoker.worker.context import CONTEXT, ModelText, WorkerContext, read_body
from stoker.worker.identity import new_worker_id
from stoker.worker.moves import wait_pulled


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the server process needs of a model, and what the engine process needs to load it."""

    names: tuple[str, ...]
    text: ModelText
    arguments: EngineArguments


class SwitchableEngine(Protocol):
    async def switch(self, arguments: EngineArguments) -> None:
        """Replace the engine. Raises the reason if the new one cannot start; then the old one is started again."""


class Registration(Protocol):
    def start(self) -> None: ...

    async def leave(self) -> None: ...


class ModelSwitch:
    """Switches the model of one worker, one switch at a time."""

    def __init__(
        self,
        context: WorkerContext,
        engine: SwitchableEngine,
        registration: Registration,
        load: Callable[[str, tuple[str, ...]], Awaitable[LoadedModel]],
        drain_s: float,
        moves: bool = True,
    ) -> None:
        """`load` reads a model's text files. `drain_s` is the limit of the drain for requests that give none.

        `moves`: gateways shall continue running requests on other workers.
        """
        self._context = context
        self._engine = engine
        self._registration = registration
        self._load = load
        self._drain_s = drain_s
        self._moves = moves
        self._task: asyncio.Task[ModelSwitched] | None = None
        self._is_replacing = False  # the old engine has ended: the switch must go on
        self._is_stopping = False

    def begin(self, wanted: ModelRequest) -> asyncio.Task[ModelSwitched]:
        """Start a switch. Raises Overloaded if the worker stops, or while another switch runs."""
        if self._is_stopping:
            raise Overloaded("This worker is stopping and keeps its model.", code="draining")
        if self._task is not None and not self._task.done():
            raise Overloaded("This worker already switches its model; retry later.", code="model_switching")
        self._task = asyncio.create_task(self._switch(wanted), name="model-switch")
        return self._task

    def cancel(self) -> None:
        """Cancel the running switch, unless the old engine has ended: half of a switch would leave no model."""
        if self._task is not None and not self._is_replacing:
            self._task.cancel()

    async def stop(self) -> None:
        """Cancel the running switch and refuse others, because the worker stops."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _switch(self, wanted: ModelRequest) -> ModelSwitched:
        log = self._context.log
        try:
            model = await self._load(wanted.model, tuple(wanted.served_names))
            return await self._drain_and_replace(model, self._drain_s if wanted.drain_s is None else wanted.drain_s)
        except (ModelFilesError, ConfigError) as error:
            log.error("model_switch_failed", model=wanted.model, reason=error.message)
            raise InvalidRequest(
                f"Invalid value for 'model': {error.message}", param="model", code=error.code
            ) from error
        except Exception as error:
            log.error("model_switch_failed", model=wanted.model, reason=str(error))
            raise
        except asyncio.CancelledError:
            log.warning("model_switch_cancelled", model=wanted.model)
            raise

    async def _drain_and_replace(self, model: LoadedModel, drain_s: float) -> ModelSwitched:
        context, state = self._context, self._context.state
        context.log.event("model_switching", model=model.names[0], running=state.num_running, drain_s=drain_s)
        state.begin_drain("model", moves=self._moves)
        try:
            await self._registration.leave()
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await state.wait_idle()
                    await wait_pulled(context.service, drain_s)
            self._is_replacing = True
            return await self._replace(model)
        finally:
            self._is_replacing = False
            context.identity = replace(context.identity, worker_id=new_worker_id())
            if not self._is_stopping:
                state.end_drain("model")
                self._registration.start()

    async def _replace(self, model: LoadedModel) -> ModelSwitched:
        context, started_s = self._context, time.monotonic()
        await self._engine.switch(model.arguments)
        context.text, context.config = model.text, replace(context.config, served_names=model.names)
        seconds = time.monotonic() - started_s
        context.log.event("model_switched", model=model.names[0], seconds=round(seconds, 3))
        return ModelSwitched(models=list(model.names), seconds=seconds)


SWITCH = web.AppKey("switch", ModelSwitch)


async def switch_model(request: web.Request) -> web.Response:
    context, switch = request.app[CONTEXT], request.app[SWITCH]
    if context.identity.secret is None:
        raise web.HTTPForbidden(text="A worker without --secret-file keeps its model: give it a secret to allow this.")
    task = switch.begin(decode(ModelRequest, await read_body(request, context.config)))
    try:
        switched = await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise Overloaded("This worker is stopping and keeps its model.", code="draining") from None
        switch.cancel()  # the client has disconnected
        raise
    return web.Response(body=msgspec.json.encode(switched), content_type="application/json")
