"""The list of models that the gateway serves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from stoker.base.errors import NotFound
from stoker.fleet.fleet import Fleet
from stoker.gateway.admission.api_keys import ApiKeys
from stoker.gateway.api.reply import Reply, json_reply, method_not_allowed
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.model_aliases import ModelAliases

PATH = b"/v1/models"
_READING = frozenset({b"GET", b"HEAD"})


class ModelsEndpoint:
    """Answers `/v1/models` and `/v1/models/{model}`."""

    def __init__(
        self, fleet: Fleet, keys: ApiKeys, aliases: ModelAliases, max_model_tokens: Callable[[str], int | None]
    ) -> None:
        """`max_model_tokens` returns a model's context length, if it is known."""
        self._fleet = fleet
        self._keys = keys
        self._aliases = aliases
        self._max_model_tokens = max_model_tokens
        self._started_s = int(time.time())

    async def answer(self, request: HttpRequest) -> Reply:
        self._keys.authenticate(request)
        if request.method not in _READING:
            return method_not_allowed(request.path, request.method, [b"GET"])
        name = unquote(request.path.removeprefix(PATH).removeprefix(b"/").decode("ascii"))
        return self._all() if not name else self._one(name)

    def _all(self) -> Reply:
        served, aliases = self._fleet.models(), self._aliases
        models = sorted(served)
        models += [alias for alias in aliases.names if alias not in served and aliases.resolve(alias, served) in served]
        return json_reply({"object": "list", "data": [self._card(model) for model in models]})

    def _one(self, name: str) -> Reply:
        served = self._fleet.models()
        if self._aliases.resolve(name, served) in served:
            return json_reply(self._card(name))
        names = ", ".join(sorted(served)) or "none"
        message = f"The model {name!r} is not served here. Served models: {names}."
        raise NotFound(message, param="model", code="model_not_found")

    def _card(self, model: str) -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": self._started_s, "owned_by": "stoker"}
        served = self._aliases.resolve(model, self._fleet.models())
        if served != model:
            card["root"] = served
        max_model_tokens = self._max_model_tokens(served)
        return card if max_model_tokens is None else card | {"max_model_len": max_model_tokens}
