"""Builds an Engine from a model folder and settings."""

from __future__ import annotations

import ctypes
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stoker.base.clock import RealClock
from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError, ModelFilesError
from stoker.base.ids import RequestId
from stoker.base.timeline import Timeline
from stoker.checkpoint.weight_files import WeightReadAhead, tokenizer_file
from stoker.engine.cpu_weights import CpuWeights, choose_cpu_weights
from stoker.engine.draft_model import LoadedDraft, open_draft, open_own_draft
from stoker.engine.gpu_memory import MemoryLine, MemoryTable, WorkingMemory
from stoker.engine.gpu_steps import cut_heads
from stoker.engine.grammar import Grammars, NoGrammars
from stoker.engine.kernel_limits import check_limits, explain_kernel_error
from stoker.engine.kernel_plan import build_model, prepare_kernels
from stoker.engine.kv_memory import blocks_per_set
from stoker.engine.loop import Engine
from stoker.engine.memory import ResolvedSettings, resolve, with_default_drafters
from stoker.engine.rates import StepRates
from stoker.engine.rows import RowTable
from stoker.engine.runner import Runner
from stoker.engine.store import build_store
from stoker.engine.tuning_file import load_tuning
from stoker.kernels.compiled.kernel_cache import CacheCounts
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.paged import most_shared
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.pool import BlockPool, PoolObserver
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.kv.peer.lease_book import LeaseBook
from stoker.kv.peer.peer_server import PeerServer
from stoker.kv.store.kv_store import KvStore
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import Model, ModelFamily, family_of
from stoker.models.weights import load, parameter_slices
from stoker.sched.drafting import Drafting
from stoker.sched.leases import LeaseTerms
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.scheduler import Scheduler, SchedulerConfig
from stoker.spec.choose_drafters import EAGLE3, MTP, DrafterChoice
from stoker.spec.draft_counts import DraftCounts
from stoker.spec.drafter import DrafterParts
from stoker.spec.stored_blocks import StoredBlocks

Progress = Callable[[str, int, int], None]

