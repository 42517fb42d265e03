"""Refuses settings of a fleet that do not work where its parts are placed. Every error names the setting."""

from __future__ import annotations

from stoker.base.errors import ConfigError
from stoker.up.config import LOCAL, RAY, START, FleetConfig, UpConfig

_STORE_URLS = ("postgresql://", "postgres://")


def check_placement(config: FleetConfig) -> None:
    """Refuse what only works on this machine, if the parts run on others, and the other way round."""
    up = config.up
    if up.placement == LOCAL:
        _refuse_ray_settings(up)
        for workers in config.workers:
            if workers.options.get("nodes", 1) > 1 and "head" not in workers.options:
                raise ConfigError(
                    f'workers.nodes={workers.options["nodes"]}: write placement = "ray" under [up], or give `head` and start '
                    "the other nodes yourself"
                )
        return
    for workers in config.workers:
        for key in ("host", "port", "head"):
            if key in workers.options:
                raise ConfigError(f'workers.{key}: with up.placement="ray", each worker gets an address where it runs')
        if workers.devices:
            raise ConfigError('workers.devices: with up.placement="ray", Ray assigns the GPUs; remove it')
    if config.store.host_gib:
        raise ConfigError(
            'store.host_gib: RAM tiers are not supported with up.placement="ray"; use disk_dir or mooncake'
        )
    if up.mooncake_resource is not None and config.store.mooncake != START:
        raise ConfigError(
            f'up.mooncake_resource={up.mooncake_resource!r} has no effect without store.mooncake="{START}": give both'
        )
    if up.gateway_placement == RAY:
        _check_ray_gateways(config)
    elif up.gateways > 1:
        raise ConfigError(
            f'up.gateways={up.gateways}: write gateway_placement = "ray" under [up], or use gateway.listen.processes on one machine'
        )
    elif up.gateway_resource is not None:
        raise ConfigError(
            f'up.gateway_resource={up.gateway_resource!r} has no effect without up.gateway_placement="ray": give both'
        )


def _refuse_ray_settings(up: UpConfig) -> None:
    if up.gateways > 1:
        raise ConfigError(
            f"up.gateways={up.gateways}: one machine needs only one; use gateway.listen.processes to give it more cores, or write "
            'placement = "ray" and gateway_placement = "ray" under [up]'
        )
    given = {
        "gateway_placement": up.gateway_placement if up.gateway_placement != LOCAL else None,
        "gateway_resource": up.gateway_resource,
        "mooncake_resource": up.mooncake_resource,
    }
    for key, value in given.items():
        if value is not None:
            raise ConfigError(f'up.{key}={value!r} has no effect without up.placement="ray": give both')


def _check_ray_gateways(config: FleetConfig) -> None:
    """Refuse settings of the gateway that do not work if Ray chooses its machine. The gateway checks the rest of its table."""
    listen, store = config.gateway.get("listen", {}), config.gateway.get("store")
    host = listen.get("host") if isinstance(listen, dict) else None
    if host not in (None, "0.0.0.0", "::"):
        raise ConfigError(
            f'gateway.listen.host={host}: with up.gateway_placement="ray", each gateway listens on the address of its node; '
            "remove it, or give 0.0.0.0"
        )
    if not isinstance(store, str) or not (store == "none" or store.startswith(_STORE_URLS)):
        # A gateway that finds no keys serves every client, and so would one that was moved to a node without this file.
        found = "a file" if store is None else repr(store)
        raise ConfigError(
            f'gateway.store is {found}: with up.gateway_placement="ray", a gateway may move to a node that does not have it; write '
            'store = "postgresql://…", or store = "none" to keep no keys, usage or files'
        )
