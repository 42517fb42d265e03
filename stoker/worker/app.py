"""The worker's HTTP application: routes, start and stop, and the one place where errors become responses."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from aiohttp import web

from stoker.base.log import EventLog
from stoker.proto.anthropic.errors import REQUEST_ID_HEADER, message_error_body
from stoker.proto.cors import CorsRules
from stoker.proto.internal_http import (
    COUNT_TOKENS_PATH,
    DUTY_PATH,
    INPUT_TOKENS_PATH,
    MESSAGES_PATH,
    MODEL_PATH,
    MOVE_PATH,
    PREFETCH_PATH,
    READY_PATH,
    RELEASE_PATH,
    TOKENIZER_PATH,
    WORKER_INFO_PATH,
)
from stoker.proto.openai.errors import CLIENT_GONE_STATUS, HttpError
from stoker.proto.openai.not_honoured import IGNORED_HEADER
from stoker.proto.openai.unknown_fields import UnknownFields
from stoker.worker.chat import CHAT
from stoker.worker.completions import COMPLETIONS
from stoker.worker.config import HttpConfig
from stoker.worker.context import CONTEXT, ModelText, Service, WorkerContext
from stoker.worker.cors import CORS, allow_origin, answer_preflight
from stoker.worker.errors import ClientStalled, worker_http_error
from stoker.worker.fleet_side import show_load, show_tokenizer, show_worker
from stoker.worker.guard import GUARD, Guard, guarded, show_proof
from stoker.worker.identity import Identity
from stoker.worker.info import detokenize, health, list_models, metrics, ready, show_model, tokenize
from stoker.worker.input_tokens import count_response_input
from stoker.worker.messages import MESSAGES, count_message_tokens
from stoker.worker.metrics import WorkerMetrics
from stoker.worker.model_switch import switch_model
from stoker.worker.moves import MovableRequests, change_duty, move
from stoker.worker.prefetch import prefetch
from stoker.worker.record import RECORD, RequestRecord
from stoker.worker.release import release
from stoker.worker.responses import RESPONSES
from stoker.worker.state import ServerState
from stoker.worker.stream import STREAM

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# These are polled every few seconds, so they are logged only when they fail.
_QUIET = frozenset({"/health", READY_PATH, "/metrics", "/load", WORKER_INFO_PATH})
_GENERATING = frozenset({CHAT.path, COMPLETIONS.path, RESPONSES.path, MESSAGES.path})


def make_app(
    service: Service,
    text: ModelText,
    config: HttpConfig,
    *,
    identity: Identity | None = None,
    state: ServerState | None = None,
    log: EventLog | None = None,
) -> web.Application:
    """Return the worker's server. Run it with `make_runner`, so that a disconnect cancels the sequences of the request.

    Starting and stopping the app starts and stops the service. To drain, keep the `state` that you pass: call
    `begin_drain()`, then await `wait_idle()`.
    """
    state = state or ServerState(config.drain_retry_after_s)
    log = log or EventLog("worker")
    unknown_fields = UnknownFields(log, config.strict)
    context = WorkerContext(
        service=service,
        text=text,
        config=config,
        identity=identity or Identity(),
        state=state,
        metrics=WorkerMetrics(
            model=lambda: context.config.served_names[0],
            stats=lambda: service.stats,
            ready=lambda: service.ready,
            num_restarts=lambda: service.num_restarts,
            num_running=lambda: state.num_running,
            unknown_fields=lambda: unknown_fields.counts,
        ),
        log=log,
        unknown_fields=unknown_fields,
        movable=MovableRequests(),
        text_threads=ThreadPoolExecutor(config.text_threads, thread_name_prefix="text"),
    )
    app = web.Application(middlewares=[_answer, guarded], client_max_size=config.max_body_bytes)
    app[CONTEXT] = context
    app[CORS] = CorsRules(config.cors_origins)
    app[GUARD] = Guard(context.identity)
    app.on_response_prepare.append(_name_request)
    app.on_response_prepare.append(show_proof)
    if config.cors_origins:
        app.middlewares.insert(0, answer_preflight)
        app.on_response_prepare.append(allow_origin)
    app.on_shutdown.append(_end_streams)
    app.cleanup_ctx.append(_lifespan)
    app.router.add_post(CHAT.path, CHAT.handle)
    app.router.add_post(COMPLETIONS.path, COMPLETIONS.handle)
    app.router.add_post(RESPONSES.path, RESPONSES.handle)
    app.router.add_post(MESSAGES.path, MESSAGES.handle)
    app.router.add_post(INPUT_TOKENS_PATH, count_response_input)
    app.router.add_post(COUNT_TOKENS_PATH, count_message_tokens)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", show_model)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/health", health)
    app.router.add_get(READY_PATH, ready)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/load", show_load)
    app.router.add_get(WORKER_INFO_PATH, show_worker)
    app.router.add_get(TOKENIZER_PATH, show_tokenizer)
    app.router.add_post(PREFETCH_PATH, prefetch)
    app.router.add_post(RELEASE_PATH, release)
    app.router.add_post(MOVE_PATH, move)
    app.router.add_post(DUTY_PATH, change_duty)
    app.router.add_post(MODEL_PATH, switch_model)
    return app


def make_runner(app: web.Application, shutdown_timeout_s: float = 5.0) -> web.AppRunner:
    """Return a runner that cancels the handler of a request, and so its sequences, when the client disconnects."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=logging.getLogger("stoker.worker.http"),  # aiohttp logs here what is not valid HTTP
        keepalive_timeout=75.0,
        shutdown_timeout=shutdown_timeout_s,
    )