_PROBES, _PROBE_BYTES = 16, 4096  # parts of each weight file that go into the fingerprint
_MEASURED_TOKENS = {"cpu": 128, "cuda": 4096}  # prompt length of the prefill measurement


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

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.store.close()


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
) -> BuiltEngine:
    """Load the model, allocate the KV cache and return a ready engine.

    `wake` is called from any thread when an idle engine should take a step. With `random_weights_seed`, no weight files
    are read: the model of config.json gets random weights, for benchmarks. `tuning_dir` has the tuned tiles of this
    machine's GPUs. The choice of CPU kernels is stored in `kernel_cache_dir`. `wrap_drafting` may replace what decides how
    many drafts a step verifies, for measurements.
    """
    started_s = time.monotonic()
    timeline = timeline or Timeline()
    hf = read_hf_config(folder)
    family = family_of(hf, str(folder / "config.json"))
    with timeline.stage("context"):
        resolved = resolve(settings, family.shape)
        memory = MemoryTable(resolved.device)
    if tuning_dir is not None and resolved.device.type == "cuda":
        load_tuning(tuning_dir, resolved.device)
    checkpoint = _open_draft(resolved.drafters, folder, family)
    kernels = prepare_kernels(settings, family, resolved, kv_layout(family, resolved), checkpoint)
    # cuDNN's attention plans every new shape, which takes longer than the attention itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with timeline.stage("weights"):
        cpu_weights = choose_cpu_weights(settings.cpu_weights, resolved.device, resolved.dtype, hf, kernel_cache_dir)
        if cpu_weights.kernel is not None:
            resolved = with_default_drafters(resolved, settings)
        model, weight_bytes = _load_model(family, resolved, folder, random_weights_seed, progress, ahead, cpu_weights)
        draft = None if checkpoint is None else LoadedDraft.load(checkpoint, model, resolved)
        weight_bytes += 0 if draft is None else draft.num_bytes
    memory.add_line("weights", weight_bytes)
    with timeline.stage("KV"):
        kv, working = _make_kv(settings, family, resolved, model, draft)
    layout = kv.layout
    memory.add_line("KV", kv.num_bytes)
    pool, *local_pools = _make_pools(kv, observer)
    max_model_tokens = _max_model_tokens(resolved, pool)
    max_blocks = -(-max_model_tokens // layout.block_tokens) + 1
    rows = RowTable(
        resolved.max_rows,
        max_blocks,
        family.shape.vocab_size,
        resolved.device,
        grammars or NoGrammars(),
        has_draft_model=draft is not None,
        num_sets=len(layout.sets),
    )
    identity = _identity(folder, hf, kv, random_weights_seed, _number_format(kv, resolved, cpu_weights))
    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    rates = StepRates()
    store = build_store(settings, kv, identity, fingerprint, lambda: rates.prefill_tokens_per_s, wake)
    leases = LeaseBook()

    def released(lease_id: str) -> None:
        engine.release_lease(lease_id)
        wake()

    handoff = settings.handoff
    server = PeerServer(kv, identity, leases, handoff, released) if handoff.serves else None
    engine_id = server.engine_id if server is not None else uuid.uuid4().hex
    lease = LeaseTerms(engine_id, server.address, handoff.lease_s) if server is not None else None
    config = _scheduler_config(resolved, family.shape.vocab_size, fingerprint, lease, store.max_offers)
    draft_counts = DraftCounts()
    stored_blocks = StoredBlocks() if resolved.drafters.is_on and store.tiers else StoredBlocks(0)
    parts = DrafterParts(pool, family.shape.vocab_size, stored=stored_blocks)
    scheduler = Scheduler(config, pool, wrap_drafting(resolved.drafters.build(parts, draft_counts)), local_pools)
    runner = Runner(
        model,
        family.shape.num_heads,
        kv,
        rows,
        resolved.threads,
        resolved.captured_tokens,
        _attention_dtype(resolved),
        resolved.exact,
        resolved.drafters.drafts_grammar,
        resolved.drafters.is_on,
        cpu_weights.uses_grid,
        draft,
    )
    engine = Engine(scheduler, runner, RealClock(), resolved.steps_ahead, store, leases, rates)
    if resolved.device.type == "cuda":
        progress("compiling and capturing", 0, 1)
        with timeline.stage("wait for kernels"):
            kernels.wait(timeline)
        with timeline.stage("graphs"):
            _warm_up(runner, model, resolved.device)
    memory.add_line("graphs and libraries", working.graph_bytes)
    memory.take_arena(working.arena_bytes)
    memory.add_reserve(working.reserve_bytes + working.spare_bytes)
    if handoff.serves or store.tiers:
        progress("measuring", 0, 1)
        _measure_prefill(runner, config, kv, rates, resolved)
        store.measure()
    return BuiltEngine(
        engine=engine,
        scheduler=scheduler,
        pool=pool,
        local_pools=local_pools,
        model=model,
        settings=resolved,
        layout=layout,
        vocab_size=family.shape.vocab_size,
        max_model_tokens=max_model_tokens,
        fingerprint=fingerprint,
        engine_id=engine_id,
        store=store,
        server=server,
        load_s=time.monotonic() - started_s,
        memory=memory.lines,
        kernels=kernels.counts,
        draft_counts=draft_counts,
        stored_blocks=stored_blocks,
    )


def _open_draft(drafters: DrafterChoice, folder: Path, family: ModelFamily) -> DraftCheckpoint | None:
    """Return the files of the draft model, if there is one. `folder` is the target model's."""
    if drafters.draft_model == MTP:
        return open_own_draft(folder, family)
    if drafters.draft_model is None:
        return None
    draft_folder = Path(drafters.arguments[EAGLE3])
    return open_draft(draft_folder, read_hf_config(draft_folder), family)


def _number_format(kv: DeviceKv, resolved: ResolvedSettings, cpu_weights: CpuWeights) -> str:
    """Describe how the model computes. Engines that differ in it compute KV that differs in its last bits at least."""
    parts = [_name(kv.like.dtype)]
    if cpu_weights.format is not None:
        parts.append(f"weights {cpu_weights.format}")
    if resolved.exact:
        parts.append("exact")
    return ", ".join(parts)


def _attention_dtype(resolved: ResolvedSettings) -> torch.dtype | None:
    """Return the dtype of attention with the reference kernels, None for the model's. In float64, chunks of a prompt and
    single tokens give the same values after rounding to the model's dtype."""
    return torch.float64 if resolved.device.type == "cpu" and resolved.exact else None


def _load_model(
    family: ModelFamily,
    resolved: ResolvedSettings,
    folder: Path,
    random_weights_seed: int | None,
    progress: Progress,
    ahead: WeightReadAhead | None,
    cpu_weights: CpuWeights,
) -> tuple[Model, int]:
    """Return the model, with its weights in the layout of the kernels, and the size of the weights in bytes."""
    model = build_model(family, resolved, resolved.device)
    if resolved.device.type == "cuda":
        check_limits(model, family.shape)
    if random_weights_seed is None:
        load(model, family.rules, family.ignored, folder, partial(progress, "loading weights"), ahead)
    else:
        _randomise(model, family, random_weights_seed)
    progress("preparing weights", 0, 1)
    with torch.no_grad():
        model.pack(cpu_weights.kernel, resolved.exact)
    _release_free_memory()
    tensors = [*model.buffers(), *(parameter for _name, parameter in model.named_parameters())]
    return model, sum(tensor.nbytes for tensor in tensors)


def _release_free_memory() -> None:
    """Return the memory of the weights' earlier layouts to the system. glibc would keep it: 300 MB for a 135M model."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _make_kv(
    settings: EngineSettings,
    family: ModelFamily,
    resolved: ResolvedSettings,
    model: Model,
    draft: LoadedDraft | None,
) -> tuple[DeviceKv, WorkingMemory]:
    """Allocate the KV cache: as many blocks as fit besides the working memory of a step."""
    layout = kv_layout(family, resolved)
    working = WorkingMemory.plan(
        resolved.step_tokens,
        resolved.captured_tokens,
        resolved.max_rows,
        family.shape.vocab_size,
        resolved.dtype.itemsize,
        model.bytes_per_token + (0 if draft is None else draft.model.bytes_per_token),
        resolved.keeps_spare,
        _partial_bytes(family, resolved, layout, draft) if resolved.exact and resolved.device.type == "cuda" else 0,
        0 if draft is None else draft.logits_bytes(resolved.max_rows),
    )
    group = None if draft is None else draft.kv_group
    if group is not None and layout.sets[0].reach.is_bounded:
        raise ConfigError("a draft model needs a model with layers that see all tokens; use --drafter without model:")
    blocks = blocks_per_set(settings, resolved, layout, working, group)
    return DeviceKv(layout, blocks, resolved.device, resolved.dtype, group), working


def _make_pools(kv: DeviceKv, observer: PoolObserver | None = None) -> list[BlockPool]:
    """Return the pool of each KV set. The first one reports its blocks, so that each block key is reported once."""
    observers = [observer, *[None] * len(kv.sets)]
    sets = zip(kv.layout.sets, kv.sets, observers, strict=False)
    return [BlockPool(memory.num_blocks, one, kv_set.reach) for kv_set, memory, one in sets]


def _max_model_tokens(resolved: ResolvedSettings, pool: BlockPool) -> int:
    """Return the longest context: the model's, or what the KV cache holds. A pool with a bounded reach limits nothing."""
    if pool.reach.is_bounded:
        return resolved.max_model_tokens
    return min(resolved.max_model_tokens, pool.num_blocks * resolved.block_tokens)


def _partial_bytes(family: ModelFamily, resolved: ResolvedSettings, layout: KvLayout, draft: LoadedDraft | None) -> int:
    """Return the memory for attention's partial results with numerics=exact, if the KV cache took all free memory."""
    shape, max_blocks = family.shape, -(-resolved.max_model_tokens // layout.block_tokens) + 1
    most_blocks = torch.cuda.mem_get_info(resolved.device)[0] // min(one.layout.block_bytes for one in layout.sets)
    groups = [(shape.num_heads, group) for group in layout.groups]
    if draft is not None:
        groups.append((draft.num_heads, draft.kv_group))
    heads = [cut_heads(num_heads, group) for num_heads, group in groups]
    cutter = ExactCutter.for_model(heads, layout.block_tokens, resolved.dtype, max_blocks, most_blocks)
    return cutter.partial_bytes(resolved.max_rows, most_shared(heads), max(group.width for _, group in groups))


def _warm_up(runner: Runner, model: Model, device: torch.device) -> None:
    """Compile the kernels and capture the first graphs. Raises ModelFilesError if a kernel cannot run on this GPU."""
    try:
        runner.warm_up()
    except Exception as error:
        if (explained := explain_kernel_error(error, model, device)) is not None:
            raise explained from error
        raise


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
    )


def _measure_prefill(
    runner: Runner, config: SchedulerConfig, kv: DeviceKv, rates: StepRates, resolved: ResolvedSettings
) -> None:
    """Measure the prefill rate before the first request. The store compares it with the cost of loading KV.

    Uses a scheduler and pools of its own, so that its blocks never enter the prefix cache.
    """
    pool, *local_pools = _make_pools(kv)
    context = _max_model_tokens(resolved, pool)
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


def read_hf_config(folder: Path) -> Mapping[str, Any]:
    """Return the model folder's config.json. Raises ModelFilesError if it cannot be read."""
    path = folder / "config.json"
    try:
        hf = json.loads(path.read_text())
    except OSError as error:
        raise ModelFilesError(
            f"{path} cannot be read ({error.strerror}); check that the path is a model folder"
        ) from error
    except ValueError as error:
        raise ModelFilesError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(hf, dict):
        raise ModelFilesError(f"{path} does not contain a JSON object; download it again")
    return hf


def _randomise(model: Model, family: ModelFamily, seed: int) -> None:
    """Set norms to one and other weights to small random values. Outputs are finite, and the same for the same seed."""
    slices = list(parameter_slices(model, family.rules))
    generator = torch.Generator(slices[0][1].device).manual_seed(seed)
    with torch.no_grad():
        for name, values in slices:
            if name.endswith(("_scale", "_scale_inv")):  # scales of quantised weights; their codes are set below
                values.fill_(0.0004)
            elif not values.dtype.is_floating_point:
                values.random_(generator=generator)
            elif values.dtype == torch.float8_e4m3fn:
                values.copy_(torch.randn(values.shape, generator=generator, device=values.device).mul_(50))
            elif values.dim() == 1:
                values.fill_(1.0)
            else:
                values.normal_(0.0, 0.02, generator=generator)


def kv_layout(family: ModelFamily, resolved: ResolvedSettings) -> KvLayout:
    """Return the layout of the model's KV blocks."""
    return KvLayout(
        groups=family.kv_groups,
        block_tokens=resolved.block_tokens,
        dtype=_name(resolved.kv_dtype),
        dtype_bytes=resolved.kv_dtype.itemsize,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _identity(folder: Path, hf: Mapping[str, Any], kv: DeviceKv, seed: int | None, number_format: str) -> KvIdentity:
    """Return the identity of the model's KV. Two engines share KV only if theirs are equal.

    The layout names the dtype of the KV. The model's own dtype is a part too: KV of the same layout has other values
    where the model computes in another dtype.

    Only parts of the weight files are hashed. Hashing hundreds of GB would delay every start, and two models of the
    same shape differ nearly everywhere.
    """
    model = hashlib.sha256(json.dumps(hf, sort_keys=True).encode())
    model.update(repr(seed).encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        model.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            for part in range(_PROBES):
                weights.seek(part * size // _PROBES)
                model.update(weights.read(_PROBE_BYTES))
    tokenizer = tokenizer_file(folder)
    vocabulary = hashlib.sha256(tokenizer.read_bytes() if tokenizer.exists() else b"")
    return KvIdentity(
        model=model.hexdigest()[:16],
        tokenizer=vocabulary.hexdigest()[:16],
        layout=kv.layout.identity,
        dtype=number_format,
    )
