"""NodeGate: the head's port, where the ranks of other nodes arrive while an engine starts.

Everyone who reaches the port can connect. Only a rank that knows the key gets further than the handshake, which has a deadline.
A limited number of connections are in it: a new one replaces the oldest, so that strangers who say nothing do not keep ranks out.
The port is closed when all ranks have arrived.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from stoker.base import log as logs
from stoker.base.address import join_address, split_address
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.ranks.node_hello import NodeHello, check_hello, check_key, key_bytes
from stoker.parallel.channel import ChannelEnd, WrongKey, answer
from stoker.parallel.rank_link import Kind, LinkEnd, LinkMessage, RankLink

_HANDSHAKE_S = 10.0
_MAX_HANDSHAKES = 64  # as many ranks as an engine may have nodes, at the same time
_POLL_S = 0.25

log = logs.EventLog("nodes")

# Takes the rank's number, its link and the address that it came from. Returns why the rank is not wanted; None: it is.
Arrived = Callable[[int, RankLink, str], str | None]
Refused = Callable[[StokerError], None]


class NodeGate:
    """Listens on `--head` from its creation until `close`."""

    def __init__(self, settings: EngineSettings, facts: Mapping[str, str], arrived: Arrived, refused: Refused) -> None:
        """`refused` is called for a rank that knows the key and does not fit, because then the start cannot succeed.
        Raises ConfigError if the port cannot be used."""
        assert settings.nodes.head is not None
        host, port = split_address(settings.nodes.head)
        self._settings, self._facts, self._arrived, self._refused = settings, facts, arrived, refused
        self._listener = _listen(host, port, settings)
        self.host: str = self._listener.getsockname()[0]
        self._greeting: deque[socket.socket] = deque()  # connections in the handshake, the oldest first
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="node-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(4 * _POLL_S)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no file descriptors are left, or the connection ended meanwhile
                log.warning("node_not_accepted", reason=str(error))
                self._is_closed.wait(_POLL_S)
                continue
            with self._lock:
                self._greeting.append(connection)
                if len(self._greeting) > _MAX_HANDSHAKES:
                    with suppress(OSError):
                        self._greeting.popleft().shutdown(socket.SHUT_RDWR)  # ends its thread
            threading.Thread(target=self._welcome, args=(connection, address), name="node-hello", daemon=True).start()

    def _welcome(self, connection: socket.socket, address: Any) -> None:
        came_from = join_address(address[0], address[1])
        try:
            self._admit(connection, came_from)
        except (ChannelEnd, LinkEnd) as error:
            hint = "it needs the same --secret-file" if isinstance(error, WrongKey) else None
            log.warning("node_not_accepted", address=came_from, reason=error.message, hint=hint)
            connection.close()

    def _admit(self, connection: socket.socket, came_from: str) -> None:
        try:
            link = RankLink(answer(connection, key_bytes(self._settings), _HANDSHAKE_S))
            if not select.select([link], [], [], _HANDSHAKE_S)[0]:
                raise ChannelEnd(f"no greeting came within {_HANDSHAKE_S:g} s")
        finally:
            with self._lock, suppress(ValueError):  # it was replaced
                self._greeting.remove(connection)
        try:
            hello = NodeHello.from_table(link.receive().table(Kind.HELLO))
            check_hello(hello, self._settings, self._facts)
        except ConfigError as error:
            self._refuse(link, error)
            self._refused(error)
            return
        if (reason := self._arrived(hello.rank, link, came_from)) is not None:
            self._refuse(link, ConfigError(reason))

    def _refuse(self, link: RankLink, error: StokerError) -> None:
        link.send(LinkMessage(Kind.FAILED, text=error.message))
        link.close()


def _listen(host: str, port: int, settings: EngineSettings) -> socket.socket:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        check_key(settings, str(address[4][0]))
        listener = socket.socket(address[0], address[1])
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address[4])
            listener.listen(_MAX_HANDSHAKES)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--head {settings.nodes.head}: node 0 cannot listen there: {why}; give an address of this machine and a free port"
        ) from error
    listener.settimeout(_POLL_S)
    return listener
