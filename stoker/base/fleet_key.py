"""The secret that the processes of one fleet share, and the keys that are derived from it, one for each purpose.

The secret itself never crosses the network. A key for one purpose says nothing about the secret or about another key.
"""

from __future__ import annotations

import hashlib
from ipaddress import ip_address
from pathlib import Path

from stoker.base.errors import ConfigError

MAX_SECRETS = 2  # the one that is used, and the one before or after it
MIN_SECRET_CHARS = 16  # a captured signature can be tried against guesses, so a short secret is no secret

# Purposes. blake2b limits them to 16 bytes.
REQUESTS = b"stoker-request"  # signatures of HTTP requests
PROOFS = b"stoker-proof"  # proofs in HTTP answers
EVENTS_SERVER = b"stoker-events-s"  # CURVE key pair of all sockets that publish
EVENTS_CLIENT = b"stoker-events-c"  # CURVE key pair of all subscribers
KV_PEERS = b"stoker-kv-peer"  # handshake between KV servers and their clients
KEY_IDS = b"stoker-key-id"  # public names of secrets
RANKS = b"stoker-ranks"  # connections between the ranks of one engine


class FleetKey:
    """The root of all keys of a fleet. While its secret is replaced, there are two: the first is used, and both are accepted."""

    __slots__ = ("_also", "_root")

    def __init__(self, secret: str) -> None:
        """`secret` has a line for each accepted secret."""
        first, *others = secret.split("\n")
        self._root = hashlib.blake2b(first.encode(), digest_size=32, person=b"stoker-fleet").digest()
        self._also = tuple(FleetKey(other) for other in others)

    def derive(self, purpose: bytes) -> bytes:
        """Return the 32 bytes of the key for one purpose."""
        return hashlib.blake2b(key=self._root, digest_size=32, person=purpose).digest()

    @property
    def accepted(self) -> tuple[FleetKey, ...]:
        """Return the keys of all accepted secrets."""
        return (self, *self._also)

    @property
    def key_id(self) -> str:
        """Return a public name of the first secret, by which another process finds the same one."""
        return self.derive(KEY_IDS).hex()[:16]

    def with_id(self, key_id: str | None) -> FleetKey:
        """Return the accepted key with this id, or the first one if there is none."""
        return next((key for key in self.accepted if key.key_id == key_id), self)


def read_fleet_secret(path: Path | None, what: str) -> str | None:
    """Read the fleet's secret, without surrounding white space. `what` is the setting that errors name.

    While the secret is replaced, the file has two lines: the secret to use, and another one that is accepted too.
    """
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="ascii").strip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from error
    if not lines or not all(line and line.isprintable() for line in lines):
        raise ConfigError(f"{what} {path} holds no secret: write one line of printable ASCII characters into it")
    if len(lines) > MAX_SECRETS:
        raise ConfigError(
            f"{what} {path} has {len(lines)} lines; write one secret into it, or {MAX_SECRETS} while it is replaced"
        )
    shortest = min(map(len, lines))
    if shortest < MIN_SECRET_CHARS:
        raise ConfigError(
            f"{what} {path} holds a secret of {shortest} characters; use at least {MIN_SECRET_CHARS} random ones, "
            "for example from `openssl rand -hex 32`"
        )
    return "\n".join(lines)


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine reach a port that listens on `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
