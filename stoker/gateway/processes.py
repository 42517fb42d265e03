"""The processes of one gateway (`--processes N`): they share the port, and each has an address of its own on this machine.

A client's connection goes to any process, so an operator's request does too. Changes (`/admin/*` and registrations of workers) are
passed on to the other processes. `/metrics` joins the pages of all processes, with a label. So are the answers of `/admin/*` that a
`Join` exists for. `?process=N` asks one process. Any other GET is answered by the process that got it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from stoker.base.errors import InvalidRequest, StokerError
from stoker.base.log import EventLog
from stoker.gateway.api.endpoint import Endpoint, EndpointRequest
from stoker.gateway.api.reply import Reply, json_reply
from stoker.gateway.http import ClientLimits, ConnectionPool, NoSocketLeft, Origin, ResponseLost, Unreachable
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, RequestSigner

PROCESS_HEADER = (
    b"x-stoker-process"  # on a request from another process of the same gateway, which is not passed on again
)
_ANSWERED_BY = b"x-gateway-process"
_CREDENTIALS = (b"authorization", b"x-admin-token")
_TIMEOUT_S = 5.0
_JOIN_S = 2.0  # how long a joined answer waits for a process
_MAX_PAGE_BYTES = 64 << 20
_SAMPLE = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)(\{(.*)\})? (.*)$")

log = EventLog("processes")


class ProcessGroup:
    """The processes of this gateway. `ports` are their own ports on 127.0.0.1, by number; a single process has none."""

    def __init__(self, number: int, ports: Sequence[int], signers: Sequence[RequestSigner | None]) -> None:
        self.number = number
        self.count = max(1, len(ports))
        self._signers = dict(enumerate(signers))
        self._pools = {
            other: ConnectionPool(Origin("http", "127.0.0.1", port), ClientLimits())
            for other, port in enumerate(ports)
            if other != number
        }

    @property
    def others(self) -> list[int]:
        return list(self._pools)

    async def ask(self, other: int, request: EndpointRequest, path: bytes) -> Reply | None:
        """Send a request to another process. Return None if it does not answer: it may be restarting."""
        headers = [(PROCESS_HEADER, b"%d" % self.number)]
        headers += [(name, value) for name in _CREDENTIALS if (value := request.header(name)) is not None]
        signer = self._signers.get(other) if request.header(AUTH_HEADER.encode()) is not None else None
        reply = await self._send(other, request, path, headers, signer)
        if reply is not None and reply.status == 401 and signer is not None:
            challenge = next((value for name, value in reply.headers if name == CHALLENGE_HEADER.encode()), None)
            if signer.learn(challenge):
                reply = await self._send(other, request, path, headers, signer)
        return reply

    async def _send(
        self,
        other: int,
        request: EndpointRequest,
        path: bytes,
        headers: list[tuple[bytes, bytes]],
        signer: RequestSigner | None,
    ) -> Reply | None:
        if signer is not None:
            name, _, value = signer.header_line(request.method, path, request.body).rstrip(b"\r\n").partition(b": ")
            headers = [*headers, (name, value)]
        try:
            answer = await self._pools[other].send(
                request.method, path, headers, request.body, connect_s=_TIMEOUT_S, head_s=_TIMEOUT_S, idle_s=_TIMEOUT_S
            )
            body = await answer.read(_MAX_PAGE_BYTES)
        except (Unreachable, ResponseLost, NoSocketLeft) as error:
            log.warning("process_not_reached", process=other, reason=error.message)
            return None
        return Reply(answer.status, list(answer.headers), body)

    async def ask_others(self, request: EndpointRequest, path: bytes, deadline_s: float) -> dict[int, Reply]:
        """Send a request to all other processes at once. Return the replies of those that answer in time."""

        async def ask(other: int) -> Reply | None:
            try:
                async with asyncio.timeout(deadline_s):
                    return await self.ask(other, request, path)
            except TimeoutError:
                log.warning("process_not_reached", process=other, reason=f"no answer within {deadline_s:g} s")
                return None

        replies = await asyncio.gather(*map(ask, self.others))
        return {other: reply for other, reply in zip(self.others, replies, strict=True) if reply is not None}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@dataclass(frozen=True, slots=True)
class Join:
    """How the answers of all processes become one."""

    # Takes the bodies, the asked process's first, with the query and the numbers of the processes that do not answer.
    join: Callable[[Sequence[bytes], Mapping[str, str], list[int]], Any]
    query: bytes = b""  # is added to the query of the processes


@dataclass(frozen=True, slots=True)
class RedirectedRequest:
    """A GET with the rights of another request."""

    request: EndpointRequest
    path: bytes
    query: bytes = b""
    body: bytes = b""

    @property
    def method(self) -> bytes:
        return b"GET"

    def header(self, name: bytes) -> bytes | None:
        return self.request.header(name)


class GroupEndpoint:
    """An endpoint whose changes reach every process. Reads are joined where there is a join, and can name one process."""

    def __init__(self, inner: Endpoint, group: ProcessGroup, joins: Mapping[bytes, Join] | None = None) -> None:
        self._inner = inner
        self._group = group
        self._joins = joins or {}

    async def answer(self, request: EndpointRequest) -> Reply:
        group = self._group
        if not group.others or request.header(PROCESS_HEADER) is not None:
            return await self._inner.answer(request)
        if request.method == b"GET":
            return await self._read(request)
        reply = await self._inner.answer(request)
        if reply.status < 300:
            path = request.path + (b"?" + request.query if request.query else b"")
            await asyncio.gather(*(group.ask(other, request, path) for other in group.others))
        return reply

    async def _read(self, request: EndpointRequest) -> Reply:
        group = self._group
        query = dict(parse_qsl(request.query.decode("latin-1"), keep_blank_values=True))
        if "process" not in query and (join := self._joins.get(request.path)) is not None:
            return await self._read_all(request, query, join)
        named = query.get("process", str(group.number))
        if not (len(named) <= 4 and named.isdecimal() and int(named) < group.count):
            raise InvalidRequest(
                f"process={named[:40]!r}: it must be a number from 0 to {group.count - 1}.", param="process"
            )
        number = int(named)
        reply: Reply | None
        if number == group.number:
            reply = await self._inner.answer(request)
        else:
            reply = await group.ask(number, request, request.path + b"?" + request.query)
            if reply is None:
                raise InvalidRequest(f"process={number}: this process does not answer now; retry.", param="process")
            kept = [pair for pair in reply.headers if pair[0] == b"content-type"]
            reply = Reply(reply.status, kept, reply.body)
        return replace(reply, headers=[*reply.headers, (_ANSWERED_BY, b"%d" % number)])

    async def _read_all(self, request: EndpointRequest, query: Mapping[str, str], join: Join) -> Reply:
        """Ask all processes at once. One that refuses knows nothing of what is asked, so that its answer is left out."""
        group = self._group
        asked = RedirectedRequest(request, request.path, b"&".join(filter(None, (request.query, join.query))))
        path = request.path + (b"?" + asked.query if asked.query else b"")
        others = asyncio.create_task(group.ask_others(asked, path, _JOIN_S))
        try:
            own: Reply | StokerError = await self._inner.answer(asked)
        except StokerError as error:
            own = error
        replies = await others
        bodies = [reply.body for reply in (own, *replies.values()) if isinstance(reply, Reply) and reply.status == 200]
        if not bodies:
            if isinstance(own, StokerError):
                raise own
            return own
        joined = json_reply(join.join(bodies, query, [other for other in group.others if other not in replies]))
        return replace(joined, headers=[*joined.headers, (_ANSWERED_BY, b"%d" % group.number)])


class GroupMetrics:
    """`/metrics` of all processes in one page. Every sample has the label `process`."""

    def __init__(self, inner: Endpoint, group: ProcessGroup) -> None:
        self._inner = inner
        self._group = group

    async def answer(self, request: EndpointRequest) -> Reply:
        reply = await self._inner.answer(request)
        group = self._group
        if not group.others or request.header(PROCESS_HEADER) is not None or reply.status != 200:
            return reply
        found = await group.ask_others(request, request.path, _TIMEOUT_S)
        pages = {group.number: reply.body}
        pages |= {other: page.body for other, page in found.items() if page.status == 200}
        return replace(reply, body=joined_metrics(pages))


def joined_metrics(pages: dict[int, bytes]) -> bytes:
    """Join Prometheus pages, and label each sample with the number of its process."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for number in sorted(pages):
        family, seen = b"", set()
        for line in pages[number].split(b"\n"):
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                if family not in heads or family in seen:
                    heads.setdefault(family, []).append(line)
                    seen.add(family)
            elif (found := _SAMPLE.match(line)) is not None:
                labels = b"" if not found[3] else found[3] + b","
                text = b'%b{%bprocess="%d"} %b' % (found[1], labels, number, found[4])
                samples.setdefault(family, []).append(text)
    lines = [line for family in samples for line in (*heads.get(family, []), *samples[family])]
    return b"\n".join([*lines, b""])
