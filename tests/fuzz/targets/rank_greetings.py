"""What arrives at the head's port: the handshake of a stranger, and the greeting of a rank that knows the key."""

from __future__ import annotations

import json
import random
import socket

from stoker.base.config import EngineSettings, NodeSettings, RankSettings
from stoker.base.errors import ConfigError
from stoker.engine.ranks.node_hello import NodeHello, check_hello
from stoker.parallel.channel import ChannelEnd, PlainChannel, answer
from stoker.parallel.rank_link import Kind, LinkEnd, RankLink
from tests.fuzz.target import FuzzTarget

_SETTINGS = EngineSettings(ranks=RankSettings(2), nodes=NodeSettings(2, 0, "127.0.0.1:7000"))
_FACTS = {"weights": "w", "version": "v", "settings": '{"a": 1, "b": {"c": 2}}'}
_CALM_S = 5.0


def execute(data: bytes, rng: random.Random) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_CALM_S)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        if rng.random() < 0.3:
            answer(ours, b"key", _CALM_S)
            raise AssertionError("a stranger got through the handshake")
        hello = NodeHello.from_table(RankLink(PlainChannel(ours)).receive().table(Kind.HELLO))
        check_hello(hello, _SETTINGS, _FACTS)


def _message(kind: Kind, table: object) -> bytes:
    body = bytes([kind]) + bytes(23) + json.dumps(table).encode()
    return len(body).to_bytes(4, "little") + body


def seeds() -> list[bytes]:
    good = NodeHello(1, 2, 1, dict(_FACTS)).to_table()
    return [
        _message(Kind.HELLO, good),
        _message(Kind.HELLO, good | {"facts": {"settings": '{"a": [1], "b": 3}'}}),
        _message(Kind.HELLO, good | {"num_nodes": 3}),
        _message(Kind.FAILED, "why"),
        b"stoker-ranks-1\0\0" + bytes(16) + bytes(32),
    ]


TARGET = FuzzTarget(
    execute, seeds, errors=(ChannelEnd, LinkEnd, ConfigError), tokens=[b'"facts"', b"null"], is_network=True
)
