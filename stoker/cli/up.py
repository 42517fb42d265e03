"""`stoker up`: a whole fleet on this machine, supervised, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.paths import written_path
from stoker.base.speech import answer
from stoker.base.tables import read_tables
from stoker.cli import serve

if TYPE_CHECKING:
    from stoker.up.config import FleetConfig, ServeOption
    from stoker.up.machine import Machine
    from stoker.up.plan import FleetPlan, Listening, Model, Place
    from stoker.up.ports import Ports
    from stoker.up.state import RunDir
    from stoker.up.terminal import Terminal

NAME = "up"
HELP = "a whole fleet: gateway, workers and KV store, started, watched and stopped together"
DESCRIPTION = """Start a fleet on this machine and keep it running: the parts that a file names, or, without one, a gateway,
one prefill and one decode worker with SmolLM2-135M-Instruct and a KV store in RAM and on disk. A part that ends is started
again. Ctrl-C stops everything in order, a second one at once. docs/operations.md says what a file may hold."""

ROLES = ("prefill", "decode", "unified")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "file", nargs="?", type=written_path, metavar="FLEET.TOML", help="what to start (default: see above)"
    )
    parser.add_argument("--check", action="store_true", help="look through the file, say what would start, and end")
    parser.add_argument("--host", help="address the gateway listens on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, help="its port; 0 takes a free one (default: 8000)")
    parser.add_argument("--log-dir", type=written_path, help="where the parts' logs go (default: in the state folder)")
    parser.add_argument(
        "--cache-dir", type=written_path, help="where models and KV are kept (default: ~/.cache/stoker)"
    )
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    without = parser.add_argument_group("without a file")
    without.add_argument("--model", metavar="MODEL", help="as for stoker serve")
    for role in ROLES:
        without.add_argument(f"--{role}", type=int, metavar="N", help=f"{role} workers")


def run(args: argparse.Namespace) -> int:
    from stoker.up.ports import ImaginedPorts, KeptPorts
    from stoker.up.terminal import Terminal

    if args.check:
        return _check(args, ImaginedPorts())
    ports = KeptPorts()
    try:
        return _up(args, ports, Terminal())
    finally:
        ports.close()


def serve_options() -> dict[str, ServeOption]:
    """All that `stoker serve` takes, by the names that a file has for it."""
    from stoker.up.config import ServeOption

    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    options = {}
    for action in parser._actions:  # argparse has no other way to ask
        if action.option_strings:
            switch = action.nargs == 0
            kind = bool if switch else action.type if isinstance(action.type, type) else str
            repeatable = isinstance(action, argparse._AppendAction)
            choices = tuple(action.choices or ())
            options[action.dest] = ServeOption(action.option_strings[-1], kind, choices, repeatable)
    return options


# ---- from arguments and a file to a plan


def _config(args: argparse.Namespace, machine: Machine, cache_dir: Path) -> FleetConfig:
    from stoker.up.config import fleet_config, merged
    from stoker.up.default import default_table

    counts = {role: getattr(args, role) for role in ROLES if getattr(args, role) is not None}
    if args.file is not None:
        if counts or args.model is not None:
            flag = next(iter(counts), "model")
            raise ConfigError(
                f"--{flag} is for a fleet without a file; with one, it stands in [[workers]] of {args.file}"
            )
        if not os.path.exists(args.file) and args.file.suffix != ".toml":
            raise ConfigError(f"{args.file}: there is no such file; a model is named with --model {args.file}")
        table = read_tables(args.file)
    else:
        for role, count in counts.items():
            if count < 0:
                raise ConfigError(f"--{role} {count}: it must not be below zero")
        table = default_table(counts or {"prefill": 1, "decode": 1}, args.model, machine, cache_dir)
    try:
        config = fleet_config(merged(table, _overrides(args)), serve_options())
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error.message}" if args.file else error.message) from error
    return config


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    listen = {"host": args.host, "port": args.port}
    up = {"log_dir": args.log_dir, "cache_dir": args.cache_dir, "offline": args.offline or None}
    given = {
        "gateway": {"listen": {name: value for name, value in listen.items() if value is not None}},
        "up": {
            name: str(value) if isinstance(value, Path) else value for name, value in up.items() if value is not None
        },
    }
    return {name: table for name, table in given.items() if table not in ({}, {"listen": {}})}


def _machine(cache_dir: Path) -> Machine:
    from stoker.up.machine import Machine, visible_cards

    machine = Machine.look(cache_dir)
    return replace(machine, card_bytes=visible_cards(machine.card_bytes, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _listening(table: Mapping[str, Any]) -> Listening:
    """The gateway's own reader has the last word on its table."""
    from stoker.gateway.config import load
    from stoker.up.plan import Listening

    try:
        config = load(None, table)
    except ConfigError as error:
        raise ConfigError(f"[gateway] {error.message}") from error
    return Listening(config.listen.host, config.listen.port, config.listen.tls_cert is not None, config.listen.drain_s)


def _plan(
    config: FleetConfig,
    machine: Machine,
    models: Mapping[str | None, Model],
    place: Place,
    ports: Ports,
    gateway: Listening,
) -> FleetPlan:
    from stoker.up.config import START
    from stoker.up.plan import Planner

    master = _master_command(config.store.ssd_dir is not None) if config.store.mooncake == START else []
    return Planner(config, serve_options(), machine, models, place, ports, master).plan(gateway)


