"""The settings of `stoker serve`. Each is a flag, and a key of `[[workers]]` in fleet.toml."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from stoker.base import log
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.flags import as_table, given_flags
from stoker.base.fleet_key import KV_PEERS, RANKS, FleetKey
from stoker.base.settings import Declared, check_settings, declared, from_table, setting
from stoker.base.volatile_lines import VOLATILE_LINES

WorkerRole = Literal["unified", "prefill", "decode"]
ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where the worker listens, and under which name and role."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on. 127.0.0.1 is reachable from this machine only, 0.0.0.0 from everywhere.",
        flag="--host",
        metavar="ADDRESS",
    )
    port: int = setting(8000, "Port to listen on. 0 picks a free port.", flag="--port", ge=0, le=65535)
    role: WorkerRole = setting(
        "unified",
        "What gateways send to this worker: prefill, decode, or both (unified). A request that a client sends directly "
        "is always answered completely.",
        flag="--role",
        choices=ROLES,
    )
    served_name: tuple[str, ...] = setting(
        (),
        "Model name in the API. Repeatable: all names work, and answers carry the first one.",
        flag="--served-name",
        metavar="NAME",
        pattern=".+",
        expected="a model name",
        default_text="derived from MODEL",
    )

    def __post_init__(self) -> None:
        check_settings(self, "serve")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """How the model's text is parsed."""

    tool_format: str | None = setting(
        None,
        "Tool-call format of the model's text.",
        flag="--tool-format",
        default_text="detected from the chat template",
    )
    reasoning_format: str | None = setting(
        None,
        "Reasoning format of the model's text. `none` leaves the reasoning in the content.",
        flag="--reasoning-format",
        default_text="detected from the chat template",
    )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The server process."""

    max_body_mib: float = setting(
        32.0, "Maximum size of a request body. Larger ones get 413.", flag="--max-body-mib", unit="MiB", gt=0
    )
    max_open: int = setting(
        2048, "Maximum sequences open at the same time, running or waiting. More get 503.", flag="--max-open", ge=1
    )
    engine_silent_s: float = setting(
        4.5,
        "An engine process whose heartbeat stops for this time is killed and restarted. Its requests get the error "
        "engine_died, and a gateway continues them elsewhere.",
        flag="--engine-silent-s",
        unit="s",
        ge=1,
    )
    step_timeout_s: float | None = setting(
        None,
        "An engine process that needs longer than this for one step is killed and restarted.",
        flag="--step-timeout-s",
        unit="s",
        ge=1,
        default_text="120 s on a GPU, 900 s on a CPU",
    )
    drain_s: float = setting(
        3600.0,
        "Maximum time that running requests get to finish after SIGTERM, and before the worker is given another model.",
        flag="--drain-s",
        unit="s",
        ge=0,
    )
    no_move: bool = setting(
        False,
        "Finish running requests here when this worker drains. By default, gateways continue them on other workers.",
        flag="--no-move",
    )
    cache_dir: Path | None = setting(
        None,
        "Folder for downloaded and converted models, compiled kernels and tuned tiles.",
        flag="--cache-dir",
        metavar="DIR",
        default_text="~/.cache/stoker",
    )
    offline: bool = setting(False, "Download nothing.", flag="--offline")
    log_level: str = setting(
        "info", "Lowest level of log events that are written.", flag="--log-level", choices=log.LEVELS
    )
    timeline: bool = setting(False, "Log how long each stage of the start took.", flag="--timeline")
    strict: bool = setting(
        False,
        "Refuse request fields that are not known with a 400. Without it they are ignored, counted and logged once each.",
        flag="--strict",
    )
    volatile_line: tuple[str, ...] = setting(
        VOLATILE_LINES,
        "A line at the start of a system prompt that begins with this text is left out of the prompt. Agents write lines "
        "there that change with every request, so that no prefix of the prompt would be found in the cache. Repeatable; "
        "replaces the default. An empty text keeps all lines.",
        flag="--volatile-line",
        metavar="TEXT",
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "Origin of web pages that may call this server from a browser, such as https://chat.example.com, or * for all. "
        "Repeatable.",
        flag="--cors-origin",
        metavar="ORIGIN",
        default_text="none",
    )

    def __post_init__(self) -> None:
        check_settings(self, "serve")


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """How gateways find this worker and learn what it holds."""

    gateway: tuple[str, ...] = setting(
        (),
        "URL of a gateway to register with. Repeatable.",
        flag="--gateway",
        metavar="URL",
        commas=True,
        expected="URLs separated by commas",
        default_text="none",
    )
    gateway_file: Path | None = setting(
        None,
        "File with more URLs of gateways to register with, one in each line. It is read again before each heartbeat, so "
        "that gateways can be added, removed and moved without a restart.",
        flag="--gateway-file",
        metavar="FILE",
        default_text="none",
    )
    advertise: str | None = setting(
        None,
        "URL where gateways reach this worker.",
        flag="--advertise",
        metavar="URL",
        default_text="from --host and --port",
    )
    secret_file: Path | None = setting(
        None,
        "File with the secret that this worker, its gateways and its peers share, at least 16 characters. With it, every "
        "port of this worker requires it; it never crosses the network. A worker that other machines reach needs one.",
        flag="--secret-file",
        metavar="FILE",
        default_text="no secret",
    )
    api_key_file: Path | None = setting(
        None,
        "File with a bearer key for clients without the secret, such as foreign routers. It opens the generating endpoints "
        "and /v1/models, without cache_salt and other fields that only a gateway may set.",
        flag="--api-key-file",
        metavar="FILE",
        default_text="only gateways with the secret",
    )
    insecure: bool = setting(
        False,
        "Allow a --host that other machines reach without --secret-file. All that reach this worker's ports can then "
        "generate, read prompts from KV events and choose a tenant's cache_salt.",
        flag="--insecure",
    )
    events_port: int = setting(
        0,
        "Port for KV events and load reports. The next port is for replays. 0 picks free ports.",
        flag="--events-port",
        ge=0,
        le=65534,
    )
    no_events: bool = setting(False, "Publish no KV events and no load reports.", flag="--no-events")

    def __post_init__(self) -> None:
        check_settings(self, "serve")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything that `stoker serve` takes, except MODEL."""

    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    text: TextSettings = field(default_factory=TextSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    membership: MembershipSettings = field(default_factory=MembershipSettings)


@dataclass(frozen=True, slots=True)
class Section:
    """A group of settings in `--help` and on the reference page."""

    title: str
    prefixes: tuple[str, ...]  # of the settings' keys
    description: str = ""

    @property
    def settings(self) -> list[Declared]:
        return [one for one in declared(ServeSettings) if one.key.rpartition(".")[0] in self.prefixes]


SECTIONS = (
    Section("endpoint", ("endpoint",)),
    Section("engine", ("engine", "engine.kv", "engine.sched")),
    Section(
        "parallelism",
        ("engine.ranks", "engine.nodes"),
        "One model on several GPUs and machines, or on several processes of a CPU: docs/parallelism.md.",
    ),
    Section(
        "KV store",
        ("engine.store",),
        "Tiers that keep KV blocks which the device's memory has no room for. Later requests find them there.",
    ),
    Section(
        "KV hand-off",
        ("engine.handoff",),
        "How a prefill worker's KV reaches a decode worker. Peers authenticate with the secret of --secret-file.",
    ),
    Section("text", ("text",)),
    Section("server", ("server",)),
    Section("gateways", ("membership",)),
)

# A setting that has no effect without another one. Giving it alone is a mistake.
_NEEDS = {
    "--api-key-file": "--secret-file",
    "--node-rank": "--nodes",
    "--head": "--nodes",
    "--node-wait-s": "--nodes",
    "--kv-store": "--kv-host-gib",
    "--kv-disk-gib": "--kv-disk",
    "--kv-disk-key-file": "--kv-disk",
    "--kv-mooncake-segment-gib": "--kv-mooncake",
    "--kv-mooncake-protocol": "--kv-mooncake",
    "--kv-mooncake-ssd": "--kv-mooncake",
}


def serve_keys() -> dict[str, Declared]:
    """Return the settings of `stoker serve` by their keys in `[[workers]]`: a flag's name with _ for -."""
    return {one.flag_name: one for one in declared(ServeSettings)}


def serve_settings(args: argparse.Namespace) -> ServeSettings:
    """Build the settings from parsed flags. What depends on the network (`for_network`) is still missing."""
    given = given_flags(args, declared(ServeSettings))
    flags = {one.flag for one in given}
    for flag, needed in _NEEDS.items():
        if flag in flags and needed not in flags:
            raise ConfigError(f"{flag} has no effect without {needed}: give both")
    settings = from_table(ServeSettings, as_table(given))
    ranks, prefills = settings.engine.ranks, settings.endpoint.role == "prefill"
    # By default, a model on several ranks holds no KV for peers: each rank would need a port.
    serves = ranks.tp * ranks.pp == 1 or prefills or "--kv-port" in flags
    handoff = replace(settings.engine.handoff, serves=serves, prefills=prefills)
    return replace(settings, engine=replace(settings.engine, handoff=handoff))


def for_network(engine: EngineSettings, host: str, secret: str | None, insecure: bool = False) -> EngineSettings:
    """Fill in under which `host` other machines reach this one, and the keys that peers and the nodes of an engine share.

    The engine process gets only these keys, not the secret.
    """
    key, ranks_key = (
        None if secret is None else FleetKey(secret).derive(purpose).hex() for purpose in (KV_PEERS, RANKS)
    )
    return replace(
        engine,
        store=replace(engine.store, mooncake_host=host),
        handoff=replace(engine.handoff, host=host, secret=key, insecure=insecure),
        nodes=replace(engine.nodes, key=ranks_key, insecure=insecure),
    )
