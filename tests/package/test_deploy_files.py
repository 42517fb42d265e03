"""The files in deploy/ are valid, and name only what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.main import build_parser, find_commands

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*/*.yaml"))
# Modules of the packages in gateway-requirements.txt, and the packages that those require.
GATEWAY_MODULES = """
aiohappyeyeballs aiohttp aiosignal attr attrs frozenlist idna multidict propcache yarl typing_extensions
jinja2 markupsafe markdown_it mdurl msgspec prometheus_client psycopg psycopg_binary pygments rich tokenizers uvloop xxhash zmq
"""
_RUN_GATEWAY = """
import sys
from importlib.machinery import PathFinder

allowed = {modules!r}

class Only:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in allowed and first not in sys.stdlib_module_names and first != "stoker":
            found = PathFinder.find_spec(first)
            if found is not None and "site-packages" in str(found.origin):
                raise ModuleNotFoundError(f"the gateway's image has no {{name}}", name=name)

sys.meta_path.insert(0, Only())
import asyncio
from pathlib import Path
from stoker.cli import gateway
from stoker.gateway.build import build_gateway
from stoker.gateway.config import GatewayConfig

async def main():
    server = build_gateway(GatewayConfig(state_dir=Path(sys.argv[1])))
    await server.close()

asyncio.run(main())
assert "torch" not in sys.modules
"""


def flags_of(command: str) -> set[str]:
    (parser,) = [
        choices[command]
        for action in build_parser(find_commands())._actions
        if isinstance(choices := action.choices, dict)
    ]
    return {flag for action in parser._actions for flag in action.option_strings}


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in documents(path):
        assert {"apiVersion", "kind"} <= set(one)
        if "k8s.io" not in one["apiVersion"]:  # kustomize's own files and LeaderWorkerSet have no schema there
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def pods(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod templates of a manifest."""
    spec = one.get("spec", {})
    templates = [spec.get("template"), spec.get("leaderWorkerTemplate", {}).get("workerTemplate")]
    return [template["spec"] for template in templates if template]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pods_have_known_flags_and_time_to_drain(path: Path) -> None:
    for one in documents(path):
        for pod in pods(one):
            (container,) = pod["containers"]
            command = "gateway" if container["image"] == "stoker-gateway" else "serve"
            given = dict(arg.partition("=")[::2] for arg in container["args"] if arg.startswith("--"))
            assert set(given) <= flags_of(command)
            stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            assert pod["terminationGracePeriodSeconds"] > int(given["--drain-s"]) + int(stop[1])
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_kustomizations_name_files_that_exist() -> None:
    for path in DEPLOY.glob("kubernetes/*/kustomization.yaml"):
        for name in documents(path)[0]["resources"]:
            assert (path.parent / name).exists(), f"{path}: {name}"


def test_a_gateway_needs_only_the_packages_of_its_image(tmp_path: Path) -> None:
    script = _RUN_GATEWAY.format(modules=sorted(GATEWAY_MODULES.split()))
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_the_image_of_a_gateway_has_the_versions_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["postgres"]}
    lines = (DEPLOY / "docker" / "gateway-requirements.txt").read_text().splitlines()
    assert {line for line in lines if line and not line.startswith("#")} <= known


def test_dockerfiles_copy_files_that_exist() -> None:
    for path in DEPLOY.glob("docker/*.Dockerfile"):
        for words in re.findall(r"^COPY (?!--)(.+)$", path.read_text(), re.MULTILINE):
            assert all((ROOT / name).exists() for name in words.split()[:-1]), f"{path.name}: COPY {words}"


def test_the_batch_script_is_valid_and_has_known_flags() -> None:
    path = DEPLOY / "slurm" / "stoker.sbatch"
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    code = "".join(line for line in path.read_text().splitlines(True) if not line.startswith("#")).replace("\\\n", " ")
    for command in ("gateway", "serve"):
        (line,) = [line for line in code.splitlines() if f'"$stoker" {command} ' in line]
        assert set(re.findall(r" (--[a-z-]+)", line.split(f" {command} ")[1])) <= flags_of(command)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("systemd/*.service")), ids=lambda path: path.name)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace("/opt/stoker/bin/stoker", "/bin/true"))
    checked = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True)
    assert path.name not in checked.stderr, checked.stderr
