"""The gateway's settings: a frozen tree that is read from a TOML file and the command line.

Only `load()` reads files. Nothing here opens a socket or reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from stoker.autoscale.settings import AutoscaleSettings
from stoker.base import log
from stoker.base.errors import ConfigError
from stoker.base.settings import check_settings, from_table, merged, put, read_toml, required, setting
from stoker.base.volatile_lines import VOLATILE_LINES
from stoker.fleet.health import HealthSettings
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.http import network_of
from stoker.gateway.store.location import StoreLocation
from stoker.gateway.worker_option import WorkerSettings, worker_spec
from stoker.proto.cors import CorsRules
from stoker.proto.openai.fields import MAX_TENANT_WEIGHT, MIN_TENANT_WEIGHT
from stoker.routing.settings import RouterSettings

STORE_FILE = "store.db"
_NAME = r"[A-Za-z0-9._@-]{1,64}"
_MEDIA_HOST = re.compile(r"([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[1-9][0-9]{0,4})?")
_NAME_EXPECTED = "up to 64 letters, digits, '.', '_', '@' and '-'"


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


@dataclass(frozen=True, slots=True)
class RoutingSettings(RouterSettings):
    """The router's settings, and what the gateway adds to them."""

    debug_routes: bool = setting(
        False, "Explain in the response header `x-stoker-route` why a worker was chosen.", flag="--debug-routes"
    )
    tokenize: bool = setting(
        True,
        "Compare conversations as exact token blocks where a worker provides its tokenizer. False compares them as text.",
        flag="--no-tokenize",
        flag_help="Compare conversations as text, not as token blocks.",
    )
    index_blocks: int = setting(2_000_000, "Prefix blocks remembered for each model.", ge=1)

    def __post_init__(self) -> None:
        check_settings(self, "routing")


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """How requests are sent to workers, retried and resumed."""

    connect_s: float = setting(2.0, "Timeout for connecting to a worker.", unit="s", gt=0)
    first_byte_s: float = setting(
        600.0, "Timeout until a worker's response begins, and from there to the first byte of its body.", unit="s", gt=0
    )
    idle_s: float = setting(300.0, "Longest pause inside a worker's response before it counts as lost.", unit="s", gt=0)
    max_event_mib: float = setting(
        16.0,
        "Maximum size of one event of a worker's stream. A worker that sends a larger one has failed.",
        unit="MiB",
        gt=0,
    )
    max_answer_mib: float = setting(
        128.0,
        "Maximum size of a worker's answer that is not streamed.",
        unit="MiB",
        gt=0,
    )
    max_notes_mib: float = setting(
        32.0,
        "Maximum size of the notes in a Stoker worker's stream, from which another worker resumes it. A note has about 12 "
        "bytes for a token, and about 500 with 20 logprobs.",
        unit="MiB",
        gt=0,
    )
    retries: int = setting(
        3,
        "Maximum retries on other workers before the first byte of a response. A request is never retried after two workers "
        "failed while they ran it.",
        ge=0,
    )
    retry_share: float = setting(
        0.2,
        "Maximum retries as a share of all requests. Beyond it, a worker's failure is passed on to the client.",
        ge=0,
    )
    resumes: int = setting(3, "Maximum times that a broken stream is resumed on another worker.", ge=0)
    resume_grace_s: float = setting(
        10.0, "How long a broken stream waits for a worker that can resume it.", unit="s", ge=0
    )
    suspect_s: float = setting(
        600.0,
        "How long a request body is remembered after workers crashed while they ran it. 0 turns this off.",
        unit="s",
        ge=0,
    )

    volatile_line: tuple[str, ...] = setting(
        VOLATILE_LINES,
        "How lines at the start of a system prompt begin that change with every request. They are ignored when prompts for "
        "foreign engines are compared, and left out of Messages requests that are translated to chat. An empty text keeps "
        "all lines. Stoker workers have a setting of their own.",
    )
    media_hosts: tuple[str, ...] = setting(
        (),
        "Hosts, such as images.example.com or images.example.com:8443, from which foreign engines may fetch the images, "
        "videos, audio and files that clients name by http(s) URLs. All other URLs except data: are refused.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "proxy")
        for text in self.media_hosts:
            if _MEDIA_HOST.fullmatch(text) is None:
                raise ConfigError(
                    f"proxy.media_hosts: {text!r} is not a host in lower case, with or without a port; write it like "
                    "images.example.com or images.example.com:8443"
                )

    @property
    def max_event_bytes(self) -> int:
        return int(self.max_event_mib * (1 << 20))

    @property
    def max_answer_bytes(self) -> int:
        return int(self.max_answer_mib * (1 << 20))

    @property
    def max_notes_bytes(self) -> int:
        return int(self.max_notes_mib * (1 << 20))


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """How many requests the workers get at a time, and how long the others may wait in the gateway's queue."""

    requests_per_worker: int = setting(512, "Maximum requests in flight to a worker of weight 1.", ge=1)
    waiting_per_worker: int = setting(
        4, "Maximum sequences that may wait inside a worker, if it reports its queue.", ge=0
    )
    prefill_s: float = setting(
        10.0,
        "Maximum uncached prefill in flight to a worker whose prefill rate is known, in seconds of its work.",
        unit="s",
        gt=0,
    )
    prefill_tokens: int = setting(
        4096, "Uncached prompt tokens that may always be in flight to a worker, at any rate.", unit="tokens", ge=1
    )
    queue_requests: int = setting(4096, "Maximum requests in the queue.", ge=0)
    queue_s: float = setting(
        30.0, "Maximum wait in a burst. A request with a longer predicted wait is refused at once.", unit="s", gt=0
    )
    standing_s: float = setting(
        2.0,
        "Maximum wait under overload, which is when the queue has not been empty for queue_s.",
        unit="s",
        gt=0,
    )
    priority_age_s: float = setting(
        5.0,
        "A request's priority improves by one step each time it has waited this long. This prevents starvation.",
        unit="s",
        gt=0,
    )

    def __post_init__(self) -> None:
        check_settings(self, "admission")


@dataclass(frozen=True, slots=True)
class MeterSettings:
    """The usage ledger."""

    RENAMED: ClassVar[dict[str, str]] = {"path": "store, at the top of the file"}
    flush_s: float = setting(0.2, "Maximum time between two batches of rows.", unit="s", gt=0)
    flush_rows: int = setting(500, "Maximum rows in a batch.", ge=1)
    max_pending: int = setting(
        32_768,
        "Maximum requests that run or whose rows are not yet in the ledger. Beyond it new requests are refused, so that none"
        " goes unbilled. Each takes 1 KiB of disk space in advance.",
        ge=1,
        le=1 << 22,
    )
    hidden_tokens: int = setting(
        32_768,
        "Maximum output tokens per choice that a worker may report beyond the bytes that it sent, such as reasoning that it"
        " does not show. It applies to requests without a limit on output tokens.",
        unit="tokens",
        ge=0,
    )
    keep_days: float | None = setting(
        None,
        "How long usage rows, audit entries and the spending of sessions are kept. Sums of hours and days stay.",
        unit="days",
        gt=0,
        default_text="forever",
    )
    currency: str = setting("USD", "Currency of the prices, as shown by /v1/usage.")

    def __post_init__(self) -> None:
        check_settings(self, "meter")


@dataclass(frozen=True, slots=True)
class ResponsesSettings:
    """Stored responses of the Responses API. They need a store."""

    store_default: bool = setting(True, "Whether a response is stored if its request does not say so, as OpenAI does.")
    retention_s: float = setting(
        30 * 86_400.0,
        "How long a response is kept. Continuing a conversation keeps all of its responses.",
        unit="s",
        gt=0,
    )
    max_mib: float = setting(16.0, "Maximum size of one stored response with its input.", unit="MiB", gt=0)
    max_tenant_mib: float = setting(
        1024.0, "Maximum size of a tenant's responses, compressed. The oldest make room.", unit="MiB", gt=0
    )
    max_turns: int = setting(1000, "Maximum turns of a conversation that previous_response_id continues.", ge=1)
    max_background: int = setting(64, "Maximum background responses of a tenant that have not ended.", ge=1)
    background_s: float = setting(
        3600.0, "Maximum time that a background response waits for a worker. It fails then.", unit="s", gt=0
    )
    lease_s: float = setting(
        15.0,
        "A gateway that does not renew its lease on a background response or a batch for this long counts as dead.",
        unit="s",
        ge=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "responses")


@dataclass(frozen=True, slots=True)
class FlexSettings:
    """Flex requests and the lines of batches, which use only idle capacity."""

    concurrency: int = setting(8, "Maximum flex requests that run at a time, for each worker.", ge=1)
    idle_requests: int = setting(
        0,
        "A model is idle for flex requests while it has at most this many interactive requests for each worker. More of them"
        " than 0 make batches faster and interactive requests slower.",
        ge=0,
    )
    quiet_s: float = setting(
        0.5, "How long a model must have been idle before flex requests begin to run.", unit="s", ge=0
    )
    wait_s: float = setting(30.0, "Maximum wait of a flex request for idle capacity.", unit="s", gt=0)
    max_waiting: int = setting(4096, "Maximum flex requests of a model that wait.", ge=1)

    def __post_init__(self) -> None:
        check_settings(self, "flex")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The Files and Batch API. They need a store."""

    max_lines: int = setting(50_000, "Maximum requests in one batch.", ge=1)
    max_batches: int = setting(32, "Maximum batches of an API key that have not ended.", ge=1)
    max_tenant_mib: float = setting(4096.0, "Maximum size of a tenant's files, compressed.", unit="MiB", gt=0)
    retention_s: float = setting(
        30 * 86_400.0,
        "How long a file or an ended batch is kept, unless a file's expires_after says less.",
        unit="s",
        gt=0,
    )
    running: int = setting(64, "Maximum lines of all batches that a gateway works on at a time.", ge=1)
    insist_after: int = setting(
        10,
        "A line that interactive requests have preempted this often is not preempted again. Only one line at a time insists.",
        ge=1,
    )
    poll_s: float = setting(1.0, "How often a gateway looks for batches to work on.", unit="s", gt=0)

    def __post_init__(self) -> None:
        check_settings(self, "batch")


@dataclass(frozen=True, slots=True)
class TwinSettings:
    """The live twin: predicts each request's time to first token, and names workers that are slower than predicted."""

    enabled: bool = setting(False, "Compare predicted with actual times.", flag="--twin")
    calibration: Path | None = setting(
        None,
        "File of `stoker calibrate` for the workers. Without it, workers are compared with each other.",
        default_text="none",
    )

    def __post_init__(self) -> None:
        check_settings(self, "twin")


@dataclass(frozen=True, slots=True)
class RecordingSettings:
    """A recording of all routing decisions and of what they rest on, for `stoker trace`. It has no text of any request."""

    file: Path | None = setting(
        None,
        "New file that routing decisions are recorded to, from the start of the gateway. Process N of several adds `.N`.",
        flag="--record",
        metavar="FILE",
        default_text="no recording",
    )
    max_mib: float = setting(1024.0, "Maximum size of the file. Then the recording stops.", unit="MiB", gt=0)

    def __post_init__(self) -> None:
        check_settings(self, "recording")


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry traces."""

    otlp_endpoint: str | None = setting(
        None,
        "URL that traces are sent to, such as http://collector:4318/v1/traces.",
        flag="--otlp-endpoint",
        metavar="URL",
        default_text="no tracing",
    )
    service_name: str = setting("stoker-gateway", "Service name in the traces.")
    sample: float = setting(
        1.0, "Share of requests that are traced. A client's own sampling decision takes precedence.", ge=0, le=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "tracing")


@dataclass(frozen=True, slots=True)
class PriceSettings:
    """The price of a model, for a million tokens."""

    model: str = required("Model name. `*` is the price of all models that have none of their own.")
    input: float = required("Price of a million uncached prompt tokens.", ge=0, le=1e9)
    output: float = required("Price of a million generated tokens.", ge=0, le=1e9)
    cached_input: float | None = setting(
        None, "Price of a million cached prompt tokens.", ge=0, le=1e9, default_text="the same as input"
    )

    def __post_init__(self) -> None:
        check_settings(self, f"price of model {self.model!r}")


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A group of API keys that shares a cache and a fair share of the workers."""

    name: str = required("Name of the tenant.", pattern=_NAME, expected=_NAME_EXPECTED)
    weight: float = setting(
        1.0,
        "Share of uncached tokens relative to other tenants, while requests wait in the queue or at a worker.",
        ge=MIN_TENANT_WEIGHT,
        le=MAX_TENANT_WEIGHT,
    )
    share_cache: bool = setting(
        False, "Whether its requests may hit cached prefixes of other tenants that have share_cache = true too."
    )

    def __post_init__(self) -> None:
        check_settings(self, "tenant")


@dataclass(frozen=True, slots=True)
class KeySettings:
    """An API key and its limits. `stoker keys create NAME --print` prints one; `stoker keys create NAME` puts it in the store."""

    name: str = required("Name of the key.", pattern=_NAME, expected=_NAME_EXPECTED)
    sha256: str = required(
        "SHA-256 hash of the key.",
        pattern="[0-9a-f]{64}",
        expected="64 lower-case hex digits, as `stoker keys create NAME --print` prints them",
    )
    tenant: str = setting("default", "Tenant that the key belongs to.", pattern=_NAME, expected=_NAME_EXPECTED)
    priority: int = setting(0, "Best priority that a request with this key may ask for. Lower numbers run first.")
    requests_per_minute: float | None = setting(None, "Maximum requests per minute.", gt=0, default_text="no limit")
    tokens_per_minute: float | None = setting(
        None, "Maximum uncached prompt tokens and generated tokens per minute.", gt=0, default_text="no limit"
    )
    concurrency: int | None = setting(None, "Maximum requests at the same time.", ge=1, default_text="no limit")
    budget: float | None = setting(
        None,
        "Maximum cost of all requests in a period, in the currency of the prices.",
        gt=0,
        le=1e9,
        default_text="no limit",
    )
    budget_period: str = setting(
        "total", "The period of the budget, in UTC. `total` never ends.", choices=("total", "day", "month")
    )
    session_budget: float | None = setting(
        None, "Maximum cost of all requests of one session.", gt=0, le=1e9, default_text="no limit"
    )

    def __post_init__(self) -> None:
        check_settings(self, "key")


@dataclass(frozen=True, slots=True)
class AliasSettings:
    """Another name of a served model."""

    name: str = required(
        "The other name. One that ends in * stands for all names that begin so.",
        pattern=".{1,512}",
        expected="a model name",
    )
    model: str = required("The served model.", pattern=".{1,512}", expected="a model name")
    share: float = setting(
        1.0,
        "Share of the requests that go to this model. Below 1 it is a canary, beside another entry or a model of this name.",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        check_settings(self, "alias")
        if self.share < 1 and self.name.endswith("*"):
            raise ConfigError(
                f"alias {self.name!r}: a name that ends in * cannot have a share; give each name its own entry"
            )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything that the gateway is configured with."""

    listen: ListenSettings = field(default_factory=ListenSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    proxy: ProxySettings = field(default_factory=ProxySettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    meter: MeterSettings = field(default_factory=MeterSettings)
    responses: ResponsesSettings = field(default_factory=ResponsesSettings)
    flex: FlexSettings = field(default_factory=FlexSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    autoscale: AutoscaleSettings = field(default_factory=AutoscaleSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    recording: RecordingSettings = field(default_factory=RecordingSettings)
    twin: TwinSettings = field(default_factory=TwinSettings)
    worker: tuple[WorkerSettings, ...] = ()
    price: tuple[PriceSettings, ...] = ()
    alias: tuple[AliasSettings, ...] = ()
    tenant: tuple[TenantSettings, ...] = ()
    key: tuple[KeySettings, ...] = ()
    store: str | None = setting(
        None,
        "Where the gateway keeps its durable state, such as usage rows: a SQLite file, or a URL postgresql://… that several "
        "gateways share. `none` keeps nothing, and turns metering off.",
        flag="--store",
        metavar="FILE|URL",
        default_text="store.db in the state folder, ~/.local/state/stoker",
        renamed_from=("--ledger",),
    )
    process: int = 0  # the number of this process among `listen.processes`
    process_ports: tuple[int, ...] = ()  # the processes' own ports on 127.0.0.1, if there are several
    state_dir: Path | None = None  # this machine's folder for state; None: without `store` there is no store
    admin_token_file: Path | None = setting(
        None,
        "File that holds the bearer token for /admin/*.",
        flag="--admin-token-file",
        metavar="FILE",
        default_text="no admin API",
    )
    metrics_token_file: Path | None = setting(
        None,
        "File that holds a bearer token for /metrics. Where API keys are configured, /metrics needs it or the admin token.",
        flag="--metrics-token-file",
        metavar="FILE",
        default_text="the admin token only",
    )
    secret_file: Path | None = setting(
        None,
        "File with the secret that workers and gateways share, at least 16 characters. Registrations and all requests to "
        "`stoker serve` workers are signed with it, and it never crosses the network.",
        flag="--secret-file",
        metavar="FILE",
        default_text="workers cannot register themselves",
    )
    log_requests: bool = setting(
        True,
        "Write a log line for each request.",
        flag="--no-request-log",
        flag_help="Write no log line for each request.",
    )
    log_level: str = setting(
        "info", "Lowest level of log events that are written.", flag="--log-level", choices=log.LEVELS
    )

    def __post_init__(self) -> None:
        check_settings(self, "")
        _unique("worker.url", [one.url.rstrip("/") for one in self.worker])
        _unique("key.name", [one.name for one in self.key])
        _unique("tenant.name", [one.name for one in self.tenant])
        _unique("price.model", [one.model for one in self.price])
        _unique("alias.name", [one.name for one in self.alias if one.share == 1])
        _unique("alias.name (with a share)", [one.name for one in self.alias if one.share < 1])
        _ = self.store_location  # refuses a wrong URL
        for key in self.key:
            if self.store == "none" and (key.budget is not None or key.session_budget is not None):
                raise ConfigError(
                    f"key {key.name!r}: a budget is counted in the store, and store=none; remove the budget, or set store"
                )

    @property
    def store_location(self) -> StoreLocation | None:
        """Return where the store lies; None if there is none."""
        if self.store == "none" or (self.store is None and self.state_dir is None):
            return None
        state_dir = self.state_dir or Path()
        return StoreLocation(self.store or str(state_dir / STORE_FILE), state_dir)

    def worker_specs(self) -> tuple[WorkerSpec, ...]:
        specs = tuple(worker_spec(one) for one in self.worker)
        _unique("worker (host:port)", [spec.worker_id for spec in specs])
        return specs


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """Read the gateway's settings from a file (None: the defaults) and apply `overrides` from the command line.

    Overrides have the names of the file, or dotted names such as "listen.port". A list is added to the file's list.
    """
    nested: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        put(nested, name.split("."), value)
    table = merged({} if path is None else read_toml(path), nested)
    try:
        return from_table(GatewayConfig, table)
    except ConfigError as error:
        raise ConfigError(error.message if path is None else f"{path}: {error.message}") from error


def read_secret(path: Path | None, what: str) -> str | None:
    """Read the token or secret to send from its file: the first line. `what` is the setting that errors name."""
    lines = read_secrets(path, what)
    return lines[0] if lines else None


def read_secrets(path: Path | None, what: str) -> tuple[str, ...]:
    """Read the tokens to accept from their file, one in each line: while a token is replaced, there are two."""
    if path is None:
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}={path}: cannot be read: {error}") from error
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ConfigError(f"{what}={path}: the file is empty; write a secret into it")
    return lines


def _unique(where: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: {', '.join(twice)} is given twice; remove one")
