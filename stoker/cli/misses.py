"""`stoker misses`: show why a gateway's workers computed prompt tokens instead of finding them in a cache, and what it cost."""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from stoker.base.address import host_of_url
from stoker.base.errors import ConfigError
from stoker.base.output import print_result
from stoker.base.paths import expand_home

if TYPE_CHECKING:
    from stoker.proto.admin_api import KeyMisses, MissList

NAME = "misses"
HELP = "show why prompt tokens were not cached, and what it cost"
DESCRIPTION = """Show why prompt tokens were computed instead of found in a cache, by API key and reason, since the gateway
started. COST is their price as uncached input. EXTRA is what of it cached input would have saved. docs/gateway.md explains the
reasons."""

_ANSWER_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--url",
        metavar="GATEWAY",
        help="The gateway, for example http://10.0.0.7:8000. Default: the one that `stoker up` runs on this machine.",
    )
    parser.add_argument(
        "--admin-token-file",
        type=expand_home,
        metavar="FILE",
        help="File with the gateway's admin token. Needed if `stoker up` did not start the gateway on this machine.",
    )
    parser.add_argument("--key", metavar="ID", help="Show only this API key.")
    parser.add_argument("--json", action="store_true", help="Print the gateway's JSON.")


def run(args: argparse.Namespace) -> int:
    from stoker.proto.admin_api import ADMIN_MISSES_PATH, decode_miss_list

    url, token = _gateway(args)
    path = ADMIN_MISSES_PATH + (f"?key={quote(args.key)}" if args.key else "")
    data = _get(url, path, token)
    print_result(data.decode() if args.json else _shown(decode_miss_list(data)))
    return 0


def _gateway(args: argparse.Namespace) -> tuple[str, str]:
    """Return the gateway's URL and its admin token."""
    from stoker.gateway.config import read_secret
    from stoker.up.state import default_state_dir, living_fleets

    token = read_secret(args.admin_token_file, "--admin-token-file")
    fleets = list(living_fleets(default_state_dir(os.environ) / "fleets"))
    if args.url is not None:
        host_of_url("--url", args.url)
        url = args.url.rstrip("/")
        fleets = [fleet for fleet in fleets if fleet.gateway_url == url]
    elif not fleets:
        raise ConfigError("no fleet runs on this machine: name a gateway with --url and --admin-token-file")
    elif len(fleets) > 1:
        urls = ", ".join(sorted(fleet.gateway_url for fleet in fleets))
        raise ConfigError(f"{len(fleets)} fleets run on this machine: choose one with --url ({urls})")
    else:
        url = fleets[0].gateway_url
    if token is None and fleets:
        token = read_secret(expand_home(fleets[0].admin_token_file), "--admin-token-file")
    if token is None:
        raise ConfigError(f"--admin-token-file is missing: only the admin token opens {url}/admin/misses")
    return url, token


def _get(url: str, path: str, token: str) -> bytes:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            hint = "; check --admin-token-file" if refused.code == 401 else ""
            raise ConfigError(f"{url}{path} answered {refused.code}{hint}") from refused
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} does not answer: {error}; give the URL of a running gateway") from error


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
