"""A short description of the machine a benchmark runs on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    parts = [
        f"{os.cpu_count()} CPU threads ({_processor()})",
        f"{_memory_gib():.0f} GiB RAM",
        f"Python {platform.python_version()}",
    ]
    if gpu := _gpu():
        parts.insert(0, gpu)
    return ", ".join(parts)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpu() -> str:
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        for line in _lines(str(path)):
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
