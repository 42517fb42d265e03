"""The fleet that `stoker up` starts without a file. It is built as a table, which is then processed like a file's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.base.settings import check_settings, setting
from stoker.up.footprint import CPU_WORKER_BYTES, GATEWAY_BYTES
from stoker.up.machine import GIB, Machine

ROLES = ("prefill", "decode", "unified")
PAIR: Mapping[str, int] = {"prefill": 1, "decode": 1}
SINGLE: Mapping[str, int] = {"unified": 1}
# A default fleet must leave the machine usable for other work.
_RAM_SHARE = 0.24  # of all RAM, for the whole fleet: below a quarter
_FREE_SHARE = 0.5  # of the RAM that is free now
_HOST_SHARE, _HOST_MOST_GIB = 0.2, 2.0  # of what is left for KV
_KV_MOST_GIB = 4.0  # for one worker
_KV_LEAST_GIB = 0.25  # for one worker, even if that is more than the fleet's share of RAM
_KV_PAIR_GIB = 0.5  # two workers are started only if each gets this much: one long conversation of SmolLM2
_DISK_SHARE, _DISK_MOST_GIB = 0.1, 8.0  # of the free disk
_LEAST_GIB = 0.05  # a smaller tier is not worth its files


@dataclass(frozen=True, slots=True)
class DefaultFleetSettings:
    """The flags of `stoker up` for a fleet without a file."""

    model: str | None = setting(
        None,
        "A model folder, a .gguf file, or a Hugging Face id such as org/name or org/name@revision.",
        flag="--model",
        metavar="MODEL",
        default_text="SmolLM2-135M-Instruct",
    )
    served_name: tuple[str, ...] = setting(
        (),
        "Model name in the API. Repeatable: all names work, and answers carry the first one.",
        flag="--served-name",
        metavar="NAME",
        pattern=".+",
        expected="a model name",
        default_text="derived from the model",
    )
    prefill: int | None = setting(
        None,
        "Number of prefill workers.",
        flag="--prefill",
        ge=0,
        default_text="1; 0 if another number of workers is given, or if there is too little RAM for two workers",
    )
    decode: int | None = setting(
        None,
        "Number of decode workers.",
        flag="--decode",
        ge=0,
        default_text="1; 0 if another number of workers is given, or if there is too little RAM for two workers",
    )
    unified: int | None = setting(
        None,
        "Number of workers that do both prefill and decode.",
        flag="--unified",
        ge=0,
        default_text="0; 1 if there is too little RAM for two workers",
    )

    def __post_init__(self) -> None:
        check_settings(self, "up")

    @property
    def counts(self) -> dict[str, int]:
        """Return the numbers of workers that were given, by role."""
        return {role: count for role in ROLES if (count := getattr(self, role)) is not None}


def default_counts(machine: Machine, weight_bytes: int) -> Mapping[str, int]:
    """Return how many workers of each role to start: a prefill and a decode worker, or one worker if RAM is scarce.

    `weight_bytes` is the RAM for one worker's weights if it runs on a CPU.
    """
    if machine.gpu_bytes or _kv_gib(_spare_bytes(machine, 2, weight_bytes), 2) >= _KV_PAIR_GIB:
        return PAIR
    return SINGLE


def default_table(
    counts: Mapping[str, int],
    machine: Machine,
    cache_dir: Path,
    model: str | None = None,
    served_name: Sequence[str] = (),
    weight_bytes: int = 0,
) -> dict[str, Any]:
    """Return the table of a default fleet with `counts` workers by role.

    On a CPU it uses at most a quarter of the RAM, unless the workers' weights alone need more.
    """
    workers: list[dict[str, Any]] = []
    num_workers, placed = sum(counts.values()), 0
    spare = _spare_bytes(machine, num_workers, weight_bytes)
    for role, count in counts.items():
        if not count:
            continue
        one: dict[str, Any] = {"role": role, "count": count}
        if model is not None:
            one["model"] = model
        if served_name:
            one["served_name"] = list(served_name)
        if gpus := len(machine.gpu_bytes):
            one["devices"] = [(placed + n) % gpus for n in range(count)]
        else:
            one["kv_memory_gib"] = max(_KV_LEAST_GIB, _kv_gib(spare, num_workers))
        workers.append(one)
        placed += count
    store: dict[str, Any] = {}
    host_bytes = min(spare * _HOST_SHARE, machine.shared_bytes / 2)
    if (host_gib := _rounded(host_bytes, _HOST_MOST_GIB)) >= _LEAST_GIB:
        store["host_gib"] = host_gib
    if (disk_gib := _rounded(machine.disk_bytes * _DISK_SHARE, _DISK_MOST_GIB)) >= _LEAST_GIB:
        store |= {"disk_dir": str(cache_dir / "kv"), "disk_gib": disk_gib}
    return {"workers": workers, "store": store}


def _spare_bytes(machine: Machine, num_workers: int, weight_bytes: int) -> float:
    """Return the RAM that is left for KV, in the workers and in the host tier together."""
    budget = min(machine.all_ram_bytes * _RAM_SHARE, machine.ram_bytes * _FREE_SHARE)
    if machine.gpu_bytes:
        return budget  # weights and KV are in GPU memory
    return max(0.0, budget - GATEWAY_BYTES - num_workers * (CPU_WORKER_BYTES + weight_bytes))


def _kv_gib(spare_bytes: float, num_workers: int) -> float:
    return _rounded(spare_bytes * (1 - _HOST_SHARE) / max(1, num_workers), _KV_MOST_GIB)


def _rounded(num_bytes: float, most_gib: float) -> float:
    return float(int(min(num_bytes / GIB, most_gib) * 100) / 100)
