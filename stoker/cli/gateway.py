"""`stoker gateway`: one address for clients, in front of any number of workers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.base import garbage
from stoker.base import log as logs
from stoker.base.address import join_address, local_host
from stoker.base.bound_socket import bound_socket, shared_socket
from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags, as_table, given_flags, refuse_flag
from stoker.base.fleet_key import is_loopback
from stoker.base.output import print_message
from stoker.base.paths import expand_home
from stoker.base.settings import declared
from stoker.cli.serving import Signals, drained

if TYPE_CHECKING:
    from stoker.gateway.config import GatewayConfig
    from stoker.gateway.gateway_server import GatewayServer
    from stoker.gateway.listen_settings import ListenSettings

NAME = "gateway"
HELP = "route requests to many workers, with limits, API keys and metering"
DESCRIPTION = """Route requests to any number of workers: `stoker serve`, vLLM, SGLang, or any server with an OpenAI API.
A request goes to the worker that has most of its conversation in its KV cache, unless that worker has too much to do. When a worker
fails, its requests are retried or resumed on another one. All settings with their ranges: docs/settings.md."""
EPILOG = """
workers:
  --worker http://10.0.0.1:8000                      a `stoker serve` worker
  --worker http://10.0.0.2:8000,dialect=vllm         also: vllm_mooncake, sglang, openai (any server with /v1/models)
  --worker http://p:8000,role=prefill --worker http://d:8000,role=decode
  more options: cluster=NAME weight=N model=NAME events=tcp://H:P replay=tcp://H:P bootstrap_port=N api_key_file=F label.X=Y
  `stoker serve` workers can also register themselves: stoker serve --gateway http://THIS:PORT --secret-file F

keys:
  stoker keys create alice --tenant team-a           stores a key for alice, and prints it once
  Without keys, every client is served. Limits and prices: docs/billing.md. All settings: docs/settings.md.
"""

log = logs.EventLog("gateway")
_OLD_LEDGER = "usage.db"
_QUESTION = "What is the capital of France?"
# The groups of --help, and the tables or keys whose flags they hold.
_GROUPS = {
    "listening": ("listen.",),
    "routing": ("routing.",),
    "access": ("admin_token_file", "metrics_token_file", "secret_file"),
    "records": ("store", "meter.", "tracing.", "log_", "recording.", "twin."),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from stoker.gateway.config import GatewayConfig

    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--config", type=expand_home, metavar="FILE", help="Read settings from this TOML file. Flags take precedence."
    )
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,role=…][,dialect=…]…",
        help="Send requests to this worker. Repeatable; added to the workers in the file.",
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="Serve a model under another name too, such as gpt-4o=my-model or 'claude-*=my-model'. Repeatable.",
    )
    for title, keys in _GROUPS.items():
        settings = [one for one in declared(GatewayConfig) if one.key.startswith(keys)]
        add_flags(parser.add_argument_group(title), settings)
    # Set by the supervisor of several processes for each of them: NUMBER:PORT,PORT,… and whether to print the welcome.
    parser.add_argument("--process", metavar="NUMBER:PORTS", help=argparse.SUPPRESS)
    parser.add_argument("--no-welcome", action="store_true", help=argparse.SUPPRESS)
    refuse_flag(parser, "--new-key", "--new-key was replaced: use `stoker keys create NAME`")


def run(args: argparse.Namespace) -> int:
    import uvloop

    config = gateway_config(args, os.environ)
    logs.set_up(config.log_level)
    if config.listen.processes > 1 and not config.process_ports:
        return uvloop.run(_supervise(config, sys.argv[1:]))
    return uvloop.run(_serve(config, welcome=not args.no_welcome))


def gateway_config(args: argparse.Namespace, environment: Mapping[str, str]) -> GatewayConfig:
    """Build the gateway's settings from its file and the flags."""
    from stoker.gateway.config import GatewayConfig, load
    from stoker.gateway.worker_option import parse_worker
    from stoker.up.state import default_state_dir

    overrides = as_table(given_flags(args, declared(GatewayConfig)))
    overrides["worker"] = [parse_worker(text) for text in args.worker]
    overrides["alias"] = [_alias(text) for text in args.alias]
    config = replace(load(args.config, overrides), state_dir=default_state_dir(environment))
    if args.process is not None:
        number, _, ports = args.process.partition(":")
        config = replace(config, process=int(number), process_ports=tuple(map(int, ports.split(","))))
    _refuse_old_ledger(config)
    return config


