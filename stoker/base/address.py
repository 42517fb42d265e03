"""HOST:PORT as text, in which an IPv6 host stands in brackets."""

from __future__ import annotations

_EVERYWHERE = ("0.0.0.0", "::", "")


def join_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def local_host(host: str) -> str:
    """How who listens on `host` is reached from this machine."""
    return "127.0.0.1" if host in _EVERYWHERE else host
