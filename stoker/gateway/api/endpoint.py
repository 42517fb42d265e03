"""The interface between the gateway's URL routes (`path/app.py`) and the endpoints that answer a path themselves."""

from __future__ import annotations

from typing import Protocol

from stoker.gateway.api.reply import Reply


class EndpointRequest(Protocol):
    """The parts of an HTTP request that an endpoint reads. `HttpRequest` provides them."""

    @property
    def method(self) -> bytes: ...

    @property
    def path(self) -> bytes: ...

    @property
    def query(self) -> bytes: ...

    @property
    def body(self) -> bytes: ...

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this lower-case name."""


class Endpoint(Protocol):
    """A component of the gateway that answers requests for its own paths: admin API, usage, registration, tokenizer."""

    async def answer(self, request: EndpointRequest) -> Reply: ...
