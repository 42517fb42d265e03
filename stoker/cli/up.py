"""`stoker up`: starts and supervises a whole fleet on this machine, in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.base.errors import ConfigError
from stoker.base.flags import add_flags, as_table, given_flags, refuse_flag
from stoker.base.output import print_result
from stoker.base.paths import expand_home
from stoker.base.settings import Declared, declared, from_table, merged, read_toml
from stoker.cli.serve_settings import ROLES, ServeSettings, serve_keys

if TYPE_CHECKING:
    from stoker.up.config import FleetConfig
    from stoker.up.default import DefaultFleetSettings
    from stoker.up.machine import Machine
    from stoker.up.placement.contract import Placement
    from stoker.up.plan import FleetModel, FleetPaths, FleetPlan, Listening
    from stoker.up.ports import Ports
    from stoker.up.state import RunDir
    from stoker.up.terminal import Terminal

NAME = "up"
HELP = "start a whole system: gateway, workers and KV store"
DESCRIPTION = """Start a fleet on this machine and keep it running. FLEET.TOML describes the fleet. Without a file, it is a
gateway, a prefill worker, a decode worker and a KV store in RAM and on disk, which together use at most a quarter of the
machine's RAM. If that is too little for two workers, one worker does both. MODEL is the model to serve. A process that exits
is restarted. Ctrl-C stops everything in order, a second Ctrl-C at once. docs/operations.md describes the file, and
docs/settings.md lists all settings."""

_LISTEN = ("listen.host", "listen.port")  # the gateway's settings that are flags of `stoker up` too
_WRITTEN = ("recording.file",)  # settings of the gateway that name files which it writes
_DEFAULT_MODEL_BYTES = 610 << 20  # the default model's weights in float32, and its embedding once more for the head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from stoker.gateway.config import GatewayConfig
    from stoker.up.config import UpConfig
    from stoker.up.default import DefaultFleetSettings

    parser.description = DESCRIPTION
    parser.add_argument(
        "target",
        nargs="?",
        metavar="FLEET.TOML|MODEL",
        help="A fleet file, or a model as for --model. Default: the default fleet with SmolLM2-135M-Instruct.",
    )
    parser.add_argument("--check", action="store_true", help="Check the settings, print what would start, and exit.")
    listen = [one for one in declared(GatewayConfig) if one.key in _LISTEN]
    add_flags(parser.add_argument_group("gateway"), listen)
    add_flags(parser.add_argument_group("files"), declared(UpConfig))
    add_flags(parser.add_argument_group("without a fleet file"), declared(DefaultFleetSettings))
    own = {*listen, *declared(UpConfig), *declared(DefaultFleetSettings)}
    for flag, message in _elsewhere({one.setting.flag for one in own}, declared(GatewayConfig)):
        refuse_flag(parser, flag, message)


def _elsewhere(own: set[str | None], gateway: tuple[Declared, ...]) -> Iterator[tuple[str, str]]:
    """Yield the flags of `stoker serve` and `stoker gateway` that `stoker up` lacks, and where to write the setting instead."""
    places: dict[str, list[str]] = {}
    for one in declared(ServeSettings):
        places.setdefault(one.flag, []).append(f"`{one.flag_name} = …` under [[workers]]")
    for one in gateway:
        if one.setting.flag is not None:
            places.setdefault(one.flag, []).append(f"`{one.key} = …` under [gateway]")
    for flag, where in places.items():
        if flag not in own:
            yield (
                flag,
                f"`stoker up` has no {flag}: write {' or '.join(where)} in a fleet file, and run `stoker up FILE`",
            )


def run(args: argparse.Namespace) -> int:
    from stoker.up.ports import PlannedPorts, ReservedPorts
    from stoker.up.terminal import Terminal

    if args.check:
        return _check(args, PlannedPorts())
    ports = ReservedPorts()
    try:
        return _up(args, ports, Terminal())
    finally:
        ports.close()


# ---- from arguments and a file to a plan


def _config(args: argparse.Namespace, machine: Machine, cache_dir: Path) -> FleetConfig:
    from stoker.up.default import DefaultFleetSettings
    from stoker.up.fleet_table import fleet_config

    given = given_flags(args, declared(DefaultFleetSettings))
    file = _fleet_file(args.target)
    if file is not None:
        if given:
            raise ConfigError(_with_a_file(*next(iter(given.items())), file))
        table = read_toml(file)
    else:
        settings = from_table(DefaultFleetSettings, as_table(given))
        if args.target is not None:
            if settings.model is not None:
                raise ConfigError(f"two models are given, {args.target} and --model {settings.model}: give one")
            settings = replace(settings, model=args.target)
        table = _default_table(settings, machine, cache_dir)
    try:
        return fleet_config(merged(table, _overrides(args)), serve_keys())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}" if file else error.message) from error


def _with_a_file(one: Declared, value: Any, file: Path) -> str:
    text = f'role = "{one.key}"` and `count = {value}' if one.key in ROLES else f"{one.key} = …"
    return f"{one.flag} is only for a fleet without a file: write `{text}` under [[workers]] of {file}"


def _fleet_file(target: str | None) -> Path | None:
    """Return the fleet file that `target` names, or None if it is a model: a folder, a .gguf file or a hub id."""
    if target is None:
        return None
    path = expand_home(target)
    if path.suffix == ".toml" or (os.path.isfile(path) and path.suffix != ".gguf"):
        return path
    if os.path.exists(path):
        return None
    if target.startswith((".", "/", "~")) or target.count("/") != 1 or path.suffix == ".gguf":
        raise ConfigError(
            f"{target}: there is no such file or folder. Give a fleet file (.toml), a model folder, a .gguf file, or a "
            "Hugging Face id such as org/name"
        )
    return None


def _default_table(settings: DefaultFleetSettings, machine: Machine, cache_dir: Path) -> dict[str, Any]:
    from stoker.up.default import default_counts, default_table

    if settings.model is None:
        weight_bytes = _DEFAULT_MODEL_BYTES
    else:
        weight_bytes = _cpu_bytes(expand_home(settings.model))
    counts = settings.counts or default_counts(machine, weight_bytes)
    return default_table(counts, machine, cache_dir, settings.model, settings.served_name, weight_bytes)


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    from stoker.gateway.config import GatewayConfig
    from stoker.up.config import UpConfig

    listen = given_flags(args, [one for one in declared(GatewayConfig) if one.key in _LISTEN])
    tables = {"gateway": as_table(listen), "up": as_table(given_flags(args, declared(UpConfig)))}
    return {name: table for name, table in tables.items() if table}


def _machine(cache_dir: Path) -> Machine:
    from stoker.up.machine import Machine, visible_gpus

    machine = Machine.detect(cache_dir)
    return replace(machine, gpu_bytes=visible_gpus(machine.gpu_bytes, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _listening(table: Mapping[str, Any]) -> Listening:
    """Check the [gateway] table as the gateway does, and return where it listens."""
    from stoker.gateway.config import load
    from stoker.up.plan import Listening

    try:
        config = load(None, table)
    except ConfigError as error:
        raise ConfigError(f"[gateway] {error.message}") from error
    listen = config.listen
    stop_s = listen.drain_notice_s + listen.drain_s
    return Listening(listen.host, listen.port, listen.tls_cert is not None, stop_s)


def _plan(
    config: FleetConfig,
    machine: Machine,
    models: Mapping[str | None, FleetModel],
    paths: FleetPaths,
    ports: Ports,
    gateway: Listening,
    placement: Placement,
) -> FleetPlan:
    from stoker.up.config import START
    from stoker.up.plan import Planner

    planner = Planner(config, serve_keys(), machine, models, paths, ports, reach=placement.reach)
    planner.gateway_files = _gateway_files()
    if config.store.mooncake == START:
        planner.master = _master_command(config)
    return planner.plan(gateway)


def _gateway_files() -> list[tuple[str, ...]]:
    """Return the settings of the gateway that name files which it reads."""
    from stoker.gateway.config import GatewayConfig
    from stoker.gateway.worker_option import WorkerSettings

    in_tables = [one.path for one in declared(GatewayConfig) if one.names_path and one.key not in _WRITTEN]
    of_workers = [("worker", *one.path) for one in declared(WorkerSettings) if one.names_path]
    return [*in_tables, *of_workers]


def _master_command(config: FleetConfig) -> list[str]:
    """Return the command of a Mooncake master, without its addresses."""
    from stoker.kv.mooncake.master import program
    from stoker.up.config import RAY
    from stoker.up.part import PYTHON

    # Another machine may have the program at another path.
    master = [PYTHON, "-m", "stoker.kv.mooncake.master"] if config.up.placement == RAY else [str(program())]
    command = [*master, "--logtostderr=true", "--default_kv_lease_ttl=2000", "--client_ttl=10"]
    ssd = [] if config.store.ssd_dir is None else ["--enable_offload=true", "--offload_on_evict=false"]
    return [*command, *ssd]


def _unresolved(config: FleetConfig) -> dict[str | None, FleetModel]:
    """Return the models as they are named, for --check, which downloads nothing."""
    from stoker.checkpoint.embedded import NAME as EMBEDDED
    from stoker.up.plan import FleetModel

    models = {}
    for model in {one.model for one in config.workers}:
        cpu_bytes = _DEFAULT_MODEL_BYTES if model is None else _cpu_bytes(expand_home(model))
        models[model] = FleetModel(model or EMBEDDED, model or EMBEDDED, cpu_bytes=cpu_bytes)
    return models


def _check(args: argparse.Namespace, ports: Ports) -> int:
    from stoker.checkpoint.source import default_cache_dir
    from stoker.up.config import LOCAL
    from stoker.up.footprint import footprint_words
    from stoker.up.pair_numerics import pair_words
    from stoker.up.placement.local import LocalPlacement
    from stoker.up.plan import FleetPaths
    from stoker.up.terminal import table

    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    machine = _machine(cache_dir)
    config = _config(args, machine, cache_dir)
    gateway = _listening(config.gateway)
    if config.up.gateway_placement == LOCAL:
        ports.take(gateway.host, gateway.port)
    run_dir = Path("RUN")
    paths = FleetPaths(run_dir, run_dir / "secret", run_dir / "admin-token")
    models = _unresolved(config)
    plan = _plan(config, machine, models, paths, ports, gateway, LocalPlacement(os.environ))
    for line in (*footprint_words(config, models, machine), *pair_words(config, machine)):
        print_result(f"{line}\n")
    rows = [(part.name, part.role, part.address or "a Ray node") for part in plan.parts]
    print_result(table(("PROCESS", "ROLE", "ADDRESS"), rows))
    for part in plan.parts:
        changes = "".join(f"{name}={shlex.quote(value)} " for name, value in part.env.items())
        spare = " (when the autoscaler wants it)" if part.spare else ""
        print_result(f"\n{part.name}{spare}:\n  {changes}{shlex.join(part.command)}")
    return 0


# ---- from a plan to a running fleet


def _up(args: argparse.Namespace, ports: Ports, terminal: Terminal) -> int:
    from stoker.checkpoint.source import default_cache_dir
    from stoker.gateway.config import read_secret
    from stoker.up import toml
    from stoker.up.config import LOCAL
    from stoker.up.footprint import footprint_words
    from stoker.up.gateway_files import check_readable
    from stoker.up.pair_numerics import pair_words
    from stoker.up.plan import FleetPaths
    from stoker.up.run import SupervisedFleet
    from stoker.up.state import default_state_dir

    state_dir = default_state_dir(os.environ)
    cache_dir = args.cache_dir or default_cache_dir(os.environ)
    _clean_up_killed(state_dir / "fleets")
    machine = _machine(cache_dir)
    config = _config(args, machine, cache_dir)
    gateway, run_dir = _reserve(config, ports, state_dir / "fleets")
    placement: Placement | None = None
    try:
        placement = _placement(config)
        paths = FleetPaths(
            run_dir.path,
            _file_or_new(config.gateway.get("secret_file"), run_dir, "secret"),
            _file_or_new(config.gateway.get("admin_token_file"), run_dir, "admin-token"),
        )
        models = _resolve(config, config.up.cache_dir or cache_dir, terminal)
        plan = _plan(config, machine, models, paths, ports, gateway, placement)
        if config.up.gateway_placement == LOCAL:
            run_dir.write(paths.gateway_file.name, toml.dumps(plan.gateway_table))
        else:
            check_readable(plan.gateway_table, _gateway_files())
        log_dir = config.up.log_dir or state_dir / "logs" / run_dir.path.name
        try:
            log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{log_dir}: {error.strerror}; choose another --log-dir") from error
        for line in (*footprint_words(config, models, machine), *pair_words(config, machine)):
            terminal.say(line)
        fleet = SupervisedFleet(
            plan=plan,
            up=config.up,
            run_dir=run_dir,
            log_dir=log_dir.absolute(),
            admin_token=read_secret(paths.admin_token_file, "admin_token_file") or "",
            admin_token_file=paths.admin_token_file.absolute(),
            secret_file=paths.secret_file.absolute(),
            placement=placement,
            terminal=terminal,
            on_stopped=lambda: _remove_store(plan.store_name),
        )
        return asyncio.run(fleet.run())
    finally:
        if placement is not None:
            placement.close()
        run_dir.remove()


def _placement(config: FleetConfig) -> Placement:
    from stoker.up.config import LOCAL
    from stoker.up.placement.local import LocalPlacement
    from stoker.up.placement.ray_placement import RayPlacement

    local = LocalPlacement(os.environ)
    return local if config.up.placement == LOCAL else RayPlacement(config.up.ray_address, local)


def _reserve(config: FleetConfig, ports: Ports, fleets_dir: Path) -> tuple[Listening, RunDir]:
    """Reserve the gateway's port, if it listens on this machine, and the run folder that is named after it."""
    from stoker.up.config import LOCAL
    from stoker.up.state import open_run_dir

    gateway = _listening(config.gateway)
    is_here = config.up.gateway_placement == LOCAL
    if not gateway.port:
        # On another machine, the gateway gets a free port there. The folder needs a number all the same.
        number = ports.take(gateway.host, 0)
        return replace(gateway, port=number if is_here else 0), open_run_dir(fleets_dir, number)
    run_dir = open_run_dir(fleets_dir, gateway.port)  # first, because its error names the fleet that has the port
    try:
        if is_here:
            ports.take(gateway.host, gateway.port)
    except ConfigError:
        run_dir.remove()
        raise
    return gateway, run_dir


