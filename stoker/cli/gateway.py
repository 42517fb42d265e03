"""`stoker gateway`: the one address that clients know, in front of any number of workers."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from stoker.base import log as logs
from stoker.base.address import join_address, local_host
from stoker.base.paths import written_path
from stoker.base.speech import answer, say
from stoker.cli.serving import Signals, drained, listen

if TYPE_CHECKING:
    from stoker.gateway.build import GatewayServer
    from stoker.gateway.config import GatewayConfig

NAME = "gateway"
HELP = "one address in front of many workers: routing, hand-off, limits, metering"
DESCRIPTION = """One address in front of any number of workers: `stoker serve`, vLLM, SGLang, or anything with an OpenAI API.
Requests go where their conversation is cached and the load allows; a worker that dies is worked around."""
EPILOG = """
workers:
  --worker http://10.0.0.1:8000                      a `stoker serve` worker
  --worker http://10.0.0.2:8000,dialect=vllm         also: sglang, openai (anything with /v1/models)
  --worker http://p:8000,role=prefill --worker http://d:8000,role=decode
  more options: cluster=NAME weight=N model=NAME events=tcp://H:P replay=tcp://H:P bootstrap_port=N api_key_file=F label.X=Y
  Our own workers may also register themselves: stoker serve --gateway http://THIS:PORT --secret-file F

keys:
  stoker gateway --new-key alice --tenant team-a     prints a key for alice, and the lines for the file of --config
  Without keys everybody may ask. Prices, limits and all other settings: docs/gateway.md.
"""

_GC_OBJECTS = 50_000  # new ones between two looks of the garbage collector
_DEFAULT_LEDGER = "usage.db"
_QUESTION = "What is the capital of France?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=written_path, metavar="FILE", help="settings in TOML; flags win over it")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,role=…][,dialect=…]…",
        help="a worker (repeatable; adds to the file's)",
    )
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (default: 8000)")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM; with --tls-key")
    parser.add_argument("--tls-key", metavar="FILE")
    routing = parser.add_argument_group("routing")
    routing.add_argument("--policy", metavar="NAME", help="how a worker is chosen (default: cost)")
    routing.add_argument("--debug-routes", action="store_true", help="say in `x-stoker-route` why a worker was chosen")
    routing.add_argument("--no-tokenize", action="store_true", help="compare conversations as text, not as tokens")
    access = parser.add_argument_group("access")
    access.add_argument("--admin-token-file", metavar="FILE", help="opens /admin/* to who shows what is in the file")
    access.add_argument("--secret-file", metavar="FILE", help="the secret that workers and gateways share")
    access.add_argument("--new-key", metavar="NAME", help="print a new API key and its lines for the file, and end")
    access.add_argument(
        "--tenant", metavar="NAME", default="default", help="tenant of --new-key (default: %(default)s)"
    )
    record = parser.add_argument_group("records")
    record.add_argument(
        "--ledger", metavar="FILE", help="SQLite file for usage rows; `none` for none (default: in the state folder)"
    )
    record.add_argument("--otlp-endpoint", metavar="URL", help="send traces there, such as http://host:4318/v1/traces")
    record.add_argument("--no-request-log", action="store_true", help="no line in the log for each request")
    record.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="default: info")
    server = parser.add_argument_group("server")
    server.add_argument("--max-body-mib", type=float, metavar="N", help="largest request body (default: 64)")
    server.add_argument("--drain-s", type=float, metavar="N", help="longest wait for running requests at SIGTERM")


def run(args: argparse.Namespace) -> int:
    if args.new_key is not None:
        return _print_new_key(args.new_key, args.tenant)

    import uvloop

    from stoker.gateway.config import load

    config = load(args.config, _overrides(args, os.environ))
    logs.set_up(config.log_level)
    return uvloop.run(_serve(config))


def _overrides(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the flags say, under the names that the file has."""
    from stoker.gateway.worker_option import parse_worker
    from stoker.up.state import default_state_dir

    given = {
        "listen.host": args.host,
        "listen.port": args.port,
        "listen.tls_cert": args.tls_cert,
        "listen.tls_key": args.tls_key,
        "listen.max_body_mib": args.max_body_mib,
        "listen.drain_s": args.drain_s,
        "routing.policy": args.policy,
        "routing.debug_routes": args.debug_routes or None,
        "routing.tokenize": False if args.no_tokenize else None,
        "admin_token_file": args.admin_token_file,
        "secret_file": args.secret_file,
        "tracing.otlp_endpoint": args.otlp_endpoint,
        "log_requests": False if args.no_request_log else None,
        "log_level": args.log_level,
    }
    named = {name: value for name, value in given.items() if value is not None}
    if args.worker:
        named["worker"] = [parse_worker(text) for text in args.worker]
    if args.ledger is not None:
        named["meter.path"] = args.ledger
    else:
        named["meter.default_path"] = str(default_state_dir(environment) / _DEFAULT_LEDGER)
    return named


async def _serve(config: GatewayConfig) -> int:
    from stoker.gateway.build import build_gateway

    listener = listen(config.listen.host, config.listen.port)
    with closing(listener):
        server = build_gateway(config)
        return await _run(config, server, listener)


async def _run(config: GatewayConfig, server: GatewayServer, listener: socket.socket) -> int:
    signals = Signals()
    try:
        await server.start(listener)
        _settle_memory()
        _print_welcome(config, listener.getsockname()[1], server)
        await signals.wait()
        server.begin_drain()
        if server.num_running:
            say(f"stoker: finishing {server.num_running} requests; once more to stop now", sys.stderr)
        await signals.first_of(asyncio.create_task(drained(server, config.listen.drain_s)))
        return 0
    finally:
        await server.close()


def _settle_memory() -> None:
    """What is there now stays, so the collector need not look at it again; what requests leave behind is mostly freed by
    counting, so it need not look often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS, 20, 100)


def _print_new_key(name: str, tenant: str) -> int:
    from stoker.gateway.admission.api_keys import new_key
    from stoker.gateway.config import KeySettings

    key, digest = new_key()
    KeySettings(name, digest, tenant)  # names that no config may have are refused before the key is used anywhere
    answer(f"{key}\n")
    say("That is shown once, and kept nowhere. For the file of --config:\n", sys.stderr)
    answer(f'[[key]]\nname = "{name}"\ntenant = "{tenant}"\nsha256 = "{digest}"')
    return 0


def _print_welcome(config: GatewayConfig, port: int, server: GatewayServer) -> None:
    scheme = "https" if config.listen.tls_cert else "http"
    url = f"{scheme}://{join_address(local_host(config.listen.host), port)}"
    models = server.models()
    key = " -H 'Authorization: Bearer KEY'" if config.key else ""
    workers = f"{server.num_workers} worker{'' if server.num_workers == 1 else 's'}"
    served = f"serving {', '.join(models)}" if models else "no model is known yet; see /v1/models"
    body = {"model": models[0] if models else "MODEL", "messages": [{"role": "user", "content": _QUESTION}]}
    say(
        f"""
The gateway stands before {workers}: {served}. Try:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\
  -d '{json.dumps(body)}'
""",
        sys.stdout,
    )
