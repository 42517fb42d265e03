"""The settings of the address that clients connect to, and the limits of what they send there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, setting
from stoker.gateway.http import network_of
from stoker.proto.cors import CorsRules


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """The address that clients connect to."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. 127.0.0.1 is reachable from this machine only, 0.0.0.0 from everywhere.",
        flag="--host",
        metavar="ADDRESS",
    )
    port: int = setting(8000, "Port to listen on. 0 picks a free port.", flag="--port", ge=0, le=65535)
    tls_cert: Path | None = setting(
        None, "Certificate chain in PEM format. Serves HTTPS; needs the key too.", flag="--tls-cert", metavar="FILE"
    )
    tls_key: Path | None = setting(
        None, "Private key of the certificate in PEM format.", flag="--tls-key", metavar="FILE"
    )
    max_body_mib: float = setting(
        32.0, "Maximum size of a request body. Larger ones get 413.", flag="--max-body-mib", unit="MiB", gt=0
    )
    max_connections: int = setting(
        10_000,
        "Maximum client connections. The limit of open files is raised to two per connection, as far as `ulimit -Hn` allows.",
        ge=1,
    )
    max_bodies_mib: float | None = setting(
        None,
        "Maximum size of all request bodies that are being received or served. One tenant may use half of it, or without API"
        " keys one client address. Requests beyond it get 503. Copies for workers can take as much memory again."
        " Answers that clients have not read are limited to the same size.",
        unit="MiB",
        gt=0,
        default_text="1024, or 4 times max_body_mib if that is more",
    )
    max_public_body_kib: float = setting(
        64.0,
        "Maximum size of a request body on paths that need no API key or check another secret, such as /admin/*.",
        unit="KiB",
        gt=0,
    )
    max_public_requests_per_s: int = setting(
        500,
        "Most requests per second of one address to paths that need no API key for their body, such as /health and"
        " /v1/models. Further ones get status 429, and their connection is closed.",
        ge=10,
    )
    max_connections_per_address: int | None = setting(
        None,
        "Maximum connections from one client address, or from one /64 network of IPv6. Connections beyond it get 429. There"
        " is no such limit for loopback and trusted_addresses.",
        ge=1,
        default_text="a quarter of max_connections",
    )
    trusted_addresses: tuple[str, ...] = setting(
        (),
        "Addresses and networks, such as 10.0.0.0/8, that may open any number of connections. List the load balancers in"
        " front of the gateway here.",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "Origin of web pages that may call this gateway from a browser, such as https://chat.example.com, or * for all. "
        "Repeatable.",
        flag="--cors-origin",
        metavar="ORIGIN",
        default_text="none",
    )
    processes: int = setting(
        1,
        "Number of gateway processes that share the port. Each uses one core. They share a store, and with it the limits of "
        "keys.",
        flag="--processes",
        ge=1,
        le=64,
    )
    drain_notice_s: float = setting(
        0.0,
        "Time after SIGTERM in which requests are still accepted while /ready already returns 503. Behind a load balancer, set "
        "it above the time that its health check takes to notice.",
        flag="--drain-notice-s",
        unit="s",
        ge=0,
        le=600,
    )
    drain_s: float = setting(
        3600.0, "Maximum time that running requests get to finish after SIGTERM.", flag="--drain-s", unit="s", gt=0
    )

    def __post_init__(self) -> None:
        check_settings(self, "listen")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                "listen.tls_cert (--tls-cert) and listen.tls_key (--tls-key): TLS needs both, and only one is given"
            )
        if self.held_body_mib < 2 * self.max_body_mib:
            raise ConfigError(
                f"listen.max_bodies_mib={self.max_bodies_mib:g} is smaller than twice listen.max_body_mib"
                f" ({self.max_body_mib:g}); one tenant may use half of it, so a body of that size would never fit"
            )
        CorsRules(self.cors_origin)
        for text in self.trusted_addresses:
            try:
                network_of(text)
            except ValueError as error:
                raise ConfigError(
                    f"listen.trusted_addresses: {text!r} is not an address or a network such as 10.0.0.0/8"
                ) from error

    @property
    def held_body_mib(self) -> float:
        """Return `max_bodies_mib` or its default."""
        return self.max_bodies_mib if self.max_bodies_mib is not None else max(1024.0, 4 * self.max_body_mib)

    @property
    def connections_per_address(self) -> int:
        """Return `max_connections_per_address` or its default."""
        return self.max_connections_per_address or max(1, self.max_connections // 4)
