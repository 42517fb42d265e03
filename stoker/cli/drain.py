"""`stoker drain`: take a worker out of service, and move its running requests to other workers."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments

if TYPE_CHECKING:
    from stoker.proto.admin_api import WorkerStatus

NAME = "drain"
HELP = "take a worker out of service"
DESCRIPTION = """Take a worker out of service. It gets no new requests, and the command waits until its running requests have
ended. With --move they continue on other workers within seconds, with their KV; clients notice nothing. WORKER is the name that
`stoker status` shows, such as 10.0.0.7:8001. The worker's process keeps running: stop it then, or bring it back with --undo."""

_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("worker", metavar="WORKER", help="The worker's name: its host and port.")
    add_gateway_arguments(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--move", action="store_true", help="Continue its running requests on other workers.")
    what.add_argument("--undo", action="store_true", help="Give it requests again.")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="Longest wait for its requests. The worker stays drained. Default: 3600; 0 does not wait.",
    )


def run(args: argparse.Namespace) -> int:
    from stoker.proto.admin_api import ADMIN_DRAIN_PATH, ADMIN_UNDRAIN_PATH

    admin, began_s = GatewayAdmin.of(args), time.monotonic()
    query = f"?worker={quote(args.worker)}"
    if args.undo:
        admin.post(ADMIN_UNDRAIN_PATH + query)
        print_result(f"{args.worker} gets requests again.")
        return 0
    admin.post(ADMIN_DRAIN_PATH + query + ("&move=1" if args.move else ""))
    num_running = _wait_empty(admin, args.worker, began_s + args.wait_s)
    seconds = time.monotonic() - began_s
    if num_running:
        print_result(f"{args.worker} is drained; {num_running} requests still run there after {seconds:.1f} s.")
        return 1
    print_result(f"{args.worker} is drained and runs no request, after {seconds:.1f} s.")
    return 0


def _wait_empty(admin: GatewayAdmin, worker: str, until_s: float) -> int:
    """Return how many requests still run on the worker when it is empty or the time is over."""
    while True:
        status = find_worker(admin, worker)
        num_running = 0 if status is None else status.reserved.requests
        if not num_running or time.monotonic() >= until_s:
            return num_running
        time.sleep(_POLL_S)


def find_worker(admin: GatewayAdmin, worker: str) -> WorkerStatus | None:
    """Return what the gateway knows about a worker, or None if it has left."""
    from stoker.proto.admin_api import ADMIN_FLEET_PATH, decode_worker_list

    try:
        workers = decode_worker_list(admin.get(ADMIN_FLEET_PATH)).workers
    except ValueError as error:
        raise ConfigError(f"{admin.url}{ADMIN_FLEET_PATH} is not a list of workers: {error}") from error
    return next((one for one in workers if one.worker == worker), None)
