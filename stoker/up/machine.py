"""The resources of this machine: RAM, shared memory, disk and GPUs. They are detected once, at the start."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from stoker.base.allowance import all_ram, available_ram

GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_NVIDIA_SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources of this machine, or of this container where it has lower limits."""

    all_ram_bytes: int
    ram_bytes: int  # free now
    shared_bytes: int  # free in /dev/shm: containers often have little
    disk_bytes: int  # free where the cache folder is
    gpu_bytes: tuple[int, ...] = ()  # free on each GPU

    @staticmethod
    def detect(cache_dir: Path) -> Machine:
        """Return the resources of this machine. `cache_dir` is the folder whose disk is measured."""
        existing = next(
            (path for path in (cache_dir, *cache_dir.absolute().parents) if os.path.exists(path)), Path("/")
        )
        shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
        return Machine(all_ram(), available_ram(), shared, shutil.disk_usage(existing).free, _free_gpu_bytes())


def _free_gpu_bytes() -> tuple[int, ...]:
    """Return the free memory of each GPU. nvidia-smi is used because importing torch takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
        free = [int(line) << 20 for line in done.stdout.split("\n") if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return tuple(free)


def visible_gpus(gpu_bytes: tuple[int, ...], visible: str | None) -> tuple[int, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. GPUs named by UUID are counted as the first ones."""
    if visible is None:
        return gpu_bytes
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = list(takewhile(lambda name: not name.startswith("-"), names))  # CUDA ignores what follows a -1
    chosen = [gpu_bytes[int(name)] for name in names if name.isdecimal() and int(name) < len(gpu_bytes)]
    return tuple(chosen) if chosen or not names else gpu_bytes[: len(names)]
