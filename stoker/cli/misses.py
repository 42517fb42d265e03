"""`stoker misses`: show why a gateway's workers computed prompt tokens instead of finding them in a cache, and what it cost."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.base.output import print_result
from stoker.cli.gateway_admin import GatewayAdmin, add_gateway_arguments

if TYPE_CHECKING:
    from stoker.proto.admin_api import KeyMisses, MissList

NAME = "misses"
HELP = "show why prompt tokens were not cached, and what it cost"
DESCRIPTION = """Show why prompt tokens were computed instead of found in a cache, by API key and reason, since the gateway
started. COST is their price as uncached input. EXTRA is what of it cached input would have saved. docs/observability.md explains
the reasons."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add_gateway_arguments(parser)
    parser.add_argument("--key", metavar="ID", help="Show only this API key.")
    parser.add_argument("--json", action="store_true", help="Print the gateway's JSON.")


def run(args: argparse.Namespace) -> int:
    from stoker.proto.admin_api import ADMIN_MISSES_PATH, decode_miss_list

    path = ADMIN_MISSES_PATH + (f"?key={quote(args.key)}" if args.key else "")
    data = GatewayAdmin.of(args).get(path)
    print_result(data.decode() if args.json else _shown(decode_miss_list(data)))
    return 0


def _shown(found: MissList) -> str:
    from stoker.up.terminal import table

    since = datetime.fromtimestamp(found.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if not found.keys:
        return f"No prompt was computed since {since}."
    names = ("REASON", "REQUESTS", "TOKENS", "SHARE", f"COST {found.currency}", f"EXTRA {found.currency}")
    parts = [f"{_title(key)}\n{table(names, _rows(key))}" for key in found.keys]
    return "\n\n".join([f"Since {since}", *parts])


def _title(key: KeyMisses) -> str:
    hit = key.cached_tokens / max(1, key.prompt_tokens)
    name = f"{key.key or 'no key'} (tenant {key.tenant})" if key.tenant else key.key or "no key"
    return f"{name}, {key.model}: {key.requests} requests, {key.prompt_tokens} prompt tokens, {hit:.1%} cached"


def _rows(key: KeyMisses) -> list[tuple[str, ...]]:
    uncached = max(1, key.prompt_tokens - key.cached_tokens)
    return [
        (
            f"{one.reason} ({one.place})" if one.place else one.reason,
            str(one.requests),
            str(one.tokens),
            f"{one.tokens / uncached:.1%}",
            one.cost,
            one.extra_cost,
        )
        for one in key.reasons
    ]
