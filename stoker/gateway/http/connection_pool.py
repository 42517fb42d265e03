"""A pool of keep-alive connections to one worker."""

from __future__ import annotations

import asyncio
import errno
import hmac
from typing import Protocol

from stoker.gateway.http.errors import ConnectTimeout, NoSocketLeft, ResponseAborted, ResponseLost, Unreachable
from stoker.gateway.http.head import Headers, HeadParser, header_block
from stoker.gateway.http.limits import ClientLimits
from stoker.gateway.http.origin import Origin
from stoker.gateway.http.worker_response import WorkerConnection, WorkerResponse

# Too many open files in this process or on this machine, or no memory for another socket.
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_STALE_CLOSE_S = 1.0  # a worker that closes a reused connection later than this after a request has seen the request
_UNAUTHORIZED = 401
_CHALLENGE = b"x-stoker-challenge"
_PROOF = b"x-stoker-proof"
_MAX_CHALLENGE_BYTES = 1 << 16


class Signer(Protocol):
    """Signs requests to one worker. `RequestSigner` implements it."""

    def header_line(self, method: bytes, path: bytes, body: bytes) -> bytes:
        """Return the header to add to a request, with its line end."""

    def learn(self, challenge: bytes | None) -> bool:
        """Note the challenge of an answer with status 401. Return True if the request should be signed again."""

    def proof_line(self, path: bytes) -> tuple[bytes, bytes]:
        """Return the header for a GET request, with its line end, and the proof that a worker's answer must have."""