def _refuse_old_ledger(config: GatewayConfig) -> None:
    """Raise ConfigError if the default store is missing, but the ledger of an earlier version is there."""
    if config.store is not None or config.state_dir is None:
        return
    from stoker.gateway.config import STORE_FILE

    old, new = config.state_dir / _OLD_LEDGER, config.state_dir / STORE_FILE
    if old.exists() and not new.exists():
        raise ConfigError(
            f"--store: {old} is the usage ledger of an earlier version. Keep it with `mv {old} {new}`, and the same for its"
            f" -wal, -shm and -inflight files if there are any; or give --store FILE"
        )


def _alias(text: str) -> dict[str, str]:
    name, equals, model = text.partition("=")
    if not (name and equals and model):
        raise ConfigError(f"--alias {text!r}: write it as NAME=MODEL")
    return {"name": name, "model": model}


async def _supervise(config: GatewayConfig, arguments: Sequence[str]) -> int:
    """Run several processes on one port. They get the same arguments."""
    from stoker.gateway.process_supervisor import ProcessSupervisor

    # It never listens. It only holds the port, so that all processes get the same one and it stays theirs.
    held = shared_socket(config.listen.host, config.listen.port)
    port = held.getsockname()[1]

    def command(number: int, ports: Sequence[int], is_restart: bool) -> list[str]:
        own = ["--port", str(port), "--process", f"{number}:{','.join(map(str, ports))}"]
        quiet = ["--no-welcome"] if number or is_restart else []
        return [sys.executable, "-m", "stoker.cli.main", *arguments, *own, *quiet]

    with closing(held):
        supervisor = ProcessSupervisor(config.listen.processes, command)
        signals = Signals(supervisor.stop)
        try:
            return await supervisor.run()
        finally:
            signals.close()
            supervisor.kill()


async def _serve(config: GatewayConfig, *, welcome: bool) -> int:
    from stoker.gateway.build import build_gateway

    open_listener = shared_socket if config.process_ports else bound_socket
    listener = open_listener(config.listen.host, config.listen.port)
    with closing(listener):
        server = build_gateway(config)
        return await _run(config, server, listener, welcome)


async def _run(config: GatewayConfig, server: GatewayServer, listener: socket.socket, welcome: bool) -> int:
    signals = Signals()
    try:
        await server.start(listener)
        garbage.tune_for_serving()
        if not server.keys.required and not is_loopback(config.listen.host):
            log.warning(
                "no_api_keys",
                host=config.listen.host,
                hint="every client that reaches this address is served; see `stoker keys`",
            )
        if welcome:
            _print_welcome(config, listener.getsockname()[1], server)
        await signals.wait()
        await signals.first_of(asyncio.create_task(_leave(server, config.listen)))
        return 0
    finally:
        await server.close()


async def _leave(server: GatewayServer, settings: ListenSettings) -> None:
    """Let load balancers notice, then refuse new requests and let the running ones end."""
    server.announce_drain()
    if settings.drain_notice_s:
        print_message(
            f"stoker: accepting requests for {settings.drain_notice_s:g} s more; press Ctrl-C again to stop now",
            sys.stderr,
        )
        await asyncio.sleep(settings.drain_notice_s)
    server.begin_drain()
    if server.num_running:
        print_message(f"stoker: finishing {server.num_running} requests; press Ctrl-C again to stop now", sys.stderr)
    await drained(server, settings.drain_s)


def _print_welcome(config: GatewayConfig, port: int, server: GatewayServer) -> None:
    scheme = "https" if config.listen.tls_cert else "http"
    url = f"{scheme}://{join_address(local_host(config.listen.host), port)}"
    models = server.models()
    key = " -H 'Authorization: Bearer KEY'" if server.keys.required else ""
    workers = f"{server.num_workers} worker{'' if server.num_workers == 1 else 's'}"
    if models:
        served = f"They serve {', '.join(models)}."
    elif server.num_workers or config.secret_file:
        served = "No model is known yet; see /v1/models."
    else:
        served = "It can serve nothing: add workers with --worker URL, or let them register with --secret-file FILE."
    body = {"model": models[0] if models else "MODEL", "messages": [{"role": "user", "content": _QUESTION}]}
    print_message(
        f"""
The gateway routes to {workers}. {served} Try:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{json.dumps(body)}'
""",
        sys.stdout,
    )
