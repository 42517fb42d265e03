"""RemotePeer: another worker's KV server as a client sees it, with its kept connections and the link that transfers
bytes."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from stoker.base.address import split_address
from stoker.base.config import HandoffSettings
from stoker.base.log import EventLog
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import KvIdentity, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv, SetKv
from stoker.kv.peer.block_bytes import BeforeWrite, BlockSink
from stoker.kv.peer.layout_wire import read_layout
from stoker.kv.peer.peer_wire import VERSION, BadFrame, FrameKind, PeerConnection, PeerLost, load_json, proof
from stoker.kv.peer.transports.tcp import TcpLink
from stoker.kv.peer.transports.transport import IO_TIMEOUT_S, Link, Transport

_MAX_IDLE = 8
_MAX_RANKS = 1024  # of one engine
_log = EventLog("kv.peer")


class RemotePeer:
    """One run of one rank's KV server. Threads may share it; each uses its own connection."""

    def __init__(
        self,
        address: str,
        engine_id: str,
        identity: KvIdentity,
        settings: HandoffSettings,
        transports: Mapping[str, Transport],
    ) -> None:
        self.address = address
        self.engine_id = engine_id
        self._identity = identity
        self._settings = settings
        self._transports = transports
        self._lock = threading.Lock()
        self._idle: list[PeerConnection] = []
        self._is_closed = False
        self._opening = threading.Lock()  # held while the link is opened, so that two threads open it only once
        self._links: dict[int, Link] = {}  # by KV set
        self._welcome: dict[str, Any] = {}

    @property
    def layout(self) -> KvLayout:
        """The peer's layout, known after the first connection."""
        return read_layout(self._welcome.get("layout"))

    @property
    def other_ranks(self) -> list[str]:
        """The addresses of the other ranks of the engine, as its first rank tells them after the handshake."""
        found = self._welcome.get("ranks", [])
        if not isinstance(found, list) or len(found) > _MAX_RANKS or not all(isinstance(one, str) for one in found):
            raise BadFrame("a WELCOME whose ranks are not a list of addresses")
        return found

    @contextmanager
    def connection(self, timeout_s: float) -> Iterator[PeerConnection]:
        """Use a kept connection that is still open, or a new one. It is not kept after an error."""
        connection = self._take_idle() or self._connect(timeout_s)
        is_good = False
        try:
            yield connection
            is_good = True
        finally:
            self._give_back(connection, is_good)

    def ensure_handshake(self, timeout_s: float) -> None:
        """Do the handshake if that was not done yet. The peer's layout is known afterwards."""
        if not self._welcome:
            with self.connection(timeout_s):
                pass

    def link(
        self, connection: PeerConnection, kv: DeviceKv, kv_set: int, sink: BlockSink, before_write: BeforeWrite
    ) -> Link:
        """Return a link to the peer's blocks of a KV set, for this sink: the first of our transports that the peer
        offers too and that works. It is opened once."""
        with self._opening:
            if kv_set not in self._links:
                self._links[kv_set] = self._open(connection, kv.sets[kv_set], kv_set, before_write)
            link = self._links[kv_set]
        if link.supports(sink):
            return link
        if "tcp" not in self._transports or "tcp" not in self._welcome["transports"]:
            raise PeerUnavailable(f"{type(link).__name__} cannot write to this destination, and tcp is not allowed")
        return TcpLink()

    def sweep(self) -> bool:
        """Drop connections that have ended. False: there were some and none is left, so that the peer may be gone."""
        with self._lock:
            before, kept = self._idle, [connection for connection in self._idle if connection.is_idle()]
            self._idle = kept
        for connection in set(before) - set(kept):
            connection.close()
        return bool(kept) or not before

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        with self._opening:
            for link in self._links.values():
                link.close()
            self._links = {}

    def _take_idle(self) -> PeerConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_idle():
                return connection
            connection.close()

    def _give_back(self, connection: PeerConnection, is_good: bool) -> None:
        with self._lock:
            if is_good and not self._is_closed and len(self._idle) < _MAX_IDLE:
                connection.was_kept = True
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, timeout_s: float) -> PeerConnection:
        try:
            sock = socket.create_connection(
                split_address(self.address), timeout=max(0.001, min(IO_TIMEOUT_S, timeout_s))
            )
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self.address}: {error}") from error
        connection = PeerConnection(sock)
        try:
            connection.limit(max(0.001, min(IO_TIMEOUT_S, timeout_s)), IO_TIMEOUT_S)
            self._handshake(connection)
        except PeerUnavailable:
            connection.close()
            raise
        return connection

    def _handshake(self, connection: PeerConnection) -> None:
        nonce, secret = secrets.token_bytes(16), self._settings.secret
        connection.send_json(FrameKind.HELLO, {"version": VERSION, "nonce": nonce.hex()})
        challenge = load_json(connection.receive(FrameKind.CHALLENGE, hello=True)[1])
        try:
            nonces = nonce + bytes.fromhex(challenge["nonce"])
            server_proof = bytes.fromhex(challenge["proof"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrame(f"CHALLENGE with missing fields: {error!r}") from error
        if not hmac.compare_digest(server_proof, proof(secret, b"server", nonces)):
            raise PeerUnavailable("secret: not the same on both sides", code="kv_secret")
        body = json.dumps({"engine_id": self.engine_id, "identity": asdict(self._identity)}).encode()
        connection.send(FrameKind.PROVE, proof(secret, b"client", nonces, body) + body)
        self._welcome = load_json(connection.receive(FrameKind.WELCOME, hello=True)[1])

    def _open(self, connection: PeerConnection, kv: SetKv, kv_set: int, before_write: BeforeWrite) -> Link:
        reasons, sets = [], self.layout.sets
        if kv_set >= len(sets):
            raise BadFrame(f"a layout with {len(sets)} KV sets, and set {kv_set} is needed")
        layout = sets[kv_set].layout
        for name, transport in self._transports.items():
            if name not in self._welcome.get("transports", ()):
                reasons.append(f"{name}: not offered")
                continue
            try:
                connection.send_json(FrameKind.OPEN, {"transport": name} | ({"set": kv_set} if kv_set else {}))
                offer = load_json(connection.receive(FrameKind.OPENED)[1])
                link = transport.open(offer, layout, kv, before_write)
            except (PeerLost, BadFrame):
                raise
            except PeerUnavailable as refusal:
                reasons.append(f"{name}: {refusal.message}")
                continue
            _log.event("kv_peer_linked", peer=self.address, transport=name, skipped=reasons)
            return link
        raise PeerUnavailable(f"no transport to {self.address} works: {'; '.join(reasons)}", code="kv_no_transport")
