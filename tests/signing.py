"""Signed requests to a worker, as a gateway sends them."""

from __future__ import annotations

import urllib.error
import urllib.request
from functools import cache

from stoker.base.fleet_key import FleetKey
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, RequestSigner


def challenge_of(url: str) -> bytes:
    """Return the challenge that a worker gives to strangers."""
    try:
        with urllib.request.urlopen(f"{url}/stoker/worker", timeout=60):
            raise AssertionError("this worker needs no signature")
    except urllib.error.HTTPError as refused:
        with refused:
            return str(refused.headers[CHALLENGE_HEADER]).encode()


@cache
def _signer(url: str, secret: str) -> RequestSigner:
    """Return one client for all requests to a worker, which remembers a limited number of clients."""
    return RequestSigner(FleetKey(secret))


def signer_for(url: str, secret: str) -> RequestSigner:
    signer = _signer(url, secret)
    signer.learn(challenge_of(url))  # another one, if the worker was restarted
    return signer


def signed(
    url: str, secret: str | None, path: str, data: bytes | None = None, method: str | None = None
) -> dict[str, str]:
    """Return the headers of a signed request, or none without a secret."""
    if secret is None:
        return {}
    name = method or ("GET" if data is None else "POST")
    return {AUTH_HEADER: signer_for(url, secret).sign(name.encode(), path.encode(), data or b"").decode()}
