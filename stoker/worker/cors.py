"""Cross-origin requests to a worker. `proto/cors.py` has the rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from stoker.proto.cors import REQUESTED_HEADERS, REQUESTED_METHOD, CorsRules

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CORS = web.AppKey("cors", CorsRules)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware: answer a browser's question whether it may send a request. It carries no key, so it comes before the guard."""
    if request.method != "OPTIONS" or REQUESTED_METHOD not in request.headers:
        return await handler(request)
    requested = request.headers.get(REQUESTED_HEADERS, "")
    return web.Response(status=204, headers=request.app[CORS].preflight(request.headers.get("Origin"), requested))


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let a page of an allowed origin read the answer."""
    response.headers.update(request.app[CORS].headers(request.headers.get("Origin")))
