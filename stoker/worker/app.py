"""Routes, lifespan, and the one place where errors become responses."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import msgspec
from aiohttp import web

from stoker.base.log import EventLog
from stoker.proto.openai.answers import ErrorAnswer
from stoker.worker.chat import chat_completions
from stoker.worker.completions import completions
from stoker.worker.config import HttpConfig
from stoker.worker.context import CONTEXT, ModelText, Service, WorkerContext
from stoker.worker.errors import CLIENT_GONE_STATUS, ClientStalled, Problem, problem_of
from stoker.worker.fleet_side import show_load, show_tokenizer, show_worker
from stoker.worker.identity import Identity
from stoker.worker.info import detokenize, health, list_models, metrics, ready, show_model, tokenize
from stoker.worker.metrics import WorkerMetrics
from stoker.worker.prefetch import prefetch
from stoker.worker.record import RECORD, RequestRecord
from stoker.worker.release import release
from stoker.worker.responses import responses
from stoker.worker.state import ServerState
from stoker.worker.stream import STREAM

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Asked every few seconds: no log line unless they fail.
_QUIET = frozenset({"/health", "/ready", "/metrics", "/load", "/stoker/worker"})
_GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


def make_app(
    service: Service,
    text: ModelText,
    config: HttpConfig,
    *,
    identity: Identity | None = None,
    state: ServerState | None = None,
    log: EventLog | None = None,
) -> web.Application:
    """The worker's server. Run it with `make_runner`: a client that leaves must cancel its sequence.

    Starting the app starts the service and stopping it stops the service. For a drain keep the `state` that you pass:
    `begin_drain()`, then `wait_idle()`.
    """
    state = state or ServerState(config.drain_retry_after_s)
    context = WorkerContext(
        service=service,
        text=text,
        config=config,
        identity=identity or Identity(),
        state=state,
        metrics=WorkerMetrics(
            model=config.served_names[0],
            stats=lambda: service.stats,
            ready=lambda: service.ready,
            num_restarts=lambda: service.num_restarts,
            num_running=lambda: state.num_running,
        ),
        log=log or EventLog("worker"),
        text_threads=ThreadPoolExecutor(config.text_threads, thread_name_prefix="text"),
    )
    app = web.Application(middlewares=[_answer], client_max_size=config.max_body_bytes)
    app[CONTEXT] = context
    app.on_response_prepare.append(_name_request)
    app.on_shutdown.append(_end_streams)
    app.cleanup_ctx.append(_lifespan)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/responses", responses)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", show_model)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/load", show_load)
    app.router.add_get("/stoker/worker", show_worker)
    app.router.add_get("/stoker/tokenizer", show_tokenizer)
    app.router.add_post("/stoker/prefetch", prefetch)
    app.router.add_post("/stoker/release", release)
    return app


def make_runner(app: web.Application, shutdown_timeout_s: float = 5.0) -> web.AppRunner:
    """A runner under which a disconnect cancels the handler, and with it the sequence."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=logging.getLogger("stoker.worker.http"),  # where aiohttp tells of bytes that are no HTTP at all
        keepalive_timeout=75.0,
        shutdown_timeout=shutdown_timeout_s,
    )


async def _end_streams(app: web.Application) -> None:
    """Whoever still runs when the server stops is told so now, rather than cut off when aiohttp's patience ends."""
    await app[CONTEXT].service.stop()


async def _lifespan(app: web.Application) -> AsyncIterator[None]:
    context = app[CONTEXT]
    await context.service.start()
    try:
        yield
    finally:
        await context.service.stop()
        context.text_threads.shutdown(wait=False, cancel_futures=True)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    if RECORD in request:
        response.headers["X-Request-Id"] = request[RECORD].request_id


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request passes here: it gets its id, its errors become responses, and its end is logged, once."""
    context = request.app[CONTEXT]
    path = _known_path(request)
    record = request[RECORD] = RequestRecord(_request_id(request), path, context.metrics)
    status, problem, logged = CLIENT_GONE_STATUS, None, False
    try:
        with context.state.running() if path in _GENERATING else nullcontext():
            response = await handler(request)
        status = response.status
        return response
    except (ConnectionError, ClientStalled) as gone:
        # Nobody is there to be answered: cut the connection, and with it what is still buffered.
        problem = problem_of(gone) if isinstance(gone, ClientStalled) else None
        return _cut(request)
    except Exception as error:
        problem = problem_of(error)
        status = problem.status
        response = await _respond(request, problem)
        if problem.is_ours:
            context.log.error("request_failed", exc_info=True, **_fields(record, status, problem))
            logged = True
        return response
    finally:
        if not logged:
            fields = _fields(record, status, problem)
            if path not in _QUIET or status >= 500:
                context.log.event("request", **fields)


def _fields(record: RequestRecord, status: int, problem: Problem | None) -> dict[str, object]:
    fields = record.close(status)
    if problem is not None:
        fields |= {"code": problem.body.code, "param": problem.body.param, "message": problem.body.message}
    return fields


async def _respond(request: web.Request, problem: Problem) -> web.StreamResponse:
    if STREAM in request and request[STREAM].started:
        try:
            return await request[STREAM].fail(problem)
        except (ConnectionError, ClientStalled):
            return _cut(request)
    body = msgspec.json.encode(ErrorAnswer(problem.body))
    response = web.Response(status=problem.status, body=body, content_type="application/json", headers=problem.headers)
    if problem.headers.get("Connection") == "close":
        response.force_close()
    return response


def _cut(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return request[STREAM].response if STREAM in request else web.Response(status=CLIENT_GONE_STATUS)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _known_path(request: web.Request) -> str:
    """The route's path, so that metrics have a label a route and not one a typing error."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
