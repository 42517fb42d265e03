"""Flags of `stoker serve` for KV beyond the engine's own memory: the tiers below it, and hand-offs between workers."""

from __future__ import annotations

import argparse
from pathlib import Path

from stoker.base.config import HandoffSettings, StoreSettings
from stoker.base.errors import ConfigError
from stoker.base.paths import written_path

ROLES = ("unified", "prefill", "decode")

# A flag that means nothing without another one: a typing error, or a tier that nobody gets.
_NEEDS = {
    "kv_store": "kv_host_gib",
    "kv_disk_gib": "kv_disk",
    "kv_disk_key_file": "kv_disk",
    "kv_mooncake_segment_gib": "kv_mooncake",
    "kv_mooncake_protocol": "kv_mooncake",
    "kv_mooncake_ssd": "kv_mooncake",
}
_ABOVE_ZERO = ("kv_host_gib", "kv_disk_gib", "kv_mooncake_segment_gib", "kv_lease_s")


def add_kv_arguments(parser: argparse.ArgumentParser) -> None:
    store, handoff = StoreSettings(), HandoffSettings()
    group = parser.add_argument_group(
        "KV store",
        "Where KV goes that the engine's own memory has no room for. It is found again by any later request.",
    )
    group.add_argument("--kv-host-gib", type=float, metavar="GIB", help="keep KV in so much RAM (default: none)")
    group.add_argument(
        "--kv-store",
        metavar="NAME",
        help="share that RAM with all workers of this machine that give the same name; it outlives them",
    )
    group.add_argument(
        "--kv-disk",
        type=written_path,
        metavar="DIR",
        help="keep KV in files there; workers with the same folder share them",
    )
    group.add_argument(
        "--kv-disk-gib", type=float, metavar="GIB", help=f"so much of the disk (default: {store.disk_gib:g})"
    )
    group.add_argument(
        "--kv-disk-key-file",
        type=written_path,
        metavar="FILE",
        help="32 bytes: files in --kv-disk are encrypted with this key",
    )
    group.add_argument("--kv-mooncake", metavar="HOST:PORT", help="use the Mooncake store with its master there")
    group.add_argument(
        "--kv-mooncake-segment-gib", type=float, metavar="GIB", help="give the Mooncake store so much of this RAM"
    )
    group.add_argument(
        "--kv-mooncake-protocol",
        metavar="NAME",
        help=f"how Mooncake moves bytes: tcp or rdma (default: {store.mooncake_protocol})",
    )
    group.add_argument(
        "--kv-mooncake-ssd", type=written_path, metavar="DIR", help="where Mooncake may put what its RAM cannot hold"
    )
    group = parser.add_argument_group(
        "KV hand-off", "How a prefill worker's KV reaches a decode worker. The secret is that of --secret-file."
    )
    group.add_argument(
        "--kv-port",
        type=int,
        metavar="N",
        help="port where other workers pull KV; 0 takes a free one (default: 0 for --role prefill, none for other roles)",
    )
    group.add_argument(
        "--kv-transports",
        metavar="NAMES",
        help=f"ways to move KV, best first (default: {','.join(handoff.transports)})",
    )
    group.add_argument(
        "--kv-lease-s",
        type=float,
        metavar="S",
        help=f"so long KV is kept for a worker that does not come (default: {handoff.lease_s:g})",
    )


def check_kv_arguments(args: argparse.Namespace) -> None:
    for name, needed in _NEEDS.items():
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise ConfigError(f"{_flag(name)} needs {_flag(needed)}")
    for name in _ABOVE_ZERO:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{_flag(name)} {value:g}: it must be above zero")
    if args.kv_port is not None and not 0 <= args.kv_port <= 65535:
        raise ConfigError(f"--kv-port {args.kv_port}: a port is 0 to 65535")
    if args.kv_transports is not None and not all(args.kv_transports.split(",")):
        raise ConfigError(f"--kv-transports {args.kv_transports!r}: names with commas between them are expected")
    if args.kv_mooncake is not None:
        host, _, port = args.kv_mooncake.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--kv-mooncake {args.kv_mooncake}: HOST:PORT is expected")


def store_settings(args: argparse.Namespace, host: str) -> StoreSettings:
    """`host`: under what name other machines reach this one."""
    default = StoreSettings()
    return StoreSettings(
        name=args.kv_store,
        host_gib=args.kv_host_gib or default.host_gib,
        disk_dir=_text(args.kv_disk),
        disk_gib=args.kv_disk_gib or default.disk_gib,
        disk_key_file=_text(args.kv_disk_key_file),
        mooncake_master=args.kv_mooncake,
        mooncake_host=host,
        mooncake_segment_gib=args.kv_mooncake_segment_gib or default.mooncake_segment_gib,
        mooncake_protocol=args.kv_mooncake_protocol or default.mooncake_protocol,
        mooncake_ssd_dir=_text(args.kv_mooncake_ssd),
    )


def handoff_settings(args: argparse.Namespace, host: str, secret: str | None) -> HandoffSettings:
    default = HandoffSettings()
    names = default.transports
    if args.kv_transports is not None:
        names = tuple(args.kv_transports.split(","))
    return HandoffSettings(
        host=host,
        port=args.kv_port or 0,
        transports=names,
        secret=secret,
        lease_s=args.kv_lease_s or default.lease_s,
        serves=args.role == "prefill" or args.kv_port is not None,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
