"""How many KV blocks the memory holds, and how it is divided between the KV sets.

The memory is divided for sequences of a mean length (kv.mean_tokens). A set with a bounded reach gets what as many of them
hold of it as fit into the memory, and at least a fifth of the memory. It never gets more than is useful: what all rows
together can hold of it, and one more block for each eight of the first set, so that later requests find what earlier ones
left. The first set gets the rest.
"""

from __future__ import annotations

import torch

from stoker.base.allowance import all_ram, available_ram
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.gpu_memory import CONTEXT_BYTES, WorkingMemory
from stoker.engine.memory import ResolvedSettings
from stoker.kv.blocks.layout import KvGroup, KvLayout, KvSet
from stoker.kv.device.device_kv import draft_block_bytes
from stoker.sched.draft_tape import MAX_DRAFTS

_GIB = 1 << 30
# On a CPU, a worker shares the machine. By default the KV cache takes this share of the available RAM, up to the
# maximum.
_CPU_SHARE = 0.25
_CPU_MAX_BYTES = 4 * _GIB
_CACHED_PART = 8  # a set with a bounded reach keeps one block for each of this many of the first set
_MEAN_TOKENS = 131_072
# The sets with a bounded reach get this share also if sequences of the mean length need less: with many short sequences
# they would limit the batch.
_LEAST_SHARE = 0.2
_MOST_SHARE = 0.95


