"""`stoker status`: show the fleets on this machine, or one gateway: processes, health, load, KV tiers, restarts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from stoker.base.address import host_of_url
from stoker.base.output import print_result
from stoker.base.paths import expand_home

NAME = "status"
HELP = "show what runs: processes, health, load, KV tiers, restarts"
DESCRIPTION = """Show the fleets that `stoker up` runs on this machine, or one gateway with --url. Exit code 0: everything is ready.
1: something is not ready, or the gateway does not answer. 2: an error. 3: no fleet runs on this machine."""

EXIT_NOT_READY = 1
EXIT_NOTHING = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--url", metavar="GATEWAY", help="Show only this gateway, for example http://10.0.0.7:8000.")
    parser.add_argument(
        "--admin-token-file",
        type=expand_home,
        metavar="FILE",
        help="File with the gateway's admin token. Needed with --url if `stoker up` did not start it on this machine.",
    )
    parser.add_argument(
        "--secret-file",
        type=expand_home,
        metavar="FILE",
        help="File with the fleet's secret. Needed with --url to show the KV tiers of workers that have one.",
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON list of fleets.")


def run(args: argparse.Namespace) -> int:
    from stoker.base.fleet_key import read_fleet_secret
    from stoker.gateway.config import read_secret
    from stoker.up.state import default_state_dir, living_fleets
    from stoker.up.status import fleet_status, format_status

    token = read_secret(args.admin_token_file, "--admin-token-file")
    secret = read_fleet_secret(args.secret_file, "--secret-file")
    fleets = list(living_fleets(default_state_dir(os.environ) / "fleets"))
    if args.url is not None:
        host_of_url("--url", args.url)
        url = args.url.rstrip("/")
        ours = next((fleet for fleet in fleets if fleet.has_gateway(url)), None)
        token = token or (_token(ours.admin_token_file) if ours else None)
        secret = secret or (_token(ours.secret_file) if ours else None)
        statuses = [asyncio.run(fleet_status(url, token, ours, secret))]
    else:
        statuses = [
            asyncio.run(
                fleet_status(
                    one.gateway_url, token or _token(one.admin_token_file), one, secret or _token(one.secret_file)
                )
            )
            for one in fleets
        ]
    if args.json:
        print_result(f"[{','.join(status.as_json().decode() for status in statuses)}]")
    elif silent := [status for status in statuses if status.reason and not status.parts]:
        # Nothing is known but the reason: an empty table would only hide it.
        print("\n".join(f"stoker: {status.reason}" for status in silent), file=sys.stderr)
    elif statuses:
        print_result("\n\n".join(map(format_status, statuses)))
    if not statuses:
        print(
            "stoker: no fleet runs on this machine. Start one with `stoker up`, or show a gateway elsewhere with --url",
            file=sys.stderr,
        )
        return EXIT_NOTHING
    return 0 if all(status.healthy for status in statuses) else EXIT_NOT_READY


def _token(path: str) -> str | None:
    """Return the token in a file, or None if it cannot be read: the state that `stoker up` wrote can still be shown."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