async def _end_streams(app: web.Application) -> None:
    """End running requests with an error event now. Otherwise aiohttp closes their connections after its timeout."""
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
        record = request[RECORD]
        response.headers["X-Request-Id"] = record.request_id
        if request.path.startswith(MESSAGES_PATH):
            response.headers[REQUEST_ID_HEADER] = record.request_id
        if record.ignored_fields:
            response.headers[IGNORED_HEADER] = ", ".join(record.ignored_fields)


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware of every request: gives it its id, turns errors into responses, and logs its end once."""
    context = request.app[CONTEXT]
    path = _known_path(request)
    record = request[RECORD] = RequestRecord(_request_id(request), path, context.metrics)
    status, failure, logged = CLIENT_GONE_STATUS, None, False
    try:
        with context.state.running() if path in _GENERATING else nullcontext():
            response = await handler(request)
        status = response.status
        return response
    except (ConnectionError, ClientStalled) as gone:
        # The client cannot be answered: close the connection and drop what is still buffered.
        failure = worker_http_error(gone) if isinstance(gone, ClientStalled) else None
        return _cut(request)
    except Exception as error:
        failure = worker_http_error(error)
        status = failure.status
        response = await _respond(request, failure)
        if failure.is_unexpected:
            context.log.error("request_failed", exc_info=True, **_fields(record, status, failure))
            logged = True
        return response
    finally:
        if not logged:
            fields = _fields(record, status, failure)
            if path not in _QUIET or status >= 500:
                context.log.event("request", **fields)


def _fields(record: RequestRecord, status: int, failure: HttpError | None) -> dict[str, object]:
    fields = record.close(status)
    if failure is not None:
        error = failure.error
        fields |= {"code": error.code, "param": error.param, "message": error.message}
    return fields


async def _respond(request: web.Request, failure: HttpError) -> web.StreamResponse:
    if STREAM in request and request[STREAM].started:
        try:
            return await request[STREAM].fail(failure)
        except (ConnectionError, ClientStalled):
            return _cut(request)
    body = failure.json()
    if request.path.startswith(MESSAGES_PATH):
        body = message_error_body(failure.status, body, request[RECORD].request_id)
    response = web.Response(status=failure.status, body=body, content_type="application/json", headers=failure.headers)
    if failure.headers.get("Connection") == "close":
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
    """Return the path of the route, so that metrics have one label per route and not one per mistyped path."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
