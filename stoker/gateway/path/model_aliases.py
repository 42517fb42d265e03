"""Other names of served models, such as `gpt-4o`, so that clients with a fixed model name need no change."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import RequestEnvelope, fields

_ANY = "*"


class ModelAliases:
    """Maps names to served models. A name that ends in `*` stands for all names that begin so; the longest one wins.

    A share of a name's requests can go to another model, such as a new version (a canary).
    """

    def __init__(self, models: Mapping[str, str], canaries: Mapping[str, tuple[str, float]] | None = None) -> None:
        """`canaries` has for some names another model and its share of the requests, 0 to 1."""
        self._canaries = dict(canaries or {})
        self._exact = {name: model for name, model in models.items() if not name.endswith(_ANY)}
        patterns = {name.removesuffix(_ANY): model for name, model in models.items() if name.endswith(_ANY)}
        self._beginnings = sorted(patterns.items(), key=lambda pair: len(pair[0]), reverse=True)
        self.names = tuple(sorted(self._exact))  # without patterns

    def stop_canary(self, name: str) -> None:
        """Send all requests of a name to the model that has the rest."""
        self._canaries.pop(name, None)

    def without_canary(self, name: str) -> str:
        """Return the model of the requests that do not go to the canary."""
        return self.resolve(name, ())

    def __bool__(self) -> bool:
        return bool(self._exact or self._beginnings or self._canaries)

    def resolve(self, name: str, served: Collection[str], place: float = 1.0) -> str:
        """Return the model that `name` stands for: itself, if it is served or has no alias.

        Requests with a `place` below a canary's share go to the canary, if it is served.
        """
        if self._canaries and name in self._canaries:
            model, share = self._canaries[name]
            if place < share and model in served:
                return model
        if name in served:
            return name
        if name in self._exact:
            return self._exact[name]
        return next((model for beginning, model in self._beginnings if name.startswith(beginning)), name)


NO_ALIASES = ModelAliases({})


def canary_place(session: str | None) -> float:
    """Return the place of a request among all, 0 to 1. A session keeps its place, so that all its turns get one model."""
    if session is None:
        return random.random()
    return int.from_bytes(hashlib.blake2b(session.encode("utf-8", "replace"), digest_size=4).digest()) / (1 << 32)


def rename(envelope: RequestEnvelope, model: str, put: dict[str, bytes]) -> None:
    """Send the model's own name to the worker, if the client used another one."""
    if envelope.model and envelope.model != model:
        put["model"] = msgspec.json.encode(model)


def renamed_body(body: bytes, name: str | None, model: str) -> bytes:
    """Return a request body with the model's own name in place of the client's."""
    if not name or name == model:
        return body
    return msgspec.json.encode({**fields(body), "model": Raw(msgspec.json.encode(model))})