class ConnectionPool:
    """Connections to one origin. The most recently used one is reused first, so that surplus connections time out.

    With a signer and a `proof_path`, a new connection carries a signed GET of that path first. If the answer has no proof of
    the fleet's secret, no request is sent: another process may have taken the port of a worker that died.
    """

    def __init__(
        self, origin: Origin, limits: ClientLimits, signer: Signer | None = None, proof_path: bytes | None = None
    ) -> None:
        self.origin = origin
        self._signer = signer
        self._proof_path = proof_path
        self.limits = limits
        self.heads = HeadParser(limits.max_headers)
        self.where = str(origin)
        self._open: set[WorkerConnection] = set()
        self._idle: list[WorkerConnection] = []
        self._closed = False
        self._now = 0.0  # the time of the last sweep
        self._sweeper: asyncio.TimerHandle | None = None
        self._host_line = b" HTTP/1.1\r\nhost: %b\r\n" % origin.authority
        self._loop: asyncio.AbstractEventLoop

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    async def send(
        self,
        method: bytes,
        path: bytes,
        headers: Headers,
        body: bytes,
        *,
        connect_s: float,
        head_s: float | None,
        idle_s: float | None = None,
    ) -> WorkerResponse:
        """Send a request and return its response as soon as the head has arrived.

        `headers` must be end-to-end headers only (`end_to_end`); host and content-length are added here.

        Raises Unreachable if no connection can be made (NoSocketLeft if this process is out of sockets), and ResponseLost
        if the connection closes or `head_s` passes before the complete head arrives. If `idle_s` is given,
        the body fails with ResponseTimeout if its first byte takes longer than `head_s`, or if it pauses for longer than
        `idle_s`. Pauses that the reader asked for do not count.

        If a reused connection closes at once without sending any byte, the worker had closed it before it saw the request,
        so the request is sent again on a new connection. If no connection can be made then, the worker has probably crashed,
        maybe because of this request: that is ResponseLost, not Unreachable. If the worker does not accept the signature,
        because it was restarted, the request is signed and sent again.
        """
        connection = self._take()
        head = b"" if connection is None else self._head(method, path, headers, body)
        first_s = None if idle_s is None else head_s
        was_sent = False
        may_sign_again = self._signer is not None
        while True:
            if connection is None:
                connect = self._connect_again if was_sent else self._connect
                connection = await connect(connect_s, head_s)
                head = head or self._head(method, path, headers, body)  # the connection may have learned a challenge
            sent_s = self._loop.time()
            deadline = None if head_s is None else sent_s + head_s
            waiter = connection.send(
                head, body, to_head=method == b"HEAD", deadline=deadline, first_s=first_s, idle_s=idle_s
            )
            try:
                answer = await waiter
            except asyncio.CancelledError:
                _give_up(connection, waiter)
                raise
            if answer is not None:
                if answer.status != _UNAUTHORIZED or not may_sign_again:
                    return answer
                may_sign_again = False
                if self._signer is None or not self._signer.learn(answer.header(_CHALLENGE)):
                    return answer
                await answer.read(_MAX_CHALLENGE_BYTES)
                head = self._head(method, path, headers, body)
                connection = self._take()
                continue
            if self._loop.time() - sent_s > _STALE_CLOSE_S:
                raise ResponseLost(f"{self.where}: the connection closed before a response")
            connection, head, was_sent = None, b"", True

    def close(self) -> None:
        """Close idle connections now, and the others when their responses have ended."""
        self._closed = True
        while self._idle:
            self._idle.pop().transport.close()
        if not self._open:
            self._stop_sweeping()

    # ---- called by connections

    def release(self, connection: WorkerConnection) -> None:
        if connection.is_proving:
            return
        if self._closed or len(self._idle) >= self.limits.max_idle:
            connection.transport.close()
            return
        connection.reused = True
        connection.idle_since = self._now
        self._idle.append(connection)

    def forget(self, connection: WorkerConnection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._open:
            self._stop_sweeping()

    def _head(self, method: bytes, path: bytes, headers: Headers, body: bytes) -> bytes:
        block = headers if isinstance(headers, bytes) else header_block(headers)
        prefix = self.origin.prefix
        if self._signer is not None:
            block += self._signer.header_line(method, path, body)
        if body or method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            return b"%b %b%b%bcontent-length: %d\r\n%b\r\n" % (method, prefix, path, self._host_line, len(body), block)
        return b"%b %b%b%b%b\r\n" % (method, prefix, path, self._host_line, block)

    def _take(self) -> WorkerConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect_again(self, connect_s: float, proof_s: float | None) -> WorkerConnection:
        try:
            return await self._connect(connect_s, proof_s)
        except Unreachable as error:
            raise ResponseLost(f"{error.message}, after a connection closed before a response") from error

    async def _connect(self, connect_s: float, proof_s: float | None) -> WorkerConnection:
        if self._closed:
            raise Unreachable(f"{self.where}: this worker was removed from the gateway")
        self._loop = loop = asyncio.get_running_loop()
        origin = self.origin
        connection = WorkerConnection(self, loop)
        try:
            async with asyncio.timeout(connect_s):
                await loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=origin.ssl,
                    server_hostname=origin.host if origin.ssl is not None else None,
                )
        except TimeoutError as late:
            raise ConnectTimeout(f"{self.where}: no connection within {connect_s:g} s") from late
        except OSError as refused:
            if refused.errno in _LOCAL_ERRORS:
                raise NoSocketLeft(f"The gateway cannot open another connection: {refused.strerror}.") from refused
            raise Unreachable(f"{self.where}: {refused}") from refused
        self._open.add(connection)
        if self._sweeper is None:
            self._sweep()
        if self._signer is not None and self._proof_path is not None:
            try:
                await self._prove(connection, self._signer, self._proof_path, proof_s)
            except (ResponseLost, ResponseAborted) as lost:
                connection.cut()
                raise Unreachable(f"{self.where}: no proof of the fleet's secret: {lost}") from lost
            except BaseException:
                connection.cut()
                raise
        return connection

    async def _prove(self, connection: WorkerConnection, signer: Signer, path: bytes, proof_s: float | None) -> None:
        """Let the worker prove on this connection that it has the fleet's secret. Raises Unreachable if it does not."""
        connection.is_proving = True
        for _ in range(2):  # signed with an outdated challenge, a request is refused once
            line, expected = signer.proof_line(path)
            deadline = None if proof_s is None else self._loop.time() + proof_s
            head = b"GET %b%b%b%b\r\n" % (self.origin.prefix, path, self._host_line, line)
            answer = await connection.send(head, b"", to_head=False, deadline=deadline, first_s=proof_s, idle_s=proof_s)
            if answer is None:
                break
            await answer.read(_MAX_CHALLENGE_BYTES)
            if connection.transport.is_closing():
                raise Unreachable(f"{self.where}: the connection closed after the proof of the fleet's secret")
            if hmac.compare_digest(answer.header(_PROOF) or b"", expected):
                connection.is_proving = False
                return
            if answer.status != _UNAUTHORIZED or not signer.learn(answer.header(_CHALLENGE)):
                break
        raise Unreachable(f"{self.where}: it did not prove that it has the fleet's secret")

    def _sweep(self) -> None:
        self._now = now = self._loop.time()
        old = now - self.limits.idle_s
        # The list is ordered by last use, oldest first.
        while self._idle and self._idle[0].idle_since < old:
            self._idle.pop(0).transport.close()
        for connection in list(self._open):
            connection.check_deadlines(now)
        self._sweeper = self._loop.call_later(self.limits.sweep_s, self._sweep)

    def _stop_sweeping(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None


def _give_up(connection: WorkerConnection, waiter: asyncio.Future[WorkerResponse | None]) -> None:
    """Drop a response whose sender was cancelled.

    The response may have arrived in the meantime. Its connection may then already serve another request, so only the
    response itself knows whether there is something to abort.
    """
    if waiter.cancelled() or not waiter.done():
        connection.cut()
    elif waiter.exception() is None and (answer := waiter.result()) is not None:
        answer.abort()
