"""`stoker kv`: list and free the RAM of named KV stores, which stays when their workers exit or are killed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from stoker.base.errors import ConfigError
from stoker.base.output import print_result

if TYPE_CHECKING:
    from stoker.kv.store.tiers.host.host_memory import HostStore

NAME = "kv"
HELP = "list and free the RAM of named KV stores"
DESCRIPTION = """List and free the shared memory (/dev/shm) of named KV stores: the host tier of `stoker serve --kv-store NAME` and
of `stoker up`. Such memory stays when its workers exit, so that the next ones find their KV there. `stoker up` frees its own
store when it stops; only a `stoker up` that is killed leaves it behind, until the next `stoker up`."""
LIST_HELP = "List the stores of this user, with their size and whether a process uses them."
FREE_HELP = "Free the memory of a store."

_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    actions.add_parser("list", help=LIST_HELP, description=LIST_HELP)
    free = actions.add_parser("free", help=FREE_HELP, description=FREE_HELP)
    free.add_argument("name", metavar="NAME", help="The name of the store, as `stoker kv list` shows it.")
    free.add_argument(
        "--force",
        action="store_true",
        help="Free it even if a process uses it. That process keeps its memory until it exits; new ones start with an "
        "empty store.",
    )


def run(args: argparse.Namespace) -> int:
    return _list() if args.action == "list" else _free(args.name, args.force)


def _list() -> int:
    from stoker.kv.store.tiers.host.host_memory import host_stores
    from stoker.up.terminal import table

    stores = host_stores()
    if not stores:
        print_result("There are no named KV stores.")
        return 0
    rows = [(one.name, _size(one), "in use" if one.in_use else "unused", str(one.path)) for one in stores]
    print_result(table(("NAME", "RAM", "STATE", "FILE"), rows))
    return 0


def _free(name: str, force: bool) -> int:
    from stoker.kv.store.tiers.host.host_memory import host_stores, remove_host_store

    stores = [one for one in host_stores() if one.name == name]
    if not stores:
        known = ", ".join(sorted({one.name for one in host_stores()})) or "none"
        raise ConfigError(f"there is no KV store called {name!r}; the existing stores are: {known}")
    if any(one.in_use for one in stores) and not force:
        raise ConfigError(f"KV store {name!r} is in use: stop its workers first, or give --force")
    remove_host_store(name)
    freed = " and ".join(_size(one) for one in stores)
    print_result(f"Freed {freed} of RAM.")
    return 0


def _size(store: HostStore) -> str:
    return f"{store.used_bytes / _GIB:.2f} GiB"
