"""CURVE encryption of KV events and replays (ZMQ). Both sides have key pairs that are derived from the fleet's secret."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from stoker.base.fleet_key import EVENTS_CLIENT, EVENTS_SERVER, FleetKey

ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks whether a client may connect
_ZAP_VERSION = b"1.0"
_DOMAIN = b"stoker"


class OpenEvents:
    """No encryption: for a fleet without a secret, and for foreign engines, which have none."""

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Prepare a socket before it is bound."""

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Prepare a socket before it connects."""

    def admits(self, public_key: bytes) -> bool:
        return False


class FleetEvents:
    """Encryption with the fleet's keys. A server admits only clients that have the fleet's client key."""

    def __init__(self, key: FleetKey) -> None:
        self._server_secret, self._server_public = _pair(key.derive(EVENTS_SERVER))
        self._client_secret, self._client_public = _pair(key.derive(EVENTS_CLIENT))
        self._admitted = frozenset(_pair(one.derive(EVENTS_CLIENT))[1] for one in key.accepted)

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self._server_secret)
        socket.set(zmq.CURVE_PUBLICKEY, self._server_public)
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        socket.set(zmq.CURVE_SERVERKEY, self._server_public)
        socket.set(zmq.CURVE_SECRETKEY, self._client_secret)
        socket.set(zmq.CURVE_PUBLICKEY, self._client_public)

    def admits(self, public_key: bytes) -> bool:
        return z85.encode(public_key) in self._admitted


EventSecurity = OpenEvents | FleetEvents


def event_security(key: FleetKey | None) -> EventSecurity:
    return OpenEvents() if key is None else FleetEvents(key)


def zap_answer(frames: list[bytes], security: EventSecurity) -> list[bytes]:
    """Answer libzmq's question whether a client may connect: yes if it has the fleet's client key."""
    request_id = frames[1] if len(frames) > 1 else b""
    mechanism, credentials = (frames[5], frames[6:]) if len(frames) > 5 else (b"", [])
    admitted = mechanism == b"CURVE" and len(credentials) == 1 and security.admits(credentials[0])
    status, text = (b"200", b"OK") if admitted else (b"400", b"not a member of this fleet")
    return [_ZAP_VERSION, request_id, status, text, b"", b""]


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    encoded = z85.encode(secret)
    return encoded, zmq.curve_public(encoded)
