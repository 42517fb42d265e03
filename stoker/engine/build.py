"""Builds an Engine from a model folder and settings."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.base.clock import RealClock
from stoker.base.config import EngineSettings
from stoker.base.ids import RequestId
from stoker.base.timeline import Timeline
from stoker.checkpoint.weight_files import WeightReadAhead
from stoker.engine.draft_model import open_chosen_draft
from stoker.engine.engine_leases import EngineLeases
from stoker.engine.gpu_memory import MemoryLine, MemoryTable, WorkingMemory
from stoker.engine.grammar import Grammars, NoGrammars
from stoker.engine.interrupt import Interrupt
from stoker.engine.kernel_limits import explain_kernel_error
from stoker.engine.loop import Engine
from stoker.engine.memory import ResolvedSettings, resolve
from stoker.engine.model_identity import read_hf_config
from stoker.engine.part import (
    EnginePart,
    ModelSource,
    Progress,
    build_part,
    identity_of,
    max_context,
    tier_share,
)
from stoker.engine.ranks.rank_host import NoRanks, RankHost
from stoker.engine.ranks.rank_processes import RankProcesses
from stoker.engine.runner import StepRunner
from stoker.engine.store import build_store
from stoker.engine.tuning_file import load_tuning
from stoker.kernels.compiled.kernel_cache import CacheCounts
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.pool import BlockPool, PoolObserver
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_server import PeerServer
from stoker.kv.store.kv_store import KvStore
from stoker.kv.store.tiers.tier import check_tier_names
from stoker.models.family import Model, family_of
from stoker.sched.drafting import Drafting
from stoker.sched.leases import LeaseTerms
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler
from stoker.sched.scheduler_config import SchedulerConfig
from stoker.sched.step_rates import StepRates
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DrafterParts
from stoker.spec.stored_blocks import StoredBlocks

_MEASURED_TOKENS = {"cpu": 128, "cuda": 4096}  # prompt length of the prefill measurement
# Goal for the time of a step with flex sequences only. On a CPU, an interactive request waits for one layer of it at most.
_FLEX_STEP_S = {"cpu": 0.05, "cuda": 0.005}


@dataclass(frozen=True, slots=True, eq=False)
class BuiltEngine:
    """An engine and its parts."""

    engine: Engine
    scheduler: Scheduler
    pool: BlockPool  # of the first KV set
    local_pools: list[BlockPool]  # of the others, which have a bounded reach
    model: Model
    settings: ResolvedSettings
    layout: KvLayout
    vocab_size: int
    max_model_tokens: int  # prompt and output: the model's context, or the KV cache's capacity if smaller
    fingerprint: str
    engine_id: str
    store: KvStore
    server: PeerServer | None
    load_s: float
    memory: list[MemoryLine]  # the GPU memory plan; empty on a CPU
    kernels: CacheCounts  # where the GPU's kernels came from
    draft_counts: DraftCounts
    stored_blocks: StoredBlocks  # for the cache drafter
    ranks: RankHost

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.store.close()
        self.ranks.close()


def build_engine(
    folder: Path,
    settings: EngineSettings,
    *,
    grammars: Grammars | None = None,
    observer: PoolObserver | None = None,
    random_weights_seed: int | None = None,
    progress: Progress = lambda stage, done, total: None,
    timeline: Timeline | None = None,
    ahead: WeightReadAhead | None = None,
    tuning_dir: Path | None = None,
    wake: Callable[[], None] = lambda: None,
    wrap_drafting: Callable[[Drafting], Drafting] = lambda drafting: drafting,
    kernel_cache_dir: Path | None = None,
    ranks: RankHost | None = None,
    has_urgent: Callable[[], bool] = lambda: False,
) -> BuiltEngine:
    """Load the model, allocate the KV cache and return a ready engine.

    `wake` is called from any thread when an idle engine should take a step. With `random_weights_seed`, no weight files
    are read: the model of config.json gets random weights, for benchmarks. `tuning_dir` has the tuned tiles of this
    machine's GPUs. The choice of CPU kernels is stored in `kernel_cache_dir`. `wrap_drafting` may replace what decides how
    many drafts a step verifies, for measurements. `ranks` starts the other ranks of a model that is split; by default they
    are processes of this machine. `has_urgent` returns True while an interactive request waits to be added: on a CPU, it ends a
    step of flex sequences.
    """
    started_s = time.monotonic()
    timeline, grammars = timeline or Timeline(), grammars or NoGrammars()
    check_tier_names(settings.store)
    hf = read_hf_config(folder)
    family = family_of(hf, str(folder / "config.json"))
    with timeline.stage("context"):
        resolved = resolve(settings, family.shape)
        memory = MemoryTable(resolved.device, settings.ranks.per_gpu)
    ranks = ranks or (NoRanks() if resolved.layout.num_ranks == 1 else RankProcesses())
    with ExitStack() as undo:  # what must be closed if a later part cannot be built
        undo.callback(ranks.close)
        if tuning_dir is not None and resolved.device.type == "cuda":
            load_tuning(tuning_dir, resolved.device)
        draft = open_chosen_draft(resolved.drafters, folder, family)
        source = ModelSource(folder, hf, random_weights_seed, ahead, kernel_cache_dir, draft)
        engine_id = uuid.uuid4().hex
        place = ranks.connect(source, family, settings, resolved, engine_id)
        part = build_part(family, source, settings, resolved, place, grammars, progress, timeline)
        runner = ranks.drive(part.runner)
        others = ranks.other_kv(wake)
        if resolved.layout.num_ranks == 1 and not resolved.steps_ahead:
            part.runner.interrupt = Interrupt(has_urgent, family.shape.num_layers)
        resolved, kv = part.resolved, part.kv
        memory.add_line("weights", part.weight_bytes)
        memory.add_line("KV", kv.num_bytes)
        pool, *local_pools = _make_pools(kv, observer)
        identity, rates = identity_of(family, source, part), StepRates()
        names = (identity, identity.fingerprint, lambda: rates.prefill_tokens_per_s, wake)
        store = build_store(settings, kv, *names, share=tier_share(family, part), others=others)
        undo.callback(store.close)
        leases, handoff = LeaseBook(), settings.handoff

        def released(lease_id: str) -> None:
            engine.release_lease(lease_id)
            wake()

        server = PeerServer(kv, identity, leases, handoff, released, engine_id) if handoff.serves else None
        if server is not None:
            undo.callback(server.close)
            server.other_ranks = ranks.kv_addresses
        lease = LeaseTerms(engine_id, server.address, handoff.lease_s) if server is not None else None
        config = _scheduler_config(resolved, family.shape.vocab_size, identity.fingerprint, lease, store.max_offers)
        draft_counts = DraftCounts()
        stored_blocks = StoredBlocks() if resolved.drafters.is_on and store.tiers else StoredBlocks(0)
        parts = DrafterParts(pool, family.shape.vocab_size, stored=stored_blocks, forced_start=grammars.forced_start)
        drafting = wrap_drafting(resolved.drafters.build(parts, draft_counts))
        scheduler = Scheduler(config, pool, drafting, local_pools)
        engine = Engine(
            scheduler, runner, RealClock(), resolved.steps_ahead, store, EngineLeases(leases, others), rates
        )
        if resolved.device.type == "cuda":
            _warm_up(runner, part, progress, timeline)
        _add_working_memory(memory, part.working)
        if handoff.prefills or store.tiers:
            progress("measuring", 0, 1)
            _measure_prefill(runner, config, kv, rates, resolved)
            store.measure()
        undo.pop_all()
    return BuiltEngine(
        engine=engine,
        scheduler=scheduler,
        pool=pool,
        local_pools=local_pools,
        model=part.model,
        settings=resolved,
        layout=kv.layout,
        vocab_size=family.shape.vocab_size,
        max_model_tokens=part.max_model_tokens,
        fingerprint=identity.fingerprint,
        engine_id=engine_id,
        store=store,
        server=server,
        load_s=time.monotonic() - started_s,
        memory=memory.lines,
        kernels=part.kernels.counts,
        draft_counts=draft_counts,
        stored_blocks=stored_blocks,
        ranks=ranks,
    )


def _make_pools(kv: DeviceKv, observer: PoolObserver | None = None) -> list[BlockPool]:
    """Return the pool of each KV set. The first one reports its blocks, so that each block key is reported once."""
    observers = [observer, *[None] * len(kv.sets)]
    sets = zip(kv.layout.sets, kv.sets, observers, strict=False)
    return [BlockPool(memory.num_blocks, one, kv_set.reach) for kv_set, memory, one in sets]


def _warm_up(runner: StepRunner, part: EnginePart, progress: Progress, timeline: Timeline) -> None:
    """Compile the kernels and capture the first graphs. Raises ModelFilesError if a kernel cannot run on this GPU."""
    progress("compiling and capturing", 0, 1)
    with timeline.stage("wait for kernels"):
        part.kernels.wait(timeline)
    with timeline.stage("graphs"):
        try:
            runner.warm_up()
        except Exception as error:
            if (explained := explain_kernel_error(error, part.model, part.resolved.device)) is not None:
                raise explained from error
            raise


def _add_working_memory(memory: MemoryTable, working: WorkingMemory) -> None:
    """Add what steps need besides weights and KV. The arena is allocated here."""
    memory.add_line("graphs and libraries", working.graph_bytes)
    memory.take_arena(working.arena_bytes)
    memory.add_reserve(working.reserve_bytes + working.spare_bytes)


def _scheduler_config(
    resolved: ResolvedSettings, vocab_size: int, fingerprint: str, lease: LeaseTerms | None, max_offers: int
) -> SchedulerConfig:
    return SchedulerConfig(
        block_tokens=resolved.block_tokens,
        step_tokens=resolved.step_tokens,
        max_rows=resolved.max_rows,
        fingerprint=fingerprint,
        lease=lease,
        max_offers=max_offers,
        target_itl_s=resolved.target_itl_s,
        vocab_size=vocab_size,
        max_tokens=resolved.max_model_tokens,
        stages=resolved.layout.pp,
        flex_step_s=_FLEX_STEP_S[resolved.device.type],
    )


def _measure_prefill(
    runner: StepRunner, config: SchedulerConfig, kv: DeviceKv, rates: StepRates, resolved: ResolvedSettings
) -> None:
    """Measure the prefill rate before the first request. The store compares it with the cost of loading KV.

    Uses a scheduler and pools of its own, so that its blocks never enter the prefix cache.
    """
    pool, *local_pools = _make_pools(kv)
    context = max_context(resolved, kv)
    size = min(_MEASURED_TOKENS[resolved.device.type], config.step_tokens, context - 1)
    scheduler = Scheduler(replace(config, lease=None, max_offers=0), pool, None, local_pools)
    for number in range(2):  # the first run only warms up
        request = GenerateRequest(RequestId(f"{number}"), [1 + number] * size, size, SamplingParams(temperature=0.0), 1)
        scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            result = runner.launch(plan).wait()
            if number:
                rates.record(plan, result.step_s)
            scheduler.commit(result)
