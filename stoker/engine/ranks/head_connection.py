"""Connects a rank of another node to the head."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from stoker.base.address import split_address
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.ranks.node_hello import NodeHello, check_key, key_bytes
from stoker.parallel.channel import ChannelEnd, WrongKey, call
from stoker.parallel.rank_link import Kind, LinkEnd, RankLink

_CONNECT_S = 5.0
_HANDSHAKE_S = 10.0
_RETRY_S = 0.25


@dataclass(frozen=True, slots=True)
class HeadConnection:
    link: RankLink
    interface: str  # the address of this machine on the network of the head


def connect_head(settings: EngineSettings, hello: NodeHello) -> HeadConnection:
    """Connect to the head, which may start later than this node. Raises ConfigError if it cannot be reached within
    `--node-wait-s`, or has another secret."""
    nodes = settings.nodes
    assert nodes.head is not None
    host, port = split_address(nodes.head)
    until_s = time.monotonic() + nodes.wait_s
    while True:
        try:
            return _connect(settings, host, port, hello)
        except WrongKey as error:
            raise ConfigError(
                f"--head {nodes.head} has another secret; give all nodes the same --secret-file"
            ) from error
        except (ChannelEnd, LinkEnd) as error:
            reason = error.message
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + _RETRY_S > until_s:
            raise ConfigError(
                f"--head {nodes.head} could not be reached within {nodes.wait_s:g} s: {reason}. Check that node 0 runs there with "
                f"--nodes {nodes.count}, or raise --node-wait-s"
            )
        time.sleep(_RETRY_S)


def _connect(settings: EngineSettings, host: str, port: int, hello: NodeHello) -> HeadConnection:
    connection = socket.create_connection((host, port), timeout=_CONNECT_S)
    try:
        if (
            connection.getsockname() == connection.getpeername()
        ):  # a connection to itself, on a port where no process listens
            raise ConnectionRefusedError("Connection refused")
        check_key(settings, connection.getpeername()[0])
        interface = connection.getsockname()[0]
        link = RankLink(call(connection, key_bytes(settings), _HANDSHAKE_S))
    except BaseException:
        connection.close()
        raise
    link.send_json(Kind.HELLO, hello.to_table())
    return HeadConnection(link, interface)
