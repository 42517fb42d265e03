"""Frames between KV servers and their clients: the decoders, a real server after its handshake, and a hostile server."""

from __future__ import annotations

import random
import socket
import threading
from typing import Any

import torch

from stoker.base.config import HandoffSettings
from stoker.base.ids import BlockId, BlockKey
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import BlockName, KvIdentity, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook, LeaseView
from stoker.kv.peer.peer_server import PeerServer
from stoker.kv.peer.peer_wire import (
    BadFrame,
    BlockReply,
    BlockRequest,
    FrameKind,
    PeerConnection,
    load_json,
    pack_confirm,
    unpack_confirm,
)
from stoker.kv.peer.remote_peer import RemotePeer
from stoker.kv.peer.transports.transport import make_transports
from tests.fuzz.target import FuzzTarget

_LAYOUT = KvLayout.of(num_layers=2, num_heads=2, width=4, block_tokens=4, dtype="float32", dtype_bytes=4)
_IDENTITY = KvIdentity(model="m", tokenizer="t", layout=_LAYOUT.identity, dtype="float32")
_SETTINGS = HandoffSettings(secret="s" * 16)
_KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]
_CALM_S = 5.0


class _World:
    """A KV server in this process, and a listener that plays a hostile one."""

    def __init__(self) -> None:
        self.kv = DeviceKv(_LAYOUT, 4, torch.device("cpu"))
        self.leases = LeaseBook()
        self.leases.put("L", _KEYS, [BlockId(number) for number in range(4)], 4, True)
        self.server = PeerServer(self.kv, _IDENTITY, self.leases, _SETTINGS, lambda lease_id: None)
        self.hostile = socket.create_server(("127.0.0.1", 0))
        self.died: list[BaseException | None] = []
        threading.excepthook = lambda args: self.died.append(args.exc_value)


_worlds: list[_World] = []


def _world() -> _World:
    if not _worlds:
        _worlds.append(_World())
    return _worlds[0]


def execute(data: bytes, rng: random.Random) -> None:
    for unpack in (BlockRequest.unpack, BlockReply.unpack, unpack_confirm, load_json):
        try:
            found: Any = unpack(data)
        except BadFrame:
            continue
        if isinstance(found, BlockRequest) and found.keys != []:
            assert BlockRequest.unpack(found.pack()) == found
    world = _world()
    if rng.random() < 0.5:
        _attack_server(world, data, shakes_hands=rng.random() < 0.8)
    else:
        _attack_client(world, data, rng.choice([0, 0, 1]))
    if world.died:
        raise AssertionError(f"a thread of the server died: {world.died.pop()!r}")


def _attack_server(world: _World, data: bytes, shakes_hands: bool) -> None:
    peer = RemotePeer(world.server.address, world.server.engine_id, _IDENTITY, _SETTINGS, make_transports(_SETTINGS))
    if shakes_hands:
        connection = peer._connect(_CALM_S)
        sock = connection._sock
    else:
        sock = socket.create_connection(("127.0.0.1", int(world.server.address.rpartition(":")[2])))
    with sock:
        sock.settimeout(_CALM_S)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except OSError:
            pass  # the server has closed the connection


def _attack_client(world: _World, data: bytes, kv_set: int) -> None:
    """Connect a client to a server that answers with these bytes, whatever it is sent."""
    address = f"127.0.0.1:{world.hostile.getsockname()[1]}"
    peer = RemotePeer(address, "e", _IDENTITY, _SETTINGS, make_transports(_SETTINGS))
    answers = threading.Thread(target=_answer, args=(world, data))
    answers.start()
    try:
        with peer.connection(_CALM_S) as connection:
            peer._open(connection, world.kv.sets[0], kv_set, lambda: None)
            _ = peer.layout
    except PeerUnavailable:
        pass
    finally:
        answers.join()
        peer.close()
    ours, theirs = _pair(world)
    with ours, theirs:
        ours.sendall(data[: 32 << 10])
        ours.shutdown(socket.SHUT_WR)
        peer._welcome = {}
        try:
            peer._welcome = load_json(PeerConnection(theirs).receive(*FrameKind)[1])
            peer._open(PeerConnection(theirs), world.kv.sets[0], kv_set, lambda: None)
            _ = peer.layout.block_bytes
        except PeerUnavailable:
            pass


def _answer(world: _World, data: bytes) -> None:
    sock, _ = world.hostile.accept()
    with sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except OSError:
            pass


def _pair(world: _World) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(world.hostile.getsockname())
    return ours, world.hostile.accept()[0]


def _frame(kind: FrameKind, payload: bytes) -> bytes:
    return b"VK" + bytes([kind, 0]) + len(payload).to_bytes(4, "little") + payload


def seeds() -> list[bytes]:
    request = BlockRequest("L", 0, _KEYS, 4, 0.0, 0, 2).pack()
    layers = BlockRequest("L", 0, _KEYS, 4, 0.0, 0, 2, layers=(range(1, 2),)).pack()
    tokens = BlockRequest("L", 0, _KEYS, 4, 0.0, 0, 2, tokens=range(8)).pack()
    no_keys = BlockRequest("L", 0, [BlockKey(b"")] * 3, 4, 0.0, 0, 2).pack()
    names = [BlockName(_KEYS[0], _KEYS[1], (1, 2), "salt"), BlockName(_KEYS[1], _KEYS[0], (3,), None)]
    reply = BlockReply(LeaseView(1, [BlockId(0), BlockId(1)], names, 2, True), [5, 6]).pack()
    layout = b'{"num_layers":2,"num_heads":2,"head_dim":4,"block_tokens":4,"dtype":"float32","dtype_bytes":4}'
    welcome = b'{"engine_id":"e","layout":' + layout + b',"transports":["tcp"],"ranks":["h:1"]}'
    return [
        request,
        tokens,
        no_keys,
        reply,
        welcome,
        _frame(FrameKind.WELCOME, welcome) + _frame(FrameKind.OPENED, b"{}"),
        _frame(FrameKind.LOCATE, layers) + _frame(FrameKind.READ, request) + _frame(FrameKind.RELEASE, b"L"),
        _frame(FrameKind.OPEN, b'{"transport":"tcp"}') + _frame(FrameKind.CONFIRM, pack_confirm("L", 1)),
        _frame(FrameKind.CHALLENGE, b'{"nonce":"' + b"00" * 16 + b'","proof":"' + b"00" * 32 + b'"}'),
        _frame(FrameKind.REFUSED, b'{"code":"c","message":"m"}')
        + _frame(FrameKind.HELLO, b'{"version":"2","nonce":""}'),
    ]


TARGET = FuzzTarget(
    execute,
    seeds,
    tokens=[b"VK", *(_frame(kind, b"") for kind in FrameKind), b'"transports":5', b'"layout":{}', b"null", b'"nonce":'],
    max_s=20.0,
    max_input_bytes=32 << 10,
    base_bytes=40 << 20,  # a frame's announced length is allocated before it arrives, up to 16 MiB
)
