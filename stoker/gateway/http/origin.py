"""The address of an HTTP server: scheme, host, port and an optional path prefix."""

from __future__ import annotations

import ssl as tls
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from stoker.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Origin:
    """A worker's address, parsed from its URL."""

    scheme: str
    host: str
    port: int
    ssl: tls.SSLContext | None = field(default=None, compare=False, repr=False)
    prefix: bytes = b""  # prepended to every path, for a server that is mounted below one

    @classmethod
    def from_url(cls, url: str, ssl: tls.SSLContext | None = None) -> Origin:
        """Parse `http://host:port[/prefix]`. An https URL uses the system's trust roots unless `ssl` is given."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as bad:
            raise ConfigError(f"worker url {url!r}: {bad}") from bad
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"worker url {url!r}: it must be http://host[:port] or https://host[:port]")
        if parts.query or parts.fragment or parts.username is not None or not url.isascii() or not url.isprintable():
            raise ConfigError(
                f"worker url {url!r}: it must be printable ASCII without a user, a query or a fragment; remove these"
            )
        if parts.scheme == "https" and ssl is None:
            ssl = tls.create_default_context()
        if parts.scheme == "http":
            ssl = None
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or default, ssl, parts.path.rstrip("/").encode())

    @property
    def authority(self) -> bytes:
        """Return the value of the host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority.decode()}{self.prefix.decode()}"
