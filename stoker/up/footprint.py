"""How much RAM and disk a fleet uses at most. `stoker up` prints it before it starts the processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.up.config import LOCAL, FleetConfig, WorkersConfig
from stoker.up.machine import GIB, Machine
from stoker.up.plan import FleetModel

# Resident memory of the processes, without weights and KV, as measured with SmolLM2 on a CPU.
GATEWAY_BYTES = 170 << 20  # with `stoker up` itself
CPU_WORKER_BYTES = 620 << 20  # the server and the engine process
GPU_WORKER_BYTES = 3 * GIB  # with the CUDA libraries; an estimate
# What an engine on a CPU takes for its KV cache without --kv-memory-gib.
_CPU_KV_SHARE, _CPU_KV_MOST_BYTES = 0.25, 4 * GIB


@dataclass(frozen=True, slots=True)
class Footprint:
    """Upper limits, in bytes."""

    workers: int
    host_tier: int
    gateway: int
    disk: int

    @property
    def ram(self) -> int:
        return self.workers + self.host_tier + self.gateway


def footprint(config: FleetConfig, models: Mapping[str | None, FleetModel], machine: Machine) -> Footprint:
    """Estimate what the processes of the fleet use when their caches are full."""
    store, num_workers = config.store, sum(one.most for one in config.workers)
    segments = store.segment_gib * num_workers if store.mooncake is not None else 0.0
    return Footprint(
        workers=sum(_workers_bytes(one, models[one.model], machine) for one in config.workers),
        host_tier=int((store.host_gib * len(models) + segments) * GIB),
        gateway=GATEWAY_BYTES,
        disk=int(store.disk_gib * GIB) if store.disk_dir is not None else 0,
    )


def _workers_bytes(workers: WorkersConfig, model: FleetModel, machine: Machine) -> int:
    options = workers.options
    on_gpu = bool(workers.devices) or str(options.get("device", "")).startswith("cuda")
    if on_gpu or (machine.gpu_bytes and "device" not in options):
        return workers.most * GPU_WORKER_BYTES
    if "kv_blocks" in options:
        kv_bytes = 0  # the size of a block is not known here
    elif "kv_memory_gib" in options:
        kv_bytes = int(options["kv_memory_gib"] * GIB)
    else:
        kv_bytes = min(int(machine.ram_bytes * _CPU_KV_SHARE), _CPU_KV_MOST_BYTES)
    return workers.most * (CPU_WORKER_BYTES + model.cpu_bytes + kv_bytes)


def footprint_words(config: FleetConfig, models: Mapping[str | None, FleetModel], machine: Machine) -> Iterator[str]:
    """Describe the footprint on this machine in one or two lines. Workers that run elsewhere have none."""
    if config.up.placement != LOCAL:
        return
    used = footprint(config, models, machine)
    blocks = " and the KV blocks of kv_blocks" if any("kv_blocks" in one.options for one in config.workers) else ""
    disk = ""
    if used.disk:
        disk = f", and up to {used.disk / GIB:.1f} GiB of disk in {config.store.disk_dir}"
    yield (
        f"this fleet uses up to {used.ram / GIB:.1f} of {machine.all_ram_bytes / GIB:.1f} GiB of RAM "
        f"(workers {used.workers / GIB:.1f}, host tier {used.host_tier / GIB:.1f}, gateway {used.gateway / GIB:.1f})"
        f"{blocks}{disk}"
    )
    if used.ram > machine.ram_bytes:
        yield (
            f"warning: only {machine.ram_bytes / GIB:.1f} GiB of RAM are free; use fewer workers, or set kv_memory_gib in "
            "[[workers]] and host_gib in [store] of a fleet file"
        )
