"""The fleet that `stoker up` starts without a file: as a table, so that it takes the same road as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.up.machine import GIB, Machine

# Parts of what is free, and no more than this: the machine is somebody's desk.
_HOST_SHARE, _HOST_MOST_GIB = 0.125, 2.0
_DISK_SHARE, _DISK_MOST_GIB = 0.1, 8.0
_LEAST_GIB = 0.05


def default_table(counts: dict[str, int], model: str | None, machine: Machine, cache_dir: Path) -> dict[str, Any]:
    """`counts` of workers by role."""
    workers: list[dict[str, Any]] = []
    placed = 0
    for role, count in counts.items():
        if not count:
            continue
        workers.append({"role": role, "count": count})
        if model is not None:
            workers[-1]["model"] = model
        if cards := len(machine.card_bytes):
            workers[-1]["devices"] = [(placed + n) % cards for n in range(count)]
        placed += count
    store: dict[str, Any] = {}
    free = min(machine.ram_bytes * _HOST_SHARE, machine.shared_bytes / 2)
    if (host_gib := _rounded(free, _HOST_MOST_GIB)) >= _LEAST_GIB:
        store["host_gib"] = host_gib
    if (disk_gib := _rounded(machine.disk_bytes * _DISK_SHARE, _DISK_MOST_GIB)) >= _LEAST_GIB:
        store |= {"disk_dir": str(cache_dir / "kv"), "disk_gib": disk_gib}
    return {"workers": workers, "store": store}


def _rounded(free_bytes: float, most_gib: float) -> float:
    return float(int(min(free_bytes / GIB, most_gib) * 100) / 100)
