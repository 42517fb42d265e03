"""Signed HTTP requests between the gateways and workers of one fleet. No secret crosses the wire, and no clock is needed.

A server picks a random challenge when it starts. A client signs each request with the fleet's key: the challenge, its own
id, a counter, the hash of the body, the method and the path. The server accepts each counter of a client once. A request
with another challenge, or an old counter, gets 401 with the server's challenge, and the client signs it again.

The signature covers the body's hash, which is in the header too. So a server refuses strangers before it reads a body.
In its answer the server proves that it has the key as well. Nothing here encrypts: what crosses the wire can be read there.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from stoker.base.fleet_key import PROOFS, REQUESTS, FleetKey

AUTH_HEADER = "x-stoker-auth"  # in a request: challenge.client.counter.body.signature
CHALLENGE_HEADER = "x-stoker-challenge"  # in an answer with status 401
PROOF_HEADER = "x-stoker-proof"  # in the answer to a signed request

_AUTH_LINE = AUTH_HEADER.encode() + b": %b\r\n"
_WINDOW = 4096  # counters below the highest one that are still accepted, once each
_MASK = (1 << _WINDOW) - 1
_MAX_CLIENTS = 1024  # then all clients must sign again, with a new challenge
_SIGNED = re.compile(rb"([0-9a-f]{32})\.([0-9a-f]{16})\.([1-9][0-9]{0,17})\.([0-9a-f]{64})\.([0-9a-f]{32})")
_CHALLENGE = re.compile(rb"[0-9a-f]{32}")
_NO_BODY = hashlib.sha256().hexdigest().encode()


class KnownChallenge:
    """The challenge of one server, shared by all signers that send to it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = b"0" * 32  # no server has this one, so the first request asks for the real one


class RequestSigner:
    """Signs the requests of one client to one server."""

    __slots__ = ("_challenge", "_client", "_counter", "_mac", "_proof_key", "last")

    def __init__(self, key: FleetKey, challenge: KnownChallenge | None = None) -> None:
        self._challenge = challenge or KnownChallenge()
        self._client = secrets.token_hex(8).encode()
        self._counter = 0
        self._mac = hashlib.blake2b(key=key.derive(REQUESTS), digest_size=16)
        self._proof_key = key.derive(PROOFS)
        self.last = b""  # the latest value of the header

    def sign(self, method: bytes, path: bytes, body: bytes) -> bytes:
        """Return the value of the header for a request. Every call uses another counter."""
        self._counter += 1
        digest = hashlib.sha256(body).hexdigest().encode() if body else _NO_BODY
        signed = b"%b.%b.%d.%b" % (self._challenge.value, self._client, self._counter, digest)
        mac = self._mac.copy()
        mac.update(b"%b %b %b" % (method, path, signed))
        self.last = b"%b.%b" % (signed, mac.hexdigest().encode())
        return self.last

    def header_line(self, method: bytes, path: bytes, body: bytes) -> bytes:
        """Return the header as it is written on the wire."""
        return _AUTH_LINE % self.sign(method, path, body)

    def proof_line(self, path: bytes) -> tuple[bytes, bytes]:
        """Return the header of a GET request, as it is written on the wire, and the proof that its answer must have."""
        line = self.header_line(b"GET", path, b"")
        return line, _proof(self._proof_key, self.last)

    def learn(self, challenge: bytes | None) -> bool:
        """Note the challenge of an answer with status 401. Return True if the request can be signed again."""
        if challenge is None or _CHALLENGE.fullmatch(challenge) is None:
            return False
        self._challenge.value = challenge
        return True

    def is_proven(self, proof: bytes | None) -> bool:
        """Return True if `proof`, the header of the answer to the latest request, comes from a server with the key."""
        return proof is not None and hmac.compare_digest(proof, _proof(self._proof_key, self.last))


@dataclass(frozen=True, slots=True)
class SignedHead:
    """A request whose head has a valid signature. Its body must be checked with `has_body`."""

    body_digest: bytes
    proof: bytes  # the value of the proof header for the answer

    def has_body(self, body: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(body).hexdigest().encode(), self.body_digest)


class RequestVerifier:
    """Checks the signatures of requests to one server, and remembers which counters were used."""

    def __init__(self, key: FleetKey, max_clients: int = _MAX_CLIENTS) -> None:
        # While the fleet's secret is replaced, clients sign with either one. The proof is made with the same.
        self._keys = [
            (hashlib.blake2b(key=one.derive(REQUESTS), digest_size=16), one.derive(PROOFS)) for one in key.accepted
        ]
        self._max_clients = max_clients
        self._windows: dict[bytes, _CounterWindow] = {}
        self.challenge = secrets.token_hex(16)

    def check(self, sent: bytes | None, method: bytes, path: bytes) -> SignedHead | None:
        """Return the signed head, or None if the signature is missing, wrong, outdated or was used before."""
        parts = _SIGNED.fullmatch(sent) if sent is not None else None
        if parts is None or sent is None:
            return None
        challenge, client, counter, body_digest, signature = parts.groups()
        proof_key = self._key_of(b"%b %b %b" % (method, path, sent[: -len(signature) - 1]), signature)
        if proof_key is None or challenge != self.challenge.encode() or not self._take(client, int(counter)):
            return None
        return SignedHead(body_digest, _proof(proof_key, sent))

    def _key_of(self, signed: bytes, signature: bytes) -> bytes | None:
        """Return the key for the proof, of the secret with which this was signed, or None if it was none of ours."""
        for unsigned, proof_key in self._keys:
            mac = unsigned.copy()
            mac.update(signed)
            if hmac.compare_digest(mac.hexdigest().encode(), signature):
                return proof_key
        return None

    def _take(self, client: bytes, counter: int) -> bool:
        window = self._windows.get(client)
        if window is None:
            if len(self._windows) >= self._max_clients:
                # Forgetting one client alone would let its requests be replayed.
                self._windows.clear()
                self.challenge = secrets.token_hex(16)
                return False
            window = self._windows[client] = _CounterWindow()
        return window.take(counter)


class _CounterWindow:
    """Which counters of one client were used. Those that are too old for the window count as used."""

    __slots__ = ("_highest", "_used")

    def __init__(self) -> None:
        self._highest = 0
        self._used = 0  # bit i: highest - i was used

    def take(self, counter: int) -> bool:
        """Use a counter. Return False if it was used before."""
        ahead = counter - self._highest
        if ahead > 0:
            self._used = ((self._used << ahead) | 1) & _MASK if ahead < _WINDOW else 1
            self._highest = counter
            return True
        bit = 1 << -ahead
        if -ahead >= _WINDOW or self._used & bit:
            return False
        self._used |= bit
        return True


def _proof(key: bytes, signed: bytes) -> bytes:
    return hashlib.blake2b(signed, key=key, digest_size=16).hexdigest().encode()
