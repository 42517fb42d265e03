"""Signers for requests to Stoker workers. All signers of one worker share what is known of its challenge."""

from __future__ import annotations

from stoker.base.fleet_key import FleetKey
from stoker.fleet.spec import WorkerSpec
from stoker.proto.signed_http import KnownChallenge, RequestSigner

_STOKER = "stoker"  # the dialect of Stoker workers


class WorkerSigners:
    """Makes signers, if the fleet has a secret. The watcher of a worker learns its challenge before requests are sent."""

    def __init__(self, key: FleetKey | None = None) -> None:
        self.key = key
        self._challenges: dict[str, KnownChallenge] = {}

    def signer(self, spec: WorkerSpec) -> RequestSigner | None:
        """Return a new signer for a worker, or None if requests to it are not signed."""
        if self.key is None or spec.dialect != _STOKER:
            return None
        return RequestSigner(self.key, self._challenges.setdefault(spec.url, KnownChallenge()))

    def forget(self, url: str) -> None:
        self._challenges.pop(url, None)
