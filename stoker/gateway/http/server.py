"""The HTTP server: listens, owns the client connections, runs a handler task for each request, and shuts down cleanly."""

from __future__ import annotations

import asyncio
import socket
import ssl as tls
from collections.abc import Awaitable, Callable

from stoker.base.log import EventLog
from stoker.gateway.http.body_budget import BodyBudget
from stoker.gateway.http.client_connection import ClientConnection
from stoker.gateway.http.errors import BadMessage, error_body
from stoker.gateway.http.gate import BodyGrant, RequestGate
from stoker.gateway.http.head import HeadParser, header_block
from stoker.gateway.http.limits import ServerLimits
from stoker.gateway.http.open_connections import OpenConnections
from stoker.gateway.http.request import HttpRequest
from stoker.gateway.http.unread_answers import UnreadAnswers

_log = EventLog("gateway.http")
_JSON = header_block([(b"content-type", b"application/json")])
_FAILED = error_body(
    500, "The gateway had an internal error while handling this request; see its log.", "internal_error"
)
_CANCEL_S = 1.0  # handlers may take this long to end after their connections were closed; then they are cancelled

Handler = Callable[[HttpRequest], Awaitable[None]]


class Server:
    """An HTTP server.

    `gate(head, peer)` decides from a request's head whether its body is received. Without a gate, every request may have a
    body of `limits.max_body_bytes`. `on_bad(peer, reason)` is called for every request that is refused because of its form
    or size before it reaches the handler.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits,
        *,
        on_bad: Callable[[str, str], None],
        gate: RequestGate | None = None,
    ) -> None:
        grant = BodyGrant(limits.max_body_bytes)
        self.limits = limits
        self.gate: RequestGate = gate if gate is not None else lambda head, peer: grant
        self.bodies = BodyBudget(limits.max_held_bytes)
        self.unread = UnreadAnswers(limits.max_held_bytes)
        self.connections = OpenConnections(
            limits.max_connections, limits.max_connections_per_address, limits.trusted_addresses
        )
        self.heads = HeadParser(limits.max_headers)
        self.on_bad = on_bad
        self.now = 0.0
        self.draining = False  # every answer that begins now ends its connection, and says so
        self.closing = False  # connections end with their running exchanges
        self._handler = handler
        self._listeners: list[asyncio.Server] = []
        self._connections: set[ClientConnection] = set()
        self._running: set[HttpRequest] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._empty: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop

    async def listen(
        self,
        host: str,
        port: int,
        *,
        ssl: tls.SSLContext | None = None,
        sock: socket.socket | None = None,
    ) -> None:
        """Start to listen. Call it several times for several addresses. With `sock`, host and port are ignored."""
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
                ssl_handshake_timeout=handshake_s,
            )
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()

    @property
    def port(self) -> int:
        """Return the port of the first listener; useful after `listen(host, 0)`."""
        return int(self._listeners[0].sockets[0].getsockname()[1])

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def begin_drain(self) -> None:
        """End each connection with its next answer, so that clients connect again, to another server.

        An answer that has begun did not say so. Its client may use the connection again, which must not be closed under it.
        """
        self.draining = True

    async def close(self, grace_s: float) -> None:
        """Stop accepting, let running exchanges end for up to `grace_s`, then close their connections."""
        self.begin_drain()
        self.closing = True
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

    # ---- called by connections

    def refusal(self, connection: ClientConnection) -> BadMessage | None:
        """Add a new connection. Return why it is refused, or None."""
        self._connections.add(connection)
        refusal = self.connections.enter(connection)
        if refusal is None and self.closing:
            return BadMessage(503, "the gateway is stopping; retry later")
        return refusal

    def forget(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self.connections.leave(connection)
        self.unread.remove(connection)
        if self._empty is not None and not self._connections:
            self._empty.set()

    def run(self, request: HttpRequest) -> None:
        self._running.add(request)
        request.task = self.loop.create_task(self._run(request))

    async def _run(self, request: HttpRequest) -> None:
        try:
            await self._handler(request)
            if not request.finished and not request.gone:
                _log.error("handler_did_not_answer", path=request.path.decode(), peer=request.peer)
                _fail(request)
        except Exception:
            # One failing exchange must not end the server.
            _log.error("handler_failed", exc_info=True, path=request.path.decode(), peer=request.peer)
            _fail(request)
        except asyncio.CancelledError:
            request.abort()
            raise
        finally:
            self._running.discard(request)
            if request.num_held:
                self.bodies.give_back(request.account, request.num_held)

    def _connection(self) -> ClientConnection:
        return ClientConnection(self)

    def _sweep(self) -> None:
        # `now` advances by one step per sweep and not with the clock: while this process was stopped, it could not read what
        # clients sent, so that time must not count against them.
        self.now += self.limits.sweep_s
        for connection in list(self._connections):
            connection.sweep(self.now)
        self._sweeper = self.loop.call_later(self.limits.sweep_s, self._sweep)


def _fail(request: HttpRequest) -> None:
    if request.started:
        request.abort()
    else:
        request.respond(500, _JSON, _FAILED)
