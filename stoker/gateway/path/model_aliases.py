"""Other names of served models, such as `gpt-4o`, so that clients with a fixed model name need no change."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
from msgspec import Raw

from stoker.gateway.api.client_body import RequestEnvelope, fields

_ANY = "*"


class ModelAliases:
    """Maps names to served models. A name that ends in `*` stands for all names that begin so; the longest one wins."""

    def __init__(self, models: Mapping[str, str]) -> None:
        self._exact = {name: model for name, model in models.items() if not name.endswith(_ANY)}
        patterns = {name.removesuffix(_ANY): model for name, model in models.items() if name.endswith(_ANY)}
        self._beginnings = sorted(patterns.items(), key=lambda pair: len(pair[0]), reverse=True)
        self.names = tuple(sorted(self._exact))  # without patterns

    def __bool__(self) -> bool:
        return bool(self._exact or self._beginnings)

    def resolve(self, name: str, served: Collection[str]) -> str:
        """Return the model that `name` stands for: itself, if it is served or has no alias."""
        if name in served:
            return name
        if name in self._exact:
            return self._exact[name]
        return next((model for beginning, model in self._beginnings if name.startswith(beginning)), name)


NO_ALIASES = ModelAliases({})


def rename(envelope: RequestEnvelope, model: str, put: dict[str, bytes]) -> None:
    """Send the model's own name to the worker, if the client used another one."""
    if envelope.model and envelope.model != model:
        put["model"] = msgspec.json.encode(model)


def renamed_body(body: bytes, name: str | None, model: str) -> bytes:
    """Return a request body with the model's own name in place of the client's."""
    if not name or name == model:
        return body
    return msgspec.json.encode({**fields(body), "model": Raw(msgspec.json.encode(model))})
