"""Which kernels a model needs, and their compilation while its weights are read.

A step on meta tensors in place of weights and KV launches the same kernels as a real one. It takes some ten
milliseconds and no GPU memory.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from stoker.base import log as logs
from stoker.base.allowance import usable_cores
from stoker.base.config import EngineSettings
from stoker.base.timeline import Timeline
from stoker.engine.device_drafter import Drafter, NoDrafter
from stoker.engine.draft_model import LoadedDraft
from stoker.engine.gpu_batches import StepBatches, can_page
from stoker.engine.gpu_stages import device_steps
from stoker.engine.gpu_steps import DeviceSteps
from stoker.engine.grammar import NoGrammars
from stoker.engine.memory import ResolvedSettings
from stoker.engine.rows import RowTable
from stoker.engine.stage_taps import StageTaps
from stoker.kernels.compiled.compile_ahead import KernelLaunch, compile_all, recorded_launches
from stoker.kernels.compiled.kernel_archive import KernelArchive, shipped_archive
from stoker.kernels.compiled.kernel_cache import CacheCounts, KernelCache, install
from stoker.kernels.compiled.shapes_only import ShapesOnly
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import Model, ModelFamily
from stoker.parallel.stages import ONE_STAGE, Stages

_META = torch.device("meta")
_MAX_THREADS = 16

log = logs.EventLog("kernels")


def build_model(family: ModelFamily, resolved: ResolvedSettings, device: torch.device) -> Model:
    """Build the model with empty parameters."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(resolved.dtype)
    try:
        with device:
            return family.build(resolved.max_model_tokens)
    finally:
        torch.set_default_dtype(default)


def make_stand_in(
    family: ModelFamily,
    resolved: ResolvedSettings,
    layout: KvLayout,
    checkpoint: DraftCheckpoint | None = None,
    stages: Stages = ONE_STAGE,
) -> DeviceSteps | None:
    """Return the steps of this model on meta tensors, or None if no kernel supports its shape. `checkpoint` is that of its
    draft model, which is None in all `stages` but the first.

    Call it on the main thread: building a model changes torch's default dtype, which all threads share.
    """
    kv = DeviceKv(layout, 1, _META, resolved.dtype, None if checkpoint is None else checkpoint.kv_group)
    if not can_page(kv):
        return None
    model = build_model(family, resolved, _META)
    with torch.no_grad():
        model.pack(exact=resolved.exact)
    max_blocks = -(-resolved.max_model_tokens // layout.block_tokens) + 1
    rows = RowTable(
        resolved.max_rows, max_blocks, family.shape.vocab_size, _META, NoGrammars(), num_sets=len(layout.sets)
    )
    drafter: Drafter = NoDrafter()
    draft_heads = 0
    if checkpoint is not None:
        draft = LoadedDraft.stand_in(checkpoint, model, resolved, _META)
        drafter = draft.drafter(kv, rows, paged=True)
        draft_heads = draft.num_heads
    taps = StageTaps(stages, () if checkpoint is None else checkpoint.taps)
    options = (family.shape.num_heads, resolved.exact, resolved.drafters.is_on, draft_heads)
    batches = StepBatches(model, kv, rows, *options)
    return device_steps(batches, model, kv, rows, resolved.captured_tokens, drafter, stages, taps)


@torch.inference_mode()
def find_launches(stand_in: DeviceSteps, *, with_rest: bool) -> list[KernelLaunch]:
    """Return the launches of the steps that are captured at the start, or `with_rest` of all steps."""
    with recorded_launches() as launches, ShapesOnly():
        stand_in.dry_run(with_rest=with_rest)
    return list(launches.values())


class PreparedKernels(Protocol):
    """Kernels that are being prepared."""

    counts: CacheCounts

    def wait(self, timeline: Timeline) -> None:
        """Wait until all of them are ready."""


def prepare_kernels(
    settings: EngineSettings,
    family: ModelFamily,
    resolved: ResolvedSettings,
    layout: KvLayout,
    checkpoint: DraftCheckpoint | None = None,
    stages: Stages = ONE_STAGE,
) -> PreparedKernels:
    """Begin to compile and load the kernels for the first steps. A CPU needs none."""
    if resolved.device.type != "cuda":
        return _NoKernels()
    cache = open_cache(settings.kernel_archive, resolved.device)
    install(cache)
    begun_s = time.time()
    try:
        stand_in = make_stand_in(family, resolved, layout, checkpoint, stages)
    except Exception as error:  # kernels are then compiled one by one, when they are launched
        log.warning("kernels_not_planned", reason=repr(error))
        stand_in = None
    return _CompilingAhead(cache.counts, stand_in, resolved.device, begun_s)


def open_cache(archive: str | None, device: torch.device) -> KernelCache:
    """Return the cache for this GPU: Triton's folder, the operator's archive, and the one that comes with Stoker."""
    from triton import __version__, knobs

    major, minor = torch.cuda.get_device_capability(device)
    shipped = shipped_archive(__version__, 10 * major + minor)
    paths = [*([Path(archive)] if archive is not None else []), *([shipped] if shipped.is_file() else [])]
    return KernelCache(Path(knobs.cache.dir), [KernelArchive(path) for path in paths], warn_of_cache)


def warn_of_cache(what: str, where: Path, why: str) -> None:
    """Log a fault of the kernel cache."""
    log.warning(what, path=str(where), reason=why, hint="kernels are compiled again; the start takes longer")


class _NoKernels:
    def __init__(self) -> None:
        self.counts = CacheCounts()

    def wait(self, timeline: Timeline) -> None:
        return


def load_kernel(kernel: Any) -> None:
    """Load a compiled kernel onto the current GPU, and compile its launcher."""
    kernel._init_handles()


class _CompilingAhead:
    """Compiles a model's kernels on threads of its own. Nothing that fails here stops a start: the launch compiles."""

    def __init__(self, counts: CacheCounts, stand_in: DeviceSteps | None, device: torch.device, begun_s: float) -> None:
        self.counts = counts
        self._device = device.index if device.index is not None else torch.cuda.current_device()
        self._begun_s = begun_s
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="kernel-plan")
        self._stages: Future[list[tuple[str, float, float]]] = self._threads.submit(self._compile, stand_in)

    def wait(self, timeline: Timeline) -> None:
        for stage in self._stages.result():
            timeline.add(*stage)
        self._threads.shutdown()

    def _compile(self, stand_in: DeviceSteps | None) -> list[tuple[str, float, float]]:
        """Return the stages for the timeline: name, begin and end."""
        launches: list[KernelLaunch] = []
        try:
            torch.cuda.set_device(self._device)
            launches = find_launches(stand_in, with_rest=False) if stand_in is not None else []
        except Exception as error:
            log.warning("kernels_not_planned", reason=repr(error))
        planned_s = time.time()
        num_threads = min(_MAX_THREADS, usable_cores())
        # Triton compiles for the thread's current GPU.
        for failure in compile_all(launches, num_threads, load_kernel, lambda: torch.cuda.set_device(self._device)):
            log.warning("kernel_not_compiled", reason=repr(failure))
        return [("kernels: plan", self._begun_s, planned_s), ("kernels: compile and load", planned_s, time.time())]
