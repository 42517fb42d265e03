"""`stoker keys`: create, list and revoke API keys in the gateways' store, without a restart."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import socket
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags, given_flags
from stoker.base.output import print_message, print_result
from stoker.base.paths import expand_home
from stoker.base.settings import Declared, declared

if TYPE_CHECKING:
    from stoker.gateway.admission.key_store import StoredKey
    from stoker.gateway.config import GatewayConfig
    from stoker.gateway.key_settings import KeySettings
    from stoker.gateway.store.watched import WatchedStore

NAME = "keys"
HELP = "create, list and revoke the gateways' API keys"
DESCRIPTION = """Create, list and revoke API keys in the store of the gateways. Running gateways follow within 2 seconds. The store
keeps only hashes. Once a store has had a key, its gateways serve no client without one."""
CREATE_HELP = "Create a key and print it. It is shown only once."
LIST_HELP = "List the keys with their limits."
REVOKE_HELP = "Revoke a key. Its name cannot be used again."
_LIMITS = (
    "priority",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
    "budget",
    "budget_period",
    "session_budget",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from stoker.gateway.config import GatewayConfig
    from stoker.gateway.key_settings import KeySettings

    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    create = actions.add_parser("create", help=CREATE_HELP, description=CREATE_HELP)
    create.add_argument("name", metavar="NAME", help="The name of the key, which usage is billed to.")
    add_flags(create, [_with_flag(one) for one in declared(KeySettings) if one.key in ("tenant", *_LIMITS)])
    create.add_argument(
        "--print", action="store_true", help="Print the lines for the file of --config, and store nothing."
    )
    listing = actions.add_parser("list", help=LIST_HELP, description=LIST_HELP)
    listing.add_argument("--json", action="store_true", help="Print JSON.")
    revoke = actions.add_parser("revoke", help=REVOKE_HELP, description=REVOKE_HELP)
    revoke.add_argument("name", metavar="NAME", help="The name of the key.")
    for one in (create, listing, revoke):
        one.add_argument("--config", type=expand_home, metavar="FILE", help="The gateway's TOML file, for its store.")
        add_flags(one, [setting for setting in declared(GatewayConfig) if setting.key == "store"])


def run(args: argparse.Namespace) -> int:
    if args.action == "create":
        return _create(args)
    with closing(_open_store(args, must_exist=True)) as store:
        return _list(store, args.json) if args.action == "list" else _revoke(store, args.name)


def _config(args: argparse.Namespace) -> GatewayConfig:
    from stoker.gateway.config import load
    from stoker.up.state import default_state_dir

    overrides = {} if args.store is None else {"store": args.store}
    return replace(load(args.config, overrides), state_dir=default_state_dir(os.environ))


def _open_store(args: argparse.Namespace, *, must_exist: bool = False) -> WatchedStore:
    location = _config(args).store_location
    if location is None:
        raise ConfigError("store=none: there is no store for keys; give --store FILE|URL")
    if must_exist and not location.exists:
        raise ConfigError(f"store={location.name}: there is no such file; give the --store of the gateways")
    return location.open()


def _create(args: argparse.Namespace) -> int:
    from stoker.gateway.admission.api_keys import new_key
    from stoker.gateway.admission.key_store import KeyStore
    from stoker.gateway.key_settings import KeySettings

    secret, digest = new_key()
    flags = [_with_flag(one) for one in declared(KeySettings) if one.key in ("tenant", *_LIMITS)]
    limits = {one.key: value for one, value in given_flags(args, flags).items()}
    key = KeySettings(name=args.name, sha256=digest, **limits)
    if args.print:
        print_result(f"{secret}\n")
        print_message("The key is shown only once. Add these lines to the file of --config:\n", sys.stderr)
        print_result(_toml(key))
        return 0
    with closing(_open_store(args)) as store:
        KeyStore(store).create(key, _actor())
        where = store.name
    print_result(secret)
    print_message(f"The key {key.name!r} is in {where}. It is shown only once; the store has its hash.", sys.stderr)
    if (key.budget is not None or key.session_budget is not None) and not _config(args).price:
        which = "the default settings have" if args.config is None else f"{args.config} has"
        print_message(
            f"Budgets are charged by prices, and {which} none: a model without a [[price]] in the gateway's file is free.",
            sys.stderr,
        )
    return 0


def _list(store: WatchedStore, as_json: bool) -> int:
    from stoker.gateway.admission.key_store import KeyStore
    from stoker.up.terminal import table

    keys = KeyStore(store).list()
    if as_json:
        print_result(json.dumps([_as_json(one) for one in keys], indent=2))
    elif not keys:
        print_result(f"There are no keys in {store.name}.")
    else:
        rows = [
            (one.settings.name, one.settings.tenant, _day(one.created_s), _day(one.revoked_s), _limits(one.settings))
            for one in keys
        ]
        print_result(table(("NAME", "TENANT", "CREATED", "REVOKED", "LIMITS"), rows))
    return 0


def _revoke(store: WatchedStore, name: str) -> int:
    from stoker.gateway.admission.key_store import KeyStore

    KeyStore(store).revoke(name, _actor())
    print_message(f"The key {name!r} is revoked. Gateways refuse it within 2 seconds.", sys.stderr)
    return 0


def _with_flag(one: Declared) -> Declared:
    """Give a key's setting the flag of its name."""
    return replace(one, setting=replace(one.setting, flag=f"--{one.key.replace('_', '-')}"))


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _as_json(key: StoredKey) -> dict[str, object]:
    settings = {name: value for name, value in asdict(key.settings).items() if name != "sha256" and value is not None}
    return {**settings, "created_s": key.created_s, "revoked_s": key.revoked_s}


def _limits(key: KeySettings) -> str:
    given = {name: getattr(key, name) for name in _LIMITS}
    if key.budget is None:
        given.pop("budget_period")
    return " ".join(f"{name}={value}" for name, value in given.items() if value not in (None, 0)) or "none"


def _toml(key: KeySettings) -> str:
    given = {name: value for name, value in asdict(key).items() if value is not None}
    if key.budget is None:
        given.pop("budget_period")
    return "\n".join(["[[key]]", *(f"{name} = {json.dumps(value)}" for name, value in given.items())])


def _day(time_s: float | None) -> str:
    return "" if time_s is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(time_s))
