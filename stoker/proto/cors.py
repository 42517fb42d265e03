"""Cross-origin requests: which web pages a browser may let call this server. Gateway and workers use the same rules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from stoker.base.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9,_ -]{0,2048}")
_EXPOSED = "x-request-id, retry-after, x-ignored-fields"
_METHODS = "GET, POST, DELETE, OPTIONS"
_MAX_AGE_S = 600

REQUESTED_METHOD = "access-control-request-method"  # a preflight request has it
REQUESTED_HEADERS = "access-control-request-headers"


@dataclass(frozen=True, slots=True)
class CorsRules:
    """The origins that may call this server. Without any, no header is sent, and browsers refuse every other origin."""

    origins: Sequence[str] = ()
    _all: bool = field(init=False)

    def __post_init__(self) -> None:
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is not an origin; write it like https://chat.example.com:8443, or *"
                )
        object.__setattr__(self, "_all", "*" in self.origins)

    def __bool__(self) -> bool:
        return bool(self.origins)

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers of an answer to a page of this origin. They are empty if the page may not read it."""
        if origin is None or not (self._all or origin in self.origins):
            return {}
        allowed = {"access-control-allow-origin": "*"}
        if not self._all:
            allowed = {"access-control-allow-origin": origin, "vary": "origin"}
        return allowed | {"access-control-expose-headers": _EXPOSED}

    def preflight(self, origin: str | None, requested: str) -> dict[str, str]:
        """Return the headers of an answer to a preflight request for the header names in `requested`."""
        allowed = self.headers(origin)
        if not allowed:
            return {}
        names = requested if _HEADER_NAMES.fullmatch(requested) else ""
        return allowed | {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": names,
            "access-control-max-age": str(_MAX_AGE_S),
        }


NO_CORS = CorsRules()
