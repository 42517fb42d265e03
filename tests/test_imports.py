"""Who may import what. Imports point down: this table is the layout, and anything that it does not say is an error.

Every import counts, also those inside functions and under TYPE_CHECKING: what is needed to read a file is needed to
understand it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stoker

ROOT = Path(stoker.__file__).parent
HEAVY = frozenset({"torch", "triton", "xgrammar"})  # slow to import, or importing something that is
ENGINE_SIDE = "torch triton numpy safetensors"
GATEWAY_BASE = "gateway.worker_option gateway.api gateway.http"


@dataclass(frozen=True)
class Allowed:
    """`ours` are packages, modules or names below `stoker`, `others` are third-party modules. `light` never loads torch,
    not even through others."""

    ours: str = ""
    others: str = ""
    light: bool = False


# A package may also import itself, base and the standard library. A sub-package that has its own row follows that row
# instead of its package's, and may import itself. The rows are packages; single modules have none.
TABLE = {
    "base": Allowed(light=True),
    "kv.blocks": Allowed(light=True),
    "kv.device": Allowed("kv.blocks kernels", f"{ENGINE_SIDE} xxhash"),  # without xxhash, checksums are slower
    "kv.mooncake": Allowed("kv.blocks", "mooncake numpy", light=True),
    "kv.store": Allowed("kv.blocks kv.device", ENGINE_SIDE),
    "kv.store.tiers": Allowed("kv.blocks kv.device", ENGINE_SIDE),
    "kv.store.tiers.disk": Allowed("kv.blocks kv.device kv.store.tiers", f"{ENGINE_SIDE} cryptography"),
    "kv.store.tiers.mooncake": Allowed("kv.blocks kv.device kv.mooncake kv.store.tiers", f"{ENGINE_SIDE} mooncake"),
    "kv.peer": Allowed("kv.blocks kv.device kernels", ENGINE_SIDE),
    "kv.peer.transports": Allowed("kv.blocks kv.device kv.peer kv.mooncake kernels", f"{ENGINE_SIDE} mooncake"),
    "sched": Allowed("kv.blocks", light=True),
    "spec": Allowed("sched kv.blocks", "numpy", light=True),
    "kernels": Allowed("", ENGINE_SIDE),
    "parallel": Allowed("sched kv.blocks kernels", ENGINE_SIDE),
    "layers": Allowed("kernels kv.blocks kv.device parallel", ENGINE_SIDE),
    "models": Allowed("layers checkpoint.weight_files kv.blocks parallel", ENGINE_SIDE),
    "engine": Allowed("sched spec kv models checkpoint.weight_files layers kernels parallel", ENGINE_SIDE),
    # Only the engine process joins the engine with proto, msgspec and xgrammar; the engine itself runs without them.
    "engine.process": Allowed(
        "engine kv models checkpoint.weight_files sched spec text proto parallel",
        f"{ENGINE_SIDE} msgspec xgrammar llguidance",
    ),
    "train": Allowed("engine sched spec kv models layers kernels", ENGINE_SIDE),
    "planner": Allowed("engine models layers parallel kv.blocks", ENGINE_SIDE),
    "proto": Allowed("sched kv.blocks", "msgspec zmq", light=True),
    "text": Allowed("sched.request proto.openai", "tokenizers jinja2 msgspec", light=True),
    "checkpoint": Allowed("", "numpy gguf tokenizers huggingface_hub safetensors", light=True),
    "loadgen": Allowed("", "aiohttp msgspec rich", light=True),
    "worker": Allowed("text proto sched kv.blocks", "aiohttp msgspec prometheus_client zmq", light=True),
    "fleet": Allowed("", light=True),
    "routing": Allowed("fleet", light=True),
    "replay": Allowed("fleet routing", "msgspec", light=True),
    "autoscale": Allowed("fleet", light=True),
    "gateway": Allowed(
        "autoscale routing replay sim.live_twin sim.calibration fleet text proto kv.blocks", "msgspec", light=True
    ),
    "gateway.http": Allowed("", "", light=True),
    "gateway.api": Allowed("proto", "msgspec", light=True),
    "gateway.prefix": Allowed("gateway.api fleet text proto kv.blocks", "msgspec xxhash", light=True),
    "gateway.watch": Allowed(
        f"{GATEWAY_BASE} gateway.prefix routing fleet text proto kv.blocks", "msgspec xxhash zmq", light=True
    ),
    "gateway.admission": Allowed(
        f"{GATEWAY_BASE} gateway.key_settings gateway.store fleet routing", "msgspec", light=True
    ),
    "gateway.store": Allowed("", "psycopg", light=True),
    "gateway.objects": Allowed(f"{GATEWAY_BASE} gateway.store gateway.admission proto", "msgspec", light=True),
    "gateway.records": Allowed(
        f"{GATEWAY_BASE} gateway.store gateway.admission fleet proto.openai",
        "msgspec opentelemetry prometheus_client",
        light=True,
    ),
    "gateway.doctor": Allowed(
        f"{GATEWAY_BASE} gateway.prefix gateway.admission.prices routing fleet proto", "msgspec", light=True
    ),
    "gateway.insight": Allowed(
        f"{GATEWAY_BASE} gateway.admission gateway.records routing fleet proto", "msgspec", light=True
    ),
    "gateway.ui": Allowed("gateway.api", "", light=True),
    "gateway.path": Allowed(
        f"{GATEWAY_BASE} gateway.prefix gateway.watch gateway.admission gateway.objects gateway.records gateway.doctor"
        " gateway.insight routing fleet proto kv.blocks replay.recorder",
        "msgspec",
        light=True,
    ),
    "sim": Allowed("sched kv.blocks routing fleet gateway.admission loadgen.prompts", "msgspec", light=True),
    "up": Allowed("proto", "aiohttp msgspec", light=True),
    "up.placement": Allowed("up", "ray", light=True),
    "observe": Allowed("", light=True),
    "cli": Allowed(
        "worker gateway up observe engine train planner sim replay routing proto text checkpoint loadgen kv.mooncake kv.store"
        " kernels",
        "aiohttp msgspec rich triton uvloop",
    ),
}


@dataclass(frozen=True)
class Import:
    importer: str  # a module, below stoker: "kv.pool"
    target: str  # "kv.keys.next_key" below stoker, else a third-party module's first name
    is_ours: bool
    line: int

    def __str__(self) -> str:
        target = f"stoker.{self.target}" if self.is_ours else self.target
        return f"stoker/{self.importer.replace('.', '/')}.py:{self.line} imports {target}"


def modules() -> list[str]:
    """All modules below stoker, as "kv.pool"; a package's __init__ is the package: "kv"."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.rglob("*.py")))
    names = (".".join(part for part in path.parts if part != "__init__") for path in paths)
    return [name for name in names if name]


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(_imports(module))


