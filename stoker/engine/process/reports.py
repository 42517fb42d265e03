"""What the engine process reports about its engine: EngineInfo after the start, EngineStats while it runs, the memory plan."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.base import log as logs
from stoker.engine.build import BuiltEngine
from stoker.engine.gpu_memory import TOLERANCE_BYTES, MemoryLine
from stoker.kv.store.measured_tier import MeasuredTier
from stoker.proto.messages import DraftReport, EngineInfo, EngineStats, PoolReport, TierReport
from stoker.spec.draft_counts import DraftCounts

log = logs.EventLog("engine")


def engine_info(built: BuiltEngine) -> EngineInfo:
    """Return the facts about the engine that do not change while it runs."""
    return EngineInfo(
        model_fingerprint=built.fingerprint,
        device=str(built.settings.device),
        keeps_spare=built.settings.keeps_spare,
        dtype=str(built.settings.dtype).removeprefix("torch."),
        vocab_size=built.vocab_size,
        max_model_tokens=built.max_model_tokens,
        block_tokens=built.layout.block_tokens,
        num_blocks=built.pool.num_blocks,
        max_rows=built.settings.max_rows,
        load_s=built.load_s,
        engine_id=built.engine_id,
        kv_address=built.server.address if built.server is not None else None,
        stores=_shared_stores(built),
    )


def engine_stats(built: BuiltEngine, num_preparing: int) -> EngineStats:
    """Return the current statistics. `num_preparing` requests are not in the scheduler yet; they count as waiting."""
    scheduler, pool, counters, engine = built.scheduler, built.pool, built.scheduler.counters, built.engine
    costs = scheduler.step_size.costs
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
        mixed_step_tokens=scheduler.step_size.mixed_tokens,
        step_fixed_s=costs.fixed_s,
        step_token_s=costs.token_s,
        step_row_s=costs.row_s,
        loading_sequences=scheduler.num_loading,
        held_leases=scheduler.num_held,
        loaded_tokens=counters.loaded_tokens,
        pulled_tokens=counters.pulled_tokens,
        failed_loads=counters.failed_loads,
        local_pools=[
            PoolReport(
                name=pool.reach.name,
                num_blocks=pool.num_blocks,
                free_blocks=pool.num_free,
                cached_blocks=pool.num_named,
            )
            for pool in built.local_pools
        ],
        tiers=[_tier_report(built, tier) for tier in (*built.store.tiers, *built.store.local_tiers)],
        drafts=draft_reports(built.draft_counts),
        draft_step_s=counters.draft_step_s,
        undrafted_s=counters.undrafted_s,
    )


def draft_reports(counts: DraftCounts) -> list[DraftReport]:
    """Return the counts of drafts, one report per source."""
    return [
        DraftReport(source=source, spans=one.num_spans, drafted_at=one.drafted_at, accepted_at=one.accepted_at)
        for source, one in sorted(counts.by_source.items())
    ]


def _tier_report(built: BuiltEngine, tier: MeasuredTier) -> TierReport:
    counters, stats = tier.counters, tier.backend.stats()
    return TierReport(
        name=tier.name,
        medium=tier.backend.medium,
        blocks=stats.blocks,
        used_bytes=stats.used_bytes,
        capacity_bytes=stats.capacity_bytes,
        hits=counters.hits,
        misses=counters.misses,
        read_bytes=counters.read_bytes,
        written_bytes=counters.written_bytes,
        read_s=counters.read_s,
        write_s=counters.write_s,
        declined=counters.declined,
        evicted=stats.evicted,
        corrupt=stats.corrupt,
        errors=counters.errors + stats.errors,
        bytes_per_s=tier.speed.measured,
        crossover_tokens=built.store.crossover_tokens(tier),
    )


def _shared_stores(built: BuiltEngine) -> dict[str, str]:
    """Return where each shared tier keeps its blocks, by medium. Workers with equal entries read each other's blocks: they
    have the same model, split in the same way."""
    layout = built.settings.layout
    owner = built.fingerprint if layout.num_ranks == 1 else f"{built.fingerprint} {layout}"
    return {
        tier.backend.medium: f"{owner}@{tier.name}:{tier.backend.shared_location}"
        for tier in built.store.tiers
        if tier.backend.shared_location is not None
    }


def log_memory(lines: Sequence[MemoryLine]) -> None:
    """Log the planned and the used GPU memory. A large difference means that the plan is wrong."""
    for line in lines:
        planned_mib, used_mib = line.planned_bytes >> 20, line.used_bytes >> 20
        log.event("memory", line=line.name, planned_mib=planned_mib, used_mib=used_mib)
    off_bytes = sum(line.used_bytes - line.planned_bytes for line in lines if line.name != "reserve")
    if abs(off_bytes) > TOLERANCE_BYTES:
        log.warning("memory_off_plan", off_mib=off_bytes >> 20)
