"""The server: listens, owns the connections, runs a handler for each request, and ends in good order."""

from __future__ import annotations

import asyncio
import socket
import ssl as tls
from collections.abc import Awaitable, Callable

from stoker.base.log import EventLog
from stoker.gateway.http.connection import Connection
from stoker.gateway.http.errors import error_body
from stoker.gateway.http.head import HeadParser, header_block
from stoker.gateway.http.limits import ServerLimits
from stoker.gateway.http.request import Request

_log = EventLog("gateway.http")
_JSON = header_block([(b"content-type", b"application/json")])
_FAILED = error_body(500, "The gateway failed on this request.", "internal_error")
_CANCEL_S = 1.0  # for handlers to end by themselves once their clients were cut

Handler = Callable[[Request], Awaitable[None]]


class Server:
    """`on_bad(peer, reason)` is told of every request that was refused before a handler saw it."""

    def __init__(self, handler: Handler, limits: ServerLimits, *, on_bad: Callable[[str, str], None]) -> None:
        self.limits = limits
        self.heads = HeadParser(limits.max_headers)
        self.on_bad = on_bad
        self.now = 0.0
        self.draining = False
        self._handler = handler
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._running: set[Request] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop

    async def listen(
        self,
        host: str,
        port: int,
        *,
        ssl: tls.SSLContext | None = None,
        reuse_port: bool = False,
        sock: socket.socket | None = None,
    ) -> None:
        """May be called more than once, for more than one address. With `sock`, host and port are not used."""
        self.loop = loop = asyncio.get_running_loop()
        handshake_s = self.limits.head_s if ssl is not None else None
        if sock is not None:
            listener = await loop.create_server(
                self._connection, sock=sock, ssl=ssl, backlog=2048, ssl_handshake_timeout=handshake_s
            )
        else:
            listener = await loop.create_server(
                self._connection,
                host,
                port,
                ssl=ssl,
                backlog=2048,
                reuse_port=reuse_port or None,
                ssl_handshake_timeout=handshake_s,
            )
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()

    @property
    def port(self) -> int:
        """That of the first listener; useful after `listen(host, 0)`."""
        return int(self._listeners[0].sockets[0].getsockname()[1])

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def close(self, grace_s: float) -> None:
        """Accepts nothing more; lets running exchanges end for up to `grace_s`, then cuts them."""
        self.draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            connection.close_if_idle()
        self._empty = asyncio.Event()
        if self._connections:
            try:
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
            except TimeoutError:
                for connection in list(self._connections):
                    connection.cut()
        tasks = [request.task for request in self._running]
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_CANCEL_S)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
        for listener in self._listeners:
            await listener.wait_closed()

    # ---- what connections call

    def admit(self, connection: Connection) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self.limits.max_connections and not self.draining

    def forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._empty is not None and not self._connections:
            self._empty.set()

    def run(self, request: Request) -> None:
        self._running.add(request)
        request.task = self.loop.create_task(self._run(request))

    # ---- inside

    async def _run(self, request: Request) -> None:
        try:
            await self._handler(request)
            if not request.finished and not request.gone:
                _log.error("handler_did_not_answer", path=request.path.decode(), peer=request.peer)
                _fail(request)
        except Exception:
            # The last resort of the process's HTTP side: one bad exchange must not end the server.
            _log.error("handler_failed", exc_info=True, path=request.path.decode(), peer=request.peer)
            _fail(request)
        except asyncio.CancelledError:
            request.abort()
            raise
        finally:
            self._running.discard(request)

    def _connection(self) -> Connection:
        return Connection(self)

    def _sweep(self) -> None:
        # A step for each sweep and not the time: while this process stood still, what clients sent could not be seen either.
        self.now += self.limits.sweep_s
        for connection in list(self._connections):
            connection.sweep(self.now)
        self._sweeper = self.loop.call_later(self.limits.sweep_s, self._sweep)


def _fail(request: Request) -> None:
    if request.started:
        request.abort()
    else:
        request.respond(500, _JSON, _FAILED)