def _imports(module: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source_of(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"stoker.{module}, line {node.lineno}: a relative import"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            first, _, rest = target.partition(".")
            if first == "stoker":
                yield Import(module, rest, True, node.lineno)
            elif first not in sys.stdlib_module_names:
                yield Import(module, first, False, node.lineno)


def is_below(target: str, place: str) -> bool:
    return target == place or target.startswith(f"{place}.")


def package_of(module: str) -> str:
    return module.partition(".")[0]


def row_of(module: str) -> str:
    """Return the longest row of the table that the module is in."""
    place = module
    while place and place not in TABLE:
        place = place.rpartition(".")[0]
    return place or package_of(module)


def rule_of(module: str) -> Allowed:
    return TABLE.get(row_of(module), Allowed())


def is_allowed(found: Import) -> bool:
    rule = rule_of(found.importer)
    if not found.is_ours:
        return found.target in rule.others.split()
    if not found.target or found.target.startswith("__"):
        return True  # stoker itself: its version
    return any(is_below(found.target, place) for place in ["base", row_of(found.importer), *rule.ours.split()])


ALL_MODULES = modules()
LIGHT_MODULES = [module for module in ALL_MODULES if rule_of(module).light]


def test_the_table_has_every_package_and_no_other() -> None:
    assert {package_of(module) for module in ALL_MODULES} == {package_of(line) for line in TABLE}
    assert [line for line in TABLE if not source_of(line).exists()] == []


@pytest.mark.parametrize("package", sorted({package_of(line) for line in TABLE}))
def test_imports_are_those_of_the_table(package: str) -> None:
    found = [one for module in ALL_MODULES if package_of(module) == package for one in imports_of(module)]
    wrong = [str(one) for one in found if not is_allowed(one)]
    assert wrong == [], "\n".join(["not in the table of tests/test_imports.py:", *wrong])


def test_modules_have_no_cycle() -> None:
    known = set(ALL_MODULES)
    graph: dict[str, set[str]] = {module: set() for module in ALL_MODULES}
    for module in ALL_MODULES:
        for one in imports_of(module):
            if one.is_ours:
                target = one.target if one.target in known else one.target.rpartition(".")[0]
                graph[module] |= {target} & known - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


def reached_from(module: str) -> dict[str, list[str]]:
    """Every module that importing this one may import, with the way there; packages on the way count too."""
    known, ways, left = set(ALL_MODULES), {module: [module]}, [module]
    while left:
        here = left.pop()
        for one in imports_of(here):
            parts = one.target.split(".") if one.is_ours else []
            for end in range(1, len(parts) + 1):
                there = ".".join(parts[:end])
                if there in known and there not in ways:
                    ways[there] = [*ways[here], there]
                    left.append(there)
    return ways


def test_light_modules_never_lead_to_torch() -> None:
    wrong = []
    for module in LIGHT_MODULES:
        for there, way in reached_from(module).items():
            heavy = {one.target for one in imports_of(there) if not one.is_ours} & HEAVY
            if heavy:
                wrong.append(f"{' -> '.join(way)} -> {min(heavy)}")
    assert wrong == [], "\n".join(wrong)


LOOK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "triton", "xgrammar"} & set(sys.modules)
    if heavy:
        sys.exit(f"{name} loads {min(heavy)}")
"""


def test_importing_light_modules_and_commands_loads_no_torch() -> None:
    """What third-party modules import shows only when they are imported. `stoker --help` imports every command."""
    commands = [module for module in ALL_MODULES if package_of(module) == "cli"]
    names = [f"stoker.{module}" for module in (*LIGHT_MODULES, *commands)]
    done = subprocess.run([sys.executable, "-c", LOOK, *names], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
