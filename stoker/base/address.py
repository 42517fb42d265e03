"""Join and split HOST:PORT addresses (an IPv6 host is written in brackets), and check URLs."""

from __future__ import annotations

from urllib.parse import urlsplit

from stoker.base.errors import ConfigError

_EVERYWHERE = ("0.0.0.0", "::", "")


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def local_host(host: str) -> str:
    """Return the host at which a server that listens on `host` is reached from this machine."""
    return "127.0.0.1" if host in _EVERYWHERE else host


def host_of_url(flag: str, url: str) -> str:
    """Return the host of a URL. Raise ConfigError, which names the option `flag`, if it is not an HTTP URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0):
            return parts.hostname
    except ValueError:  # unclosed brackets, or a port that is not a number
        pass
    raise ConfigError(f"{flag} {url}: expected a URL such as http://10.0.0.7:8000")
