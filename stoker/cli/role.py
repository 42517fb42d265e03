"""`stoker role`: give a running worker another role."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments

NAME = "role"
HELP = "give a running worker another role"
DESCRIPTION = """Give a running worker another role: unified, prefill or decode. It takes effect with the next request, and
none fails. Requests that run on the worker finish there, or continue on other workers with --move. The role is not stored: a
worker that is started again has the role of its command line or settings file. WORKER is the name that `stoker status`
shows, such as 10.0.0.7:8001."""

_ROLES = ("unified", "prefill", "decode")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("worker", metavar="WORKER", help="The worker's name: its host and port.")
    parser.add_argument("role", metavar="ROLE", help="One of unified, prefill and decode.")
    add_gateway_arguments(parser)
    parser.add_argument("--move", action="store_true", help="Continue its running requests on other workers.")


def run(args: argparse.Namespace) -> int:
    from stoker.proto.admin_api import ADMIN_ROLE_PATH

    if args.role not in _ROLES:
        raise ConfigError(f"ROLE {args.role!r} must be one of {', '.join(_ROLES)}")
    move = "&move=1" if args.move else ""
    GatewayAdmin.of(args).post(f"{ADMIN_ROLE_PATH}?worker={quote(args.worker)}&role={args.role}{move}")
    print_result(f"{args.worker} has the role {args.role}.")
    return 0