def _master_command(ssd: bool) -> list[str]:
    """But for its ports."""
    from stoker.kv.mooncake.master import program

    command = [str(program()), "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--logtostderr=true"]
    command += ["--default_kv_lease_ttl=2000", "--client_ttl=10"]
    return [*command, "--enable_offload=true", "--offload_on_evict=false"] if ssd else command


def _unresolved(config: FleetConfig) -> dict[str | None, Model]:
    from stoker.checkpoint.embedded import NAME as EMBEDDED
    from stoker.up.plan import Model

    return {one.model: Model(one.model or EMBEDDED, one.model or EMBEDDED) for one in config.workers}


def _check(args: argparse.Namespace, ports: Ports) -> int:
    from stoker.checkpoint.source import default_cache_dir
    from stoker.up.plan import Place
    from stoker.up.terminal import table

    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    machine = _machine(cache_dir)
    config = _config(args, machine, cache_dir)
    gateway = _listening(config.gateway)
    ports.take(gateway.host, gateway.port)
    run_dir = Path("RUN")
    place = Place(run_dir, run_dir / "secret", run_dir / "admin-token")
    plan = _plan(config, machine, _unresolved(config), place, ports, gateway)
    answer(table(("PART", "ROLE", "ADDRESS"), [(part.name, part.role, part.address) for part in plan.parts]))
    for part in plan.parts:
        changes = "".join(f"{name}={shlex.quote(value)} " for name, value in part.env.items())
        answer(f"\n{part.name}:\n  {changes}{shlex.join(part.command)}")
    return 0


# ---- from a plan to a running fleet


def _up(args: argparse.Namespace, ports: Ports, terminal: Terminal) -> int:
    from stoker.checkpoint.source import default_cache_dir
    from stoker.gateway.config import read_secret
    from stoker.up import toml
    from stoker.up.plan import Place
    from stoker.up.run import Fleet
    from stoker.up.state import default_state_dir

    state_dir = default_state_dir(os.environ)
    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    _tidy_up(state_dir / "fleets")
    machine = _machine(cache_dir)
    config = _config(args, machine, cache_dir)
    gateway, run_dir = _settle(_listening(config.gateway), ports, state_dir / "fleets")
    try:
        place = Place(
            run_dir.path,
            _file_or_new(config.gateway.get("secret_file"), run_dir, "secret"),
            _file_or_new(config.gateway.get("admin_token_file"), run_dir, "admin-token"),
        )
        models = _resolve(config, config.up.cache_dir or cache_dir, terminal)
        plan = _plan(config, machine, models, place, ports, gateway)
        run_dir.write(place.gateway_file.name, toml.dumps(plan.gateway_table))
        log_dir = config.up.log_dir or state_dir / "logs" / str(gateway.port)
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{log_dir}: {error.strerror}; choose another --log-dir") from error
        fleet = Fleet(
            plan=plan,
            up=config.up,
            run_dir=run_dir,
            log_dir=log_dir.absolute(),
            admin_token=read_secret(place.admin_token_file, "admin_token_file") or "",
            admin_token_file=place.admin_token_file.absolute(),
            environment=os.environ,
            terminal=terminal,
            on_stopped=lambda: _remove_store(plan.store_name),
        )
        return asyncio.run(fleet.run())
    finally:
        run_dir.remove()


def _settle(gateway: Listening, ports: Ports, fleets_dir: Path) -> tuple[Listening, RunDir]:
    """The gateway's port, and the place that has its name from it."""
    from stoker.up.state import open_run_dir

    if not gateway.port:
        gateway = replace(gateway, port=ports.take(gateway.host, 0))
        return gateway, open_run_dir(fleets_dir, gateway.port)
    run_dir = open_run_dir(fleets_dir, gateway.port)  # first: if a fleet has the port, that is what should be said
    try:
        ports.take(gateway.host, gateway.port)
    except ConfigError:
        run_dir.remove()
        raise
    return gateway, run_dir


def _file_or_new(named: str | None, run_dir: RunDir, name: str) -> Path:
    return written_path(named) if named else run_dir.write_secret(name)


def _resolve(config: FleetConfig, cache_dir: Path, terminal: Terminal) -> dict[str | None, Model]:
    """Here and once: workers that start at the same time would all fetch the same files."""
    from stoker.checkpoint.source import resolve_model
    from stoker.up.plan import Model

    models = {}
    for model in dict.fromkeys(one.model for one in config.workers):
        found = resolve_model(model, cache_dir, terminal.progress, config.up.offline)
        weight_bytes = sum(file.stat().st_size for file in found.path.glob("*.safetensors"))
        models[model] = Model(str(found.path), found.name, weight_bytes)
    return models


def _tidy_up(fleets_dir: Path) -> None:
    """After fleets that were killed: what the system does not take back by itself."""
    from stoker.up.state import abandoned_fleets

    for run_dir in abandoned_fleets(fleets_dir):
        if run_dir.left is not None:
            _remove_store(run_dir.left.store_name)
        run_dir.remove()


def _remove_store(name: str | None) -> None:
    if name is not None:
        from stoker.kv.store.tiers.host.host_memory import remove_host_store

        remove_host_store(name)