def _file_or_new(named: str | None, run_dir: RunDir, name: str) -> Path:
    return expand_home(named) if named else run_dir.write_secret(name)


def _resolve(config: FleetConfig, cache_dir: Path, terminal: Terminal) -> dict[str | None, FleetModel]:
    """Download or convert the models, once, before the workers start at the same time."""
    from stoker.checkpoint.source import resolve_model
    from stoker.up.plan import FleetModel

    models = {}
    for model in dict.fromkeys(one.model for one in config.workers):
        found = resolve_model(model, cache_dir, terminal.progress, config.up.offline)
        weight_bytes = sum(file.stat().st_size for file in found.path.glob("*.safetensors"))
        models[model] = FleetModel(str(found.path), found.name, weight_bytes, _cpu_bytes(found.path))
    return models


def _cpu_bytes(folder: Path) -> int:
    """Return an upper limit of the RAM for a model's weights on a CPU: in float32. Quantised weights take less than half
    of it on a CPU with fast 8-bit kernels. 0 if the folder has no weights yet."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        dtype = config.get("dtype") or config.get("torch_dtype")
        is_gguf = (config.get("quantization_config") or {}).get("quant_method") == "gguf"
    except (OSError, ValueError, AttributeError):
        dtype, is_gguf = None, False
    if is_gguf:
        return 4 * size  # they are stored in 8 bits
    return 2 * size if dtype in ("bfloat16", "float16") else size


def _clean_up_killed(fleets_dir: Path) -> None:
    """Remove what killed fleets left behind: their run folders and shared memory."""
    from stoker.up.state import abandoned_fleets

    for run_dir in abandoned_fleets(fleets_dir):
        if run_dir.left is not None:
            _remove_store(run_dir.left.store_name)
        run_dir.remove()


def _remove_store(name: str | None) -> None:
    if name is not None:
        from stoker.kv.store.tiers.host.host_memory import remove_host_store

        remove_host_store(name)
