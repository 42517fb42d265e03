"""`stoker status`: the fleets of this machine, or any gateway: parts, roles, health, load, KV tiers, restarts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from stoker.base.address import host_of_url
from stoker.base.paths import written_path
from stoker.base.speech import answer

NAME = "status"
HELP = "show what runs: parts, health, load, KV tiers, restarts"
DESCRIPTION = """Show the fleets that `stoker up` runs on this machine, or a gateway anywhere. Exit code 0: all of it is ready;
1: some of it is not; 3: nothing runs; 2: an error."""

EXIT_NOT_READY = 1
EXIT_NOTHING = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--url", metavar="GATEWAY", help="this gateway only, such as http://10.0.0.7:8000")
    parser.add_argument(
        "--admin-token-file", type=written_path, metavar="FILE", help="its admin token, where --url is not ours"
    )
    parser.add_argument("--json", action="store_true", help="for programs: a list of fleets")


def run(args: argparse.Namespace) -> int:
    from stoker.gateway.config import read_secret
    from stoker.up.state import default_state_dir, living_fleets
    from stoker.up.status import look, shown

    token = read_secret(args.admin_token_file, "--admin-token-file")
    fleets = list(living_fleets(default_state_dir(os.environ) / "fleets"))
    if args.url is not None:
        host_of_url("--url", args.url)
        url = args.url.rstrip("/")
        ours = next((fleet for fleet in fleets if fleet.gateway_url == url), None)
        token = token or (_token(ours.admin_token_file) if ours else None)
        statuses = [asyncio.run(look(url, token, ours))]
    else:
        statuses = [asyncio.run(look(one.gateway_url, token or _token(one.admin_token_file), one)) for one in fleets]
    if args.json:
        answer(f"[{','.join(status.as_json().decode() for status in statuses)}]")
    elif statuses:
        answer("\n\n".join(map(shown, statuses)))
    if not statuses:
        print("stoker: no fleet runs here. `stoker up` starts one; --url GATEWAY asks one elsewhere", file=sys.stderr)
        return EXIT_NOTHING
    return 0 if all(status.healthy for status in statuses) else EXIT_NOT_READY


def _token(path: str) -> str | None:
    """None if it cannot be read: what `stoker up` wrote down is still worth showing."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return None
