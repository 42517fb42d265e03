"""The secret that the processes of one fleet share, and the keys that are derived from it, one for each purpose.

The secret itself never crosses the network. A key for one purpose says nothing about the secret or about another key.
"""

from __future__ import annotations

import hashlib
from ipaddress import ip_address
from pathlib import Path

from stoker.base.errors import ConfigError

MIN_SECRET_CHARS = 16  # a captured signature can be tried against guesses, so a short secret is no secret

# Purposes. blake2b limits them to 16 bytes.
REQUESTS = b"stoker-request"  # signatures of HTTP requests
PROOFS = b"stoker-proof"  # proofs in HTTP answers
EVENTS_SERVER = b"stoker-events-s"  # CURVE key pair of all sockets that publish
EVENTS_CLIENT = b"stoker-events-c"  # CURVE key pair of all subscribers
KV_PEERS = b"stoker-kv-peer"  # handshake between KV servers and their clients
RANKS = b"stoker-ranks"  # connections between the ranks of one engine


class FleetKey:
    """The root of all keys of a fleet."""

    __slots__ = ("_root",)

    def __init__(self, secret: str) -> None:
        self._root = hashlib.blake2b(secret.encode(), digest_size=32, person=b"stoker-fleet").digest()

    def derive(self, purpose: bytes) -> bytes:
        """Return the 32 bytes of the key for one purpose."""
        return hashlib.blake2b(key=self._root, digest_size=32, person=purpose).digest()


def read_fleet_secret(path: Path | None, what: str) -> str | None:
    """Read the fleet's secret, without surrounding white space. `what` is the setting that errors name."""
    if path is None:
        return None
    try:
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
    if not secret or not secret.isprintable():
        raise ConfigError(f"{what} {path} holds no secret: write one line of printable ASCII characters into it")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{what} {path} holds a secret of {len(secret)} characters; use at least {MIN_SECRET_CHARS} random ones, "
            "for example from `openssl rand -hex 32`"
        )
    return secret


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine reach a port that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