def blocks_per_set(
    settings: EngineSettings,
    resolved: ResolvedSettings,
    layout: KvLayout,
    working: WorkingMemory,
    draft: KvGroup | None = None,
) -> list[int]:
    """Return the number of blocks of each KV set that fit. Call it after the weights are loaded, when free memory is known.
    `draft` is the group of a draft model, which has the blocks of the first set."""
    first, *local = layout.sets
    block_bytes = first.layout.block_bytes + draft_block_bytes(draft, layout)
    local_bytes = [one.layout.block_bytes for one in local]
    useful = [useful_blocks(one, resolved) for one in layout.sets]
    if settings.kv.num_blocks is not None:
        num_blocks = settings.kv.num_blocks
        # No sequence holds more blocks of another set than of the first one.
        most = [max(num_blocks, one.reach.min_pool_blocks(layout.block_tokens)) for one in local]
        taken = [min(count + num_blocks // _CACHED_PART, limit) for count, limit in zip(useful[1:], most, strict=True)]
        _check_budget(settings, resolved, working, num_blocks * block_bytes + _dot(taken, local_bytes))
        return _checked(layout, [num_blocks, *taken])
    budget = _budget(settings, resolved, working, _dot(useful, [block_bytes, *local_bytes]))
    return divide_memory(budget, settings, resolved, layout, draft)


def divide_memory(
    budget: int, settings: EngineSettings, resolved: ResolvedSettings, layout: KvLayout, draft: KvGroup | None = None
) -> list[int]:
    """Return the number of blocks of each KV set in `budget` bytes. Raises ConfigError if no sequence could run."""
    first, *local = layout.sets
    block_bytes = first.layout.block_bytes + draft_block_bytes(draft, layout)
    local_bytes = [one.layout.block_bytes for one in local]
    useful = [useful_blocks(one, resolved) for one in layout.sets]
    for_rows = _dot(useful[1:], local_bytes)
    cached = int(max(0, budget - for_rows) / (block_bytes + sum(local_bytes) / _CACHED_PART)) // _CACHED_PART
    wanted = [count + cached for count in useful[1:]]
    needed = _dot(_needed_blocks(budget, settings, resolved, layout, block_bytes), local_bytes)
    share = min(_MOST_SHARE * max(0, budget), max(needed, _LEAST_SHARE * max(0, budget)))
    part = min(1.0, share / max(1, _dot(wanted, local_bytes)))
    taken = [int(part * count) for count in wanted]
    left = budget - _dot(taken, local_bytes)
    if left < 2 * block_bytes:
        raise ConfigError(
            f"{max(0, left) / _GIB:.2f} GiB are left for KV, but one block of {layout.block_tokens} tokens needs "
            f"{block_bytes / _GIB:.4f} GiB; free some memory, or set kv.memory_gib"
        )
    return _checked(layout, [left // block_bytes, *taken])


def useful_blocks(one: KvSet, resolved: ResolvedSettings) -> int:
    """Return how many blocks of a set all rows together can hold: of a set with a bounded reach what their next tokens
    see, and what the launched steps compute."""
    size = resolved.block_tokens
    whole = -(-resolved.max_model_tokens // size)
    if not one.reach.is_bounded:
        return resolved.max_rows * whole
    blocks = resolved.max_rows * _row_blocks(one, resolved) + _step_blocks(resolved)
    return max(blocks, one.reach.min_pool_blocks(size))


def max_sequences(blocks: list[int], resolved: ResolvedSettings, layout: KvLayout, num_tokens: int) -> int:
    """Return how many sequences of this length can run at the same time with these numbers of blocks."""
    counts = []
    for one, count in zip(layout.sets, blocks, strict=True):
        if one.reach.is_bounded:
            counts.append(max(1, (count - _step_blocks(resolved)) // _row_blocks(one, resolved)))
        else:
            counts.append(count * layout.block_tokens // num_tokens)
    return min(resolved.max_rows, *counts)


def _row_blocks(one: KvSet, resolved: ResolvedSettings) -> int:
    """Return how many blocks of a set with a bounded reach a sequence holds while it decodes."""
    size = resolved.block_tokens
    drafts = (1 + resolved.steps_ahead) * MAX_DRAFTS if resolved.drafters.is_on else 0
    return min(-(-resolved.max_model_tokens // size), one.reach.num_blocks(size) + -(-drafts // size))


def _step_blocks(resolved: ResolvedSettings) -> int:
    """Return how many blocks of a set with a bounded reach the launched steps fill."""
    return (1 + resolved.steps_ahead) * (resolved.step_tokens // resolved.block_tokens)


def _needed_blocks(
    budget: int, settings: EngineSettings, resolved: ResolvedSettings, layout: KvLayout, block_bytes: int
) -> list[int]:
    """Return the blocks of the sets with a bounded reach that sequences of the mean length need, if they fill the memory.
    `block_bytes` are those of the first set."""
    local = layout.sets[1:]
    mean_tokens = min(settings.kv.mean_tokens or _MEAN_TOKENS, resolved.max_model_tokens)
    per_row, steps = [_row_blocks(one, resolved) for one in local], _step_blocks(resolved)
    local_bytes = [one.layout.block_bytes for one in local]
    sequence_bytes = -(-mean_tokens // resolved.block_tokens) * block_bytes + _dot(per_row, local_bytes)
    count = max(1, (budget - steps * sum(local_bytes)) // sequence_bytes)
    return [count * each + steps for each in per_row]


def _dot(counts: list[int], sizes: list[int]) -> int:
    """Return the bytes of these numbers of blocks."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _budget(settings: EngineSettings, resolved: ResolvedSettings, working: WorkingMemory, useful_bytes: int) -> int:
    """Return the memory for KV. `useful_bytes` is what all rows together can fill."""
    if settings.kv.memory_gib is not None:
        budget = int(settings.kv.memory_gib * _GIB)
        _check_budget(settings, resolved, working, budget)
        return budget
    if resolved.device.type == "cuda":
        return _free_bytes(settings, resolved) - working.total_bytes
    # The RAM that KV cannot fill is more useful as file cache.
    return min(useful_bytes, min(_CPU_MAX_BYTES, int(available_ram() * _CPU_SHARE)) // resolved.layout.num_ranks)


def _free_bytes(settings: EngineSettings, resolved: ResolvedSettings) -> int:
    """Return the GPU memory that this process may still take. Ranks that share a GPU measure it when all of them have loaded
    their weights and none has allocated KV (part.py), and get equal parts of it."""
    sharers = settings.ranks.per_gpu
    free = torch.cuda.mem_get_info(resolved.device)[0] // sharers
    if settings.kv.gpu_memory_gib is not None:
        taken = CONTEXT_BYTES + torch.cuda.memory_reserved(resolved.device)
        free = min(free, int(settings.kv.gpu_memory_gib * _GIB) // sharers - taken)
    return free


def _check_budget(settings: EngineSettings, resolved: ResolvedSettings, working: WorkingMemory, budget: int) -> None:
    """Raise ConfigError if the settings ask for more memory than there is."""
    if resolved.device.type == "cuda":
        free = _free_bytes(settings, resolved)
        room = free - working.total_bytes + working.reserve_bytes
        if budget > room:
            raise ConfigError(
                f"the settings ask for {budget / _GIB:.2f} GiB of KV, but there is room for {max(0, room) / _GIB:.2f} GiB: "
                f"{free / _GIB:.2f} GiB of GPU memory are free, and steps and the spare engine need "
                f"{(free - room) / _GIB:.2f} GiB of that; "
                "lower kv.memory_gib or kv.num_blocks"
            )
    elif budget > (room := all_ram()):
        raise ConfigError(
            f"the settings ask for {budget / _GIB:.2f} GiB of KV, but this process may use {room / _GIB:.2f} GiB of RAM; "
            "lower kv.memory_gib or kv.num_blocks"
        )


def _checked(layout: KvLayout, blocks: list[int]) -> list[int]:
    """Return the numbers of blocks. Raises ConfigError if no sequence could run with them."""
    for one, count in zip(layout.sets, blocks, strict=True):
        least = one.reach.min_pool_blocks(layout.block_tokens)
        if count < least:
            size = one.layout.block_bytes
            raise ConfigError(
                f"the layers of {one.reach.name} get {count} KV blocks ({count * size / _GIB:.2f} GiB), but one sequence needs "
                f"{least} blocks of {layout.block_tokens} tokens ({least * size / _GIB:.2f} GiB); raise kv.memory_gib"
            )
    return blocks
