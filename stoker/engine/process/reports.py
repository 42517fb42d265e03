"""What the engine process reports about its engine: EngineInfo after the start, EngineStats while it runs, the memory plan."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from stoker.base import log as logs
from stoker.base.config import StoreSettings
from stoker.engine.build import BuiltEngine
from stoker.engine.gpu_memory import TOLERANCE_BYTES, MemoryLine
from stoker.kv.store.tier_use import TierUse
from stoker.proto.messages import EngineInfo, EngineStats, TierReport

log = logs.EventLog("engine")


def engine_info(built: BuiltEngine, store: StoreSettings) -> EngineInfo:
    return EngineInfo(
        model_fingerprint=built.fingerprint,
        device=str(built.settings.device),
        dtype=built.layout.dtype,
        vocab_size=built.vocab_size,
        max_model_tokens=built.max_model_tokens,
        block_tokens=built.layout.block_tokens,
        num_blocks=built.pool.num_blocks,
        max_rows=built.settings.max_rows,
        load_s=built.load_s,
        engine_id=built.engine_id,
        kv_address=built.server.address if built.server is not None else None,
        stores=_shared_stores(store, built.fingerprint, built.store.tiers),
    )


def engine_stats(built: BuiltEngine, num_preparing: int) -> EngineStats:
    """`num_preparing` requests are not in the scheduler yet; they count as waiting."""
    scheduler, pool, counters, engine = built.scheduler, built.pool, built.scheduler.counters, built.engine
    return EngineStats(
        waiting_sequences=scheduler.num_waiting + num_preparing,
        waiting_tokens=scheduler.waiting_tokens,
        running_sequences=scheduler.num_running,
        free_blocks=pool.num_free,
        cached_blocks=pool.num_named,
        num_blocks=pool.num_blocks,
        steps=engine.num_steps,
        step_s=engine.step_s,
        prompt_tokens=counters.prompt_tokens,
        computed_tokens=counters.computed_tokens,
        cached_tokens=counters.cached_tokens,
        partial_tokens=counters.partial_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions=counters.preemptions,
        prefill_tokens_per_s=engine.rates.prefill_tokens_per_s,
        decode_step_s=engine.rates.decode_step_s,
        loading_sequences=scheduler.num_loading,
        held_leases=scheduler.num_held,
        loaded_tokens=counters.loaded_tokens,
        pulled_tokens=counters.pulled_tokens,
        failed_loads=counters.failed_loads,
        tiers=[_tier_report(built, use) for use in built.store.tiers],
    )


def _tier_report(built: BuiltEngine, use: TierUse) -> TierReport:
    figures, tier = use.figures, use.tier.stats()
    return TierReport(
        name=use.name,
        medium=use.tier.medium,
        blocks=tier.blocks,
        used_bytes=tier.used_bytes,
        capacity_bytes=tier.capacity_bytes,
        hits=figures.hits,
        misses=figures.misses,
        read_bytes=figures.read_bytes,
        written_bytes=figures.written_bytes,
        read_s=figures.read_s,
        write_s=figures.write_s,
        declined=figures.declined,
        evicted=tier.evicted,
        corrupt=tier.corrupt,
        errors=figures.errors + tier.errors,
        bytes_per_s=use.speed.measured,
        crossover_tokens=built.store.crossover_tokens(use),
    )


def _shared_stores(settings: StoreSettings, fingerprint: str, tiers: Sequence[TierUse]) -> dict[str, str]:
    """Return the location of each shared tier, by medium. Workers with equal locations read each other's blocks."""
    machine = socket.gethostname()
    locations = {
        "host": f"{machine}:{settings.name}",
        "disk": f"{machine}:{os.path.realpath(settings.disk_dir or '')}",
        "mooncake": settings.mooncake_master,
    }
    return {use.tier.medium: f"{fingerprint}@{use.name}:{locations[use.name]}" for use in tiers if use.tier.shared}


def log_memory(lines: Sequence[MemoryLine]) -> None:
    """Log the planned and the used GPU memory. A large difference means that the plan is wrong."""
    for line in lines:
        planned_mib, used_mib = line.planned_bytes >> 20, line.used_bytes >> 20
        log.event("memory", line=line.name, planned_mib=planned_mib, used_mib=used_mib)
    off_bytes = sum(line.used_bytes - line.planned_bytes for line in lines if line.name != "reserve")
    if abs(off_bytes) > TOLERANCE_BYTES:
        log.warning("memory_off_plan", off_mib=off_bytes >> 20)
