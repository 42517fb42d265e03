"""PeerServer: sends other workers the blocks that this engine keeps for them. One thread per connection, blocking
sockets.

It knows leases and bytes, but not requests. A client must prove that it knows the shared secret, and have the same
model, tokenizer, layout and dtype. A bad frame ends its connection and nothing else.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoker.base.address import join_address
from stoker.base.config import HandoffSettings
from stoker.base.errors import ConfigError
from stoker.base.fleet_key import is_loopback
from stoker.base.log import EventLog
from stoker.kv.blocks.layout import block_slice
from stoker.kv.blocks.transfer import KvIdentity, PeerUnavailable
from stoker.kv.device.device_kv import DeviceKv, SetKv
from stoker.kv.peer.block_bytes import source_of
from stoker.kv.peer.layout_wire import describe_layout
from stoker.kv.peer.lease_book import LeaseBook, LeaseView
from stoker.kv.peer.peer_wire import (
    VERSION,
    BadFrame,
    BlockReply,
    BlockRequest,
    FrameKind,
    PeerConnection,
    PeerLost,
    load_json,
    proof,
    unpack_confirm,
)
from stoker.kv.peer.transports.tcp import send_blocks
from stoker.kv.peer.transports.transport import IO_TIMEOUT_S, make_transports

_MAX_CONNECTIONS = 256  # of authenticated peers
_MAX_STRANGERS = 32  # connections in their handshake; the oldest one makes room for a new one
_MAX_WAIT_S = 60.0
_CHECKSUM_BYTES = 8 << 20
_CHECKSUM_WAIT_S = 1.0
_ACCEPT_AGAIN_S = 0.2
_log = EventLog("kv.peer_server")


@dataclass(slots=True)
class PeerServerStats:
    """Gauges, and counters since the start."""

    connections: int = 0
    refused: int = 0  # connections that were refused
    bad: int = 0  # connections that sent an invalid frame
    located_blocks: int = 0
    sent_blocks: int = 0
    released: int = 0


class PeerServer:
    """Listens for peers and serves their requests."""

    def __init__(
        self,
        kv: DeviceKv,
        identity: KvIdentity,
        leases: LeaseBook,
        settings: HandoffSettings,
        on_release: Callable[[str], None],
        engine_id: str | None = None,
    ) -> None:
        """`on_release(lease_id)` is called on a server thread when a peer has pulled all the blocks that it needs.

        Ranks of one engine share an `engine_id`. A ticket names the first of them, which tells the others' addresses.
        """
        if settings.secret is None and not settings.insecure and not is_loopback(settings.host):
            raise ConfigError(
                f"handoff.host={settings.host} needs handoff.secret: without it, all processes that reach it could read KV"
            )
        self.engine_id = engine_id or secrets.token_hex(16)
        self._kv = kv
        self._identity = identity
        self._leases = leases
        self._settings = settings
        self._on_release = on_release
        self._sources = [source_of(memory) for memory in kv.sets]
        self._transports = make_transports(settings)
        self._lock = threading.Lock()  # protects everything below
        self._stats = PeerServerStats()
        self._connections: dict[PeerConnection, threading.Thread] = {}
        self._strangers: dict[PeerConnection, None] = {}  # those whose handshake is not done, oldest first
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._listener = socket.create_server((settings.host, settings.port), family=family, backlog=128)
        self._is_closed = False
        self.address = join_address(settings.host, self._listener.getsockname()[1])
        self.other_ranks: Sequence[str] = ()
        """The addresses of the other ranks' servers. Set on the first rank before its first ticket."""
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()
        self._checksummer = threading.Thread(target=self._compute_checksums, name="kv-checksums", daemon=True)
        self._checksummer.start()

    def stats(self) -> PeerServerStats:
        with self._lock:
            return replace(self._stats, connections=len(self._connections))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            open_now = list(self._connections.items())
        # close() alone does not wake the thread in accept().
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.event("kv_listener_already_closed", reason=str(error))
        self._acceptor.join(IO_TIMEOUT_S)
        self._listener.close()
        for connection, thread in open_now:
            connection.shut()
            thread.join(IO_TIMEOUT_S)
        self._leases.wake()
        self._checksummer.join(IO_TIMEOUT_S)
        for transport in self._transports.values():
            transport.close()

    def _compute_checksums(self) -> None:
        """Checksum blocks as they become ready, so that a pull need not wait for it."""
        layouts = [memory.layout for memory in self._kv.sets]
        whole = [block_slice(layout, layout.whole_part) for layout in layouts]
        limit = max(1, _CHECKSUM_BYTES // max(layout.block_bytes for layout in layouts))
        while not self._is_closed:
            if (found := self._leases.next_unchecked(limit, _CHECKSUM_WAIT_S)) is not None:
                source, part = self._sources[found.kv_set], whole[found.kv_set]
                self._leases.set_checksums(found, source.checksums(found.blocks, part))

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # For example, too many open files. Waiting clients are accepted when there are fewer.
                _log.warning("kv_accept_failed", reason=str(error))
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            connection = PeerConnection(sock)
            with self._lock:
                if self._is_closed or len(self._connections) - len(self._strangers) >= _MAX_CONNECTIONS:
                    self._stats.refused += 1
                    connection.close()
                    continue
                if len(self._strangers) >= _MAX_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    self._stats.refused += 1
                    oldest.shut()
                self._strangers[connection] = None
                thread = threading.Thread(
                    target=self._run, args=(connection, str(peer[0])), name="kv-peer", daemon=True
                )
                self._connections[connection] = thread
            thread.start()

    def _run(self, connection: PeerConnection, peer: str) -> None:
        try:
            if self._handshake(connection, peer):
                with self._lock:
                    self._strangers.pop(connection, None)
                self._serve(connection)
        except BadFrame as bad:
            self._count(bad=1)
            _log.warning("kv_bad_frame", peer=peer, reason=bad.message)
        except PeerUnavailable as error:
            _log.event("kv_peer_left", peer=peer, reason=error.message)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                del self._connections[connection]
            connection.close()

    def _handshake(self, connection: PeerConnection, peer: str) -> bool:
        """Do the handshake. The server proves first that it knows the secret, so that a client
        reveals nothing to an unauthenticated server. Returns False if the client was refused."""
        connection.limit(IO_TIMEOUT_S, IO_TIMEOUT_S)
        hello = load_json(connection.receive(FrameKind.HELLO, hello=True)[1])
        secret = self._settings.secret
        try:
            if hello.get("version") != VERSION:
                raise PeerUnavailable(f"version: {VERSION} here, {hello.get('version')} there", code="kv_version")
            nonces = _nonce(hello.get("nonce")) + (own_nonce := secrets.token_bytes(16))
            server_proof = proof(secret, b"server", nonces).hex()
            connection.send_json(FrameKind.CHALLENGE, {"nonce": own_nonce.hex(), "proof": server_proof})
            payload = connection.receive(FrameKind.PROVE, hello=True)[1]
            if not hmac.compare_digest(payload[:32], proof(secret, b"client", nonces, payload[32:])):
                raise PeerUnavailable("secret: not the same on both sides", code="kv_secret")
            self._check(load_json(payload[32:]))
        except PeerUnavailable as refusal:
            if isinstance(refusal, PeerLost | BadFrame):
                raise
            self._count(refused=1)
            _log.warning("kv_peer_refused", peer=peer, reason=refusal.message)
            _refuse(connection, refusal)
            return False
        connection.send_json(
            FrameKind.WELCOME,
            {
                "engine_id": self.engine_id,
                "layout": describe_layout(self._kv.layout),
                "transports": list(self._transports),
                "ranks": list(self.other_ranks),
            },
        )
        return True

    def _check(self, client: dict[str, object]) -> None:
        wanted, theirs = client.get("engine_id"), client.get("identity")
        if wanted != self.engine_id:
            message = f"engine_id: {self.engine_id} here, {wanted} requested: that engine has ended"
            raise PeerUnavailable(message, code="kv_engine_gone")
        try:
            identity = KvIdentity(**theirs)  # type: ignore[arg-type]  # values that are not strings differ
        except TypeError as error:
            raise BadFrame(f"an identity with other fields: {error}") from error
        differences = self._identity.differences(identity)
        if differences:
            raise PeerUnavailable("; ".join(differences), code="kv_identity_differs")

    def _serve(self, connection: PeerConnection) -> None:
        handlers = {
            FrameKind.OPEN: self._open,
            FrameKind.LOCATE: self._locate,
            FrameKind.READ: self._read,
            FrameKind.CONFIRM: self._confirm,
            FrameKind.RELEASE: self._release,
        }
        while True:
            connection.limit(0, IO_TIMEOUT_S)  # between two pulls a client may be silent for hours
            kind, payload = connection.receive(*handlers)
            try:
                handlers[kind](connection, payload)
            except PeerUnavailable as refusal:
                if isinstance(refusal, PeerLost | BadFrame):
                    raise
                _refuse(connection, refusal)

    def _open(self, connection: PeerConnection, payload: bytes) -> None:
        """Describe the pool of a KV set for one transport."""
        request = load_json(payload)
        name, kv_set = str(request.get("transport")), request.get("set", 0)
        if type(kv_set) is not int:
            raise BadFrame(f"OPEN of the KV set {kv_set!r}")
        if name not in self._transports:
            raise PeerUnavailable(f"transport {name!r} is not among {', '.join(self._transports)}")
        connection.send_json(FrameKind.OPENED, self._transports[name].offer(self._set(kv_set)))

    def _locate(self, connection: PeerConnection, payload: bytes) -> None:
        """Reply where blocks are, with their checksums."""
        request = self._request(payload)
        view = self._view(request)
        checksums: list[int] = []
        if view.blocks:
            with self._leases.reading(request.lease_id, view.generation) as may_read:
                if not may_read:
                    raise PeerUnavailable(f"lease {request.lease_id!r} has moved or ended", code="kv_lease_closed")
                layout = self._set(request.kv_set).layout
                part = block_slice(layout, request.part(layout))
                checksums = view.checksums if part.total_bytes == layout.used_bytes else []
                checksums = checksums + self._sources[request.kv_set].checksums(view.blocks[len(checksums) :], part)
        self._count(located_blocks=len(view.blocks))
        connection.send(FrameKind.LOCATED, BlockReply(view, checksums).pack())

    def _read(self, connection: PeerConnection, payload: bytes) -> None:
        """Send blocks over TCP."""
        if "tcp" not in self._transports:
            raise PeerUnavailable(f"transport 'tcp' is not among {', '.join(self._transports)}")
        request = self._request(payload)
        view = self._view(request)
        connection.send(FrameKind.DATA, BlockReply(view, []).pack())
        source, layout = self._sources[request.kv_set], self._set(request.kv_set).layout
        count = send_blocks(connection, source, self._leases, layout, request, view)
        self._count(sent_blocks=count)

    def _confirm(self, connection: PeerConnection, payload: bytes) -> None:
        """Reply whether a lease still has the placement that a client has read."""
        held = self._leases.holds(*unpack_confirm(payload))
        connection.send(FrameKind.CONFIRMED, b"\x01" if held else b"\x00")

    def _release(self, connection: PeerConnection, payload: bytes) -> None:
        """Release a lease that a client no longer needs. Reply whether it was known."""
        lease_id = payload.decode(errors="replace")
        is_known = lease_id in self._leases
        if is_known:
            self._count(released=1)
            self._on_release(lease_id)
        connection.send(FrameKind.RELEASED, b"\x01" if is_known else b"\x00")

    def _request(self, payload: bytes) -> BlockRequest:
        """Decode a request and check its KV set, heads and layers."""
        request = BlockRequest.unpack(payload)
        layout = self._set(request.kv_set).layout
        if not (part := request.part(layout)).is_held_by(layout):
            raise BadFrame(f"{part} requested from a rank that holds {layout.whole_part}")
        return replace(request, wait_s=min(request.wait_s, _MAX_WAIT_S))

    def _set(self, number: int) -> SetKv:
        """Return the memory of a KV set. Raises BadFrame."""
        if not 0 <= number < len(self._kv.sets):
            raise BadFrame(f"KV set {number} requested from a model that has {len(self._kv.sets)}")
        return self._kv.sets[number]

    def _view(self, request: BlockRequest) -> LeaseView:
        where = (request.lease_id, request.first, request.keys, request.limit, request.wait_s, request.kv_set)
        return self._leases.view(*where)

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)


def _refuse(connection: PeerConnection, refusal: PeerUnavailable) -> None:
    connection.send_json(FrameKind.REFUSED, {"code": refusal.code, "message": refusal.message})


def _nonce(text: object) -> bytes:
    try:
        nonce = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        nonce = b""
    if len(nonce) != 16:
        raise BadFrame("HELLO without a nonce of 16 bytes")
    return nonce
