"""Install Stoker with the given extras into the environment of this Python: `.venv/bin/python scripts/install.py '[dev]'`.

PyPI has only the CUDA build of torch for Linux, which is of no use on a machine without a GPU. Therefore torch is installed first:

- `uv pip install --torch-backend cpu` takes the CPU build on a machine without a GPU; `--torch-backend auto` takes the CUDA build
  that fits the driver on a machine with one.
- If uv or torch's own index cannot be used, pip installs torch from the index that it is configured with.

pip installs the rest. This script needs only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK_S = 10.0  # for the check whether uv reaches torch's index; 1 to 2 s where it does
NVIDIA_SMI_S = 20.0  # the first call after a boot loads the driver
CUDA_GB = 2.7  # download size of torch's CUDA build with the packages that it needs
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main(extras: str) -> int:
    gpu = has_gpu()
    with tempfile.TemporaryDirectory() as folder:
        constraints = ROOT / "constraints.txt"
        if gpu:  # the pin is for the CPU build that the tests use; a driver may need another version
            constraints = Path(folder) / "constraints.txt"
            constraints.write_text(without_torch((ROOT / "constraints.txt").read_text()))
        uv, problem = usable_uv("auto" if gpu else "cpu", constraints)
        if uv:
            build, reason = ("CUDA", "found a GPU") if gpu else ("CPU", "found no GPU")
            say(f"torch: the {build} build, through uv, because nvidia-smi {reason}")
            if code := subprocess.run(uv).returncode:
                return code
        else:
            say(f"torch: the build in the index that pip is configured with, because {problem}")
            if not gpu:
                warn_of_cuda(constraints, Path(folder))
        return subprocess.run([*PIP, "install", "-qq", "-c", str(constraints), "-e", f"{ROOT}{extras}"]).returncode


def has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, timeout=NVIDIA_SMI_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def usable_uv(backend: str, constraints: Path) -> tuple[list[str], str]:
    """Return the uv command that installs torch, or [] and the reason why uv cannot be used."""
    uv = find_uv()
    if uv is None:
        run_quietly([*PIP, "install", "-q", "uv"], timeout_s=120.0)
        uv = find_uv()
    if uv is None:
        return [], "uv is missing and could not be installed"
    command = [uv, "pip", "install", "--python", sys.executable, "--torch-backend", backend]
    command += ["-c", str(constraints), torch_requirement()]
    problem = run_quietly([*command, "--dry-run", "--no-deps"], timeout_s=CHECK_S)
    return ([], f"uv cannot use torch's own index ({problem})") if problem else (command, "")


def find_uv() -> str | None:
    return shutil.which("uv", path=os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)]))


def warn_of_cuda(constraints: Path, folder: Path) -> None:
    """Say it before pip downloads CUDA for a machine that has no GPU."""
    # Only newer versions of pip find out what they would install without downloading it. One is used just for this.
    run_quietly([*PIP, "install", "-q", "--target", str(folder / "newer_pip"), "pip"], timeout_s=120.0)
    report = folder / "report.json"
    command = [*PIP, "install", "-q", "--dry-run", "--no-deps", "--report", str(report), "-c", str(constraints)]
    python_path = os.pathsep.join([str(folder / "newer_pip"), os.environ.get("PYTHONPATH", "")])
    if run_quietly([*command, torch_requirement()], timeout_s=600.0, PYTHONPATH=python_path):
        return  # the real installation will fail in the same way, and say why
    planned = [
        item["metadata"] for item in json.loads(report.read_text())["install"]
    ]  # [] if torch is installed already
    if any(is_cuda_build(torch.get("version", ""), torch.get("requires_dist", [])) for torch in planned):
        say(
            f"WARNING: pip's index offers only the CUDA build of torch. About {CUDA_GB} GB will be downloaded, although this "
            "machine has no GPU. To avoid it, press Ctrl-C now, make torch's CPU index reachable for uv or configure pip with "
            "an index that has the CPU build, and run this again"
        )


def is_cuda_build(version: str, requirements: list[str]) -> bool:
    return "+cpu" not in version and any(name.startswith(("nvidia-", "cuda-")) for name in requirements)


def torch_requirement() -> str:
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(line for line in dependencies if re.match(r"torch\b", line))


def without_torch(constraints: str) -> str:
    return "".join(line for line in constraints.splitlines(keepends=True) if not re.match(r"torch\b", line))


def run_quietly(command: list[str], timeout_s: float, **variables: str) -> str:
    """Return "" if the command succeeded, else what went wrong in one line."""
    environ = {**os.environ, "UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "0", **variables}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return next((line for line in lines if "error" in line.lower()), lines[-1]).strip().removeprefix("error: ")


def say(text: str) -> None:
    print(f"scripts/install.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
