"""How many KV blocks fit, and other settings that depend on model and hardware. Every "auto" ends here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.base.allowance import all_ram, available_ram, usable_cores
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.gpu_memory import WorkingMemory
from stoker.engine.threads import FixedThreads, Threads, ThreadTuner
from stoker.kv.blocks.layout import KvLayout
from stoker.models.family import ModelShape

_GIB = 1 << 30
# In RAM: a worker shares the machine, so by default the cache takes a part of what is free, and no more than this.
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 * _GIB
# A step in which answers go on, on a card: so much arithmetic takes an H200 about 50 ms, and all who are answered wait for it.
_MIXED_FLOP = 30e12
_LEAST_MIXED_TOKENS = 512
_CONTEXT_BYTES = 640 << 20  # what the driver takes of a card for a process, before it asks for anything


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings without "auto"."""

    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    step_tokens: int
    mixed_tokens: int
    max_rows: int
    threads: Threads
    steps_ahead: int
    max_model_tokens: int


def resolve(settings: EngineSettings, shape: ModelShape) -> Resolved:
    device = _device(settings.device)
    on_cpu = device.type == "cpu"
    # fp32 is the fast dtype of CPUs without bf16 arithmetic.
    dtype = getattr(torch, settings.dtype or ("float32" if on_cpu else "bfloat16"))
    if settings.max_model_tokens is not None and settings.max_model_tokens > shape.max_positions:
        raise ConfigError(
            f"max_model_tokens={settings.max_model_tokens}: the model was made for at most {shape.max_positions}"
        )
    step_tokens = settings.sched.step_tokens or (512 if on_cpu else 8192)
    return Resolved(
        device=device,
        dtype=dtype,
        block_tokens=settings.kv.block_tokens or (16 if on_cpu else 64),
        step_tokens=step_tokens,
        mixed_tokens=min(step_tokens, settings.sched.mixed_tokens or (step_tokens if on_cpu else _mixed_tokens(shape))),
        max_rows=settings.sched.max_rows or (64 if on_cpu else 512),
        threads=_threads(settings, on_cpu),
        steps_ahead=(0 if on_cpu else 1) if settings.steps_ahead is None else settings.steps_ahead,
        max_model_tokens=settings.max_model_tokens or shape.max_positions,
    )


def _mixed_tokens(shape: ModelShape) -> int:
    """A power of two, which captured steps are."""
    tokens = int(_MIXED_FLOP / (2 * shape.active_weights))
    return max(_LEAST_MIXED_TOKENS, 1 << (tokens.bit_length() - 1))


def _device(name: str | None) -> torch.device:
    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if num_cards else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device={name!r}: it must be cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: it must be cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= num_cards:
        raise ConfigError(f"device={name!r}: torch sees {num_cards} CUDA devices on this machine")
    return device


def _threads(settings: EngineSettings, on_cpu: bool) -> Threads:
    cores = usable_cores()
    if settings.num_threads is not None:
        return FixedThreads(settings.num_threads)
    return ThreadTuner(cores) if on_cpu else FixedThreads(min(4, cores))


def num_blocks(settings: EngineSettings, resolved: Resolved, layout: KvLayout, working: WorkingMemory) -> int:
    """Called when the weights are loaded, so that free memory is what it seems."""
    on_card = resolved.device.type == "cuda"
    free = torch.cuda.mem_get_info(resolved.device)[0] if on_card else 0
    if on_card and settings.kv.gpu_memory_gib is not None:
        taken = _CONTEXT_BYTES + torch.cuda.memory_reserved(resolved.device)
        free = min(free, int(settings.kv.gpu_memory_gib * _GIB) - taken)
    if settings.kv.num_blocks is not None:
        budget = settings.kv.num_blocks * layout.block_bytes
    elif settings.kv.memory_gib is not None:
        budget = int(settings.kv.memory_gib * _GIB)
    elif on_card:
        budget = free - working.total_bytes
    else:
        share = min(_CPU_MOST_BYTES, int(available_ram() * _CPU_SHARE))
        # No more than all rows can use: memory that nobody can fill is better left to the file cache.
        most = resolved.max_rows * -(-resolved.max_model_tokens // layout.block_tokens) * layout.block_bytes
        budget = min(most, share)
    if on_card and budget > (most := free - working.arena_bytes - working.graph_bytes):
        raise ConfigError(
            f"{budget / _GIB:.2f} GiB of KV were asked for, and there is room for {max(0, most) / _GIB:.2f}: of the card's memory "
            f"{free / _GIB:.2f} GiB are free, and {(free - most) / _GIB:.2f} of that are needed to work in"
        )
    if not on_card and budget > (most := all_ram()):
        raise ConfigError(
            f"{budget / _GIB:.2f} GiB of KV were asked for, and all the RAM that we may use is {most / _GIB:.2f}"
        )
    blocks = budget // layout.block_bytes
    if blocks < 2 and settings.kv.num_blocks is None:
        raise ConfigError(
            f"{max(0, budget) / _GIB:.2f} GiB are left for KV; one block of {layout.block_tokens} tokens needs "
            f"{layout.block_bytes / _GIB:.4f}: free some memory, or set kv.memory_gib"
        )
    return blocks
