"""`/stoker/model`: gives a running worker another model.

The new model's files are read while the worker still serves. Then running requests finish, the engine ends, and the spare engine
process loads the new model. To gateways the worker looks like a new process at the same address.
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

from stoker.base.errors import ConfigError, InvalidRequest, ModelFilesError, Overloaded, StokerError
from stoker.proto.messages import EngineArguments
from stoker.proto.model_switch import ModelRequest, ModelSwitched
from stoker.proto.openai.decode import decode
from stoker.worker.context import CONTEXT, ModelText, WorkerContext, read_body
from stoker.worker.identity import new_worker_id


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
    ) -> None:
        """`load` reads a model's text files. Running requests get `drain_s` to finish before they are ended."""
        self._context = context
        self._engine = engine
        self._registration = registration
        self._load = load
        self._drain_s = drain_s
        self._switching = asyncio.Lock()

    async def switch(self, wanted: ModelRequest) -> ModelSwitched:
        if self._switching.locked() or self._context.state.draining:
            raise Overloaded(
                "This worker is stopping or switches its model already; retry later.", code="model_switching"
            )
        async with self._switching:
            try:
                return await self._replace(await self._load(wanted.model, tuple(wanted.served_names)))
            except (ModelFilesError, ConfigError) as error:
                raise InvalidRequest(
                    f"Invalid value for 'model': {error.message}", param="model", code=error.code
                ) from error

    async def _replace(self, model: LoadedModel) -> ModelSwitched:
        context = self._context
        context.state.begin_drain()
        await self._registration.leave()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    await context.state.wait_idle()
            started_s = time.monotonic()
            await self._engine.switch(model.arguments)
            context.text, context.config = model.text, replace(context.config, served_names=model.names)
            context.log.event("model_switched", model=model.names[0], seconds=round(time.monotonic() - started_s, 3))
            return ModelSwitched(models=list(model.names), seconds=time.monotonic() - started_s)
        except StokerError as error:
            context.log.error("model_switch_failed", model=model.names[0], reason=str(error))
            raise
        finally:
            context.identity = replace(context.identity, worker_id=new_worker_id())
            context.state.end_drain()
            self._registration.start()


SWITCH = web.AppKey("switch", ModelSwitch)


async def switch_model(request: web.Request) -> web.Response:
    if request.app[CONTEXT].identity.secret is None:
        raise web.HTTPForbidden(text="A worker without --secret-file keeps its model: give it a secret to allow this.")
    wanted = decode(ModelRequest, await read_body(request, request.app[CONTEXT].config))
    # The switch goes on if the client disconnects: half of one would leave the worker without a model.
    switched = await asyncio.shield(asyncio.create_task(request.app[SWITCH].switch(wanted)))
    return web.Response(body=msgspec.json.encode(switched), content_type="application/json")
