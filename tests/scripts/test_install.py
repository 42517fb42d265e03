"""scripts/install.py takes the build of torch that fits the machine. uv, nvidia-smi and pip are replaced by fakes that log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "scripts" / "install.py"
TORCH = "torch>=2.11,<2.14"
FAKE_PIP = """
import json, os, sys
with open(os.environ["LOG"], "a") as log:
    log.write(" ".join(["pip", *sys.argv[1:]]) + "\\n")
if "-c" in sys.argv:
    with open(os.environ["LOG"] + ".constraints", "w") as copy:
        copy.write(open(sys.argv[sys.argv.index("-c") + 1]).read())
if "--report" in sys.argv:
    with open(sys.argv[sys.argv.index("--report") + 1], "w") as report:
        report.write(os.environ["PIP_REPORT"])
"""
CPU_BUILD = {"version": "2.13.0+cpu", "requires_dist": ["filelock", "jinja2"]}
CUDA_BUILD = {"version": "2.13.0", "requires_dist": ["filelock", "nvidia-cublas==13.1.0; platform_system == 'Linux'"]}


class Machine:
    """A fresh environment whose PATH has only the fake programs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs = folder / "programs"
        self._log = folder / "log"
        (folder / "modules" / "pip").mkdir(parents=True)
        (folder / "modules" / "pip" / "__main__.py").write_text(FAKE_PIP)
        (folder / "modules" / "pip" / "__init__.py").touch()
        self._programs.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"

    def has(self, program: str, exit_code: int = 0, said: str = "", sleep_s: float = 0.0) -> None:
        file = self._programs / program
        file.write_text(
            f'#!/bin/sh\necho "{program} $*" >> "$LOG"\necho "{said}" >&2\n/bin/sleep {sleep_s}\nexit {exit_code}\n'
        )
        file.chmod(0o755)

    def install(self, pip_offers: dict[str, object] = CPU_BUILD) -> str:
        """Return what the script says."""
        environ = {
            "PATH": str(self._programs),
            "PYTHONPATH": str(self._folder / "modules"),
            "LOG": str(self._log),
            "PIP_REPORT": json.dumps({"install": [{"metadata": pip_offers}]}),
        }
        done = subprocess.run(
            [self.python, INSTALL, "[dev]"], capture_output=True, text=True, env=environ, timeout=60, check=True
        )
        return done.stderr

    def commands(self, program: str) -> list[str]:
        lines = self._log.read_text().splitlines()
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(f"{program} ")]

    def constraints(self) -> str:
        return (self._folder / "log.constraints").read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_gpu_uv_takes_the_cpu_build(machine: Machine) -> None:
    machine.has("uv")
    machine.has("nvidia-smi", exit_code=9)  # the driver's tools without a device
    assert "torch: the CPU build, through uv, because nvidia-smi found no GPU" in machine.install()
    constraints = INSTALL.parents[1] / "constraints.txt"
    install = f"pip install --python {machine.python} --torch-backend cpu -c {constraints} {TORCH}"
    assert machine.commands("uv") == [f"{install} --dry-run --no-deps", install]
    (rest,) = machine.commands("pip")
    assert rest.endswith(f"install -qq -c {constraints} -e {INSTALL.parents[1]}[dev]")
    assert "torch==" in machine.constraints()


def test_with_a_gpu_uv_takes_the_cuda_build_without_the_pin(machine: Machine) -> None:
    machine.has("uv")
    machine.has("nvidia-smi")
    assert "torch: the CUDA build, through uv, because nvidia-smi found a GPU" in machine.install()
    assert all("--torch-backend auto" in command for command in machine.commands("uv"))
    assert len(machine.commands("uv")) == 2
    assert "\ntorch==" not in machine.constraints()
    assert "numpy<" in machine.constraints()


def test_pip_is_used_when_uv_cannot_reach_its_index(machine: Machine) -> None:
    machine.has("uv", exit_code=2, said="error: Failed to fetch the index")
    said = machine.install()
    assert "torch: the build in the index that pip is configured with" in said
    assert "because uv cannot use torch's own index (Failed to fetch the index)" in said
    assert "WARNING" not in said
    assert len(machine.commands("uv")) == 1


def test_an_index_that_does_not_answer_is_given_up_soon(machine: Machine) -> None:
    machine.has("uv", sleep_s=300.0)
    assert "no answer within 10 s" in machine.install()


def test_pip_is_used_when_uv_cannot_be_installed(machine: Machine) -> None:
    assert "because uv is missing and could not be installed" in machine.install()
    assert machine.commands("pip")[0].endswith("install -q uv")


def test_a_cuda_download_without_a_gpu_is_announced(machine: Machine) -> None:
    said = machine.install(pip_offers=CUDA_BUILD)
    assert "WARNING: pip's index offers only the CUDA build of torch. About 2.7 GB will be downloaded" in said
    check, rest = machine.commands("pip")[-2:]
    assert "--dry-run" in check
    assert "-e" in rest.split()


def test_pip_without_the_pin_is_the_fallback_with_a_gpu(machine: Machine) -> None:
    machine.has("nvidia-smi")
    assert "WARNING" not in machine.install(pip_offers=CUDA_BUILD)
    assert "\ntorch==" not in machine.constraints()
