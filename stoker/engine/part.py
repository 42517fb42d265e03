"""The part of an engine that every rank has: the model's weights, the KV blocks, the rows, and the runner over them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.base.timeline import Timeline
from stoker.checkpoint.weight_files import WeightReadAhead
from stoker.engine.cpu_weights import CpuWeights, choose_cpu_weights
from stoker.engine.draft_model import LoadedDraft
from stoker.engine.gpu_batches import cut_heads
from stoker.engine.gpu_memory import WorkingMemory
from stoker.engine.grammar import Grammars
from stoker.engine.kernel_limits import check_limits
from stoker.engine.kernel_plan import PreparedKernels, build_model, prepare_kernels
from stoker.engine.kv_memory import blocks_per_set
from stoker.engine.memory import ResolvedSettings, with_default_drafters
from stoker.engine.model_identity import kv_identity, number_format
from stoker.engine.ranks.place import RankPlace
from stoker.engine.rows import RowTable
from stoker.engine.runner import Runner
from stoker.engine.split_target import draft_target
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.paged import most_shared
from stoker.kv.blocks.layout import KvLayout
from stoker.kv.blocks.transfer import KvIdentity
from stoker.kv.device.device_kv import DeviceKv
from stoker.layers.mla import exchanged_bytes
from stoker.models.draft import DraftCheckpoint
from stoker.models.family import Model, ModelFamily
from stoker.models.weights import load, parameter_slices
from stoker.parallel.shard import WHOLE, Shard
from stoker.parallel.stages import kept_bytes_per_token

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of the weights. With `random_seed`, no weight files are read. `cache_dir` has the choice of CPU kernels, and
    `draft` are the files of the draft model."""

    folder: Path
    hf: Mapping[str, Any]
    random_seed: int | None = None
    ahead: WeightReadAhead | None = None
    cache_dir: Path | None = None
    draft: DraftCheckpoint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EnginePart:
    """What one rank has of an engine."""

    resolved: ResolvedSettings
    model: Model
    weight_bytes: int
    cpu_weights: CpuWeights
    kv: DeviceKv
    working: WorkingMemory
    kernels: PreparedKernels
    runner: Runner
    max_model_tokens: int  # prompt and output: the model's context, or the KV cache's capacity if smaller


def build_part(
    family: ModelFamily,
    source: ModelSource,
    settings: EngineSettings,
    resolved: ResolvedSettings,
    place: RankPlace,
    grammars: Grammars,
    progress: Progress = lambda stage, done, total: None,
    timeline: Timeline | None = None,
) -> EnginePart:
    """Load a rank's weights and allocate its KV cache. `family` is that of the whole model. Every rank of the first stage has
    the whole draft model."""
    timeline = timeline or Timeline()
    checkpoint = source.draft if place.stages.is_first else None
    family = family.sharded(place.shard) if place.layout.num_ranks > 1 else family
    layout = kv_layout(family, resolved, place.shard)
    kernels = prepare_kernels(settings, family, resolved, layout, checkpoint, place.stages)
    # cuDNN's attention plans every new shape, which takes longer than the attention itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with timeline.stage("weights"):
        wanted = settings.cpu_weights
        if wanted == "auto" and place.layout.tp > 1:
            wanted = "float32"  # each rank would round its part of an input by itself, and answers would depend on --tp
        cpu_weights = choose_cpu_weights(wanted, resolved.device, resolved.dtype, source.hf, source.cache_dir)
        if cpu_weights.kernel is not None:
            resolved = with_default_drafters(resolved, settings)
        model, weight_bytes = _load_model(family, resolved, source, progress, cpu_weights, place)
        draft = None
        if checkpoint is not None:
            target = draft_target(model, place.mesh, family.shape.vocab_size)
            draft = LoadedDraft.load(checkpoint, target, resolved)
        weight_bytes += 0 if draft is None else draft.num_bytes
    with timeline.stage("KV"):
        kv, working = _make_kv(settings, family, resolved, model, draft, place)
    max_model_tokens = max_context(resolved, kv)
    rows = RowTable(
        resolved.max_rows,
        -(-max_model_tokens // kv.layout.block_tokens) + 1,
        family.shape.vocab_size,
        resolved.device,
        grammars,
        has_draft_model=draft is not None,
        num_sets=len(kv.layout.sets),
    )
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
        place.mesh,
        place.stages,
        () if source.draft is None else source.draft.taps,
    )
    return EnginePart(resolved, model, weight_bytes, cpu_weights, kv, working, kernels, runner, max_model_tokens)


def identity_of(family: ModelFamily, source: ModelSource, part: EnginePart) -> KvIdentity:
    """Return the identity of the KV of the whole model, which is the same on all ranks. `family` is that of the whole model."""
    numbers = number_format(part.kv.like.dtype, part.resolved, part.cpu_weights)
    return kv_identity(source.folder, source.hf, kv_layout(family, part.resolved), source.random_seed, numbers)


def tier_share(family: ModelFamily, part: EnginePart) -> float:
    """Return a rank's part of the capacity of the tiers: that of its blocks in the blocks of all ranks. `family` is that of
    the whole model."""
    own, whole = part.kv.layout, kv_layout(family, part.resolved)
    # Several ranks may hold the same heads, of all tokens or of a part of them.
    copies = part.resolved.layout.tp * own.num_heads / own.model_heads / own.num_parts
    own_bytes, all_bytes = (sum(one.layout.block_bytes for one in layout.sets) for layout in (own, whole))
    return own_bytes / (copies * all_bytes)


def _attention_dtype(resolved: ResolvedSettings) -> torch.dtype | None:
    """Return the dtype of attention with the reference kernels, None for the model's. In float64, chunks of a prompt and
    single tokens give the same values after rounding to the model's dtype."""
    return torch.float64 if resolved.device.type == "cpu" and resolved.exact else None


def _load_model(
    family: ModelFamily,
    resolved: ResolvedSettings,
    source: ModelSource,
    progress: Progress,
    cpu_weights: CpuWeights,
    place: RankPlace,
) -> tuple[Model, int]:
    """Return the model, with its weights in the layout of the kernels, and the size of the weights in bytes."""
    model = build_model(family, resolved, resolved.device)
    model.join(place.mesh)
    if resolved.device.type == "cuda":
        check_limits(model, family.shape)
    if source.random_seed is None:
        load(model, family.rules, family.ignored, source.folder, partial(progress, "loading weights"), source.ahead)
    else:
        _randomise(model, family, source.random_seed)
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
    place: RankPlace,
) -> tuple[DeviceKv, WorkingMemory]:
    """Allocate the KV cache: as many blocks as fit besides the working memory of a step, on every rank."""
    if settings.ranks.per_gpu > 1:
        place.agree_on(0)  # all ranks of a GPU have loaded their weights before one of them measures what is free
    layout = kv_layout(family, resolved, place.shard)
    partial_bytes = 0
    if resolved.exact and resolved.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(resolved.device)[0] // settings.ranks.per_gpu
        partial_bytes = _partial_bytes(family, resolved, layout, draft, free_bytes)
    bytes_per_token = model.bytes_per_token + (0 if draft is None else draft.model.bytes_per_token)
    working = working_memory(family, resolved, place.shard, bytes_per_token, draft, partial_bytes)
    group = None if draft is None else draft.kv_group
    if group is not None and layout.sets[0].reach.is_bounded:
        raise ConfigError("a draft model needs a model with layers that see all tokens; use --drafter without model:")
    blocks = [place.agree_on(count) for count in blocks_per_set(settings, resolved, layout, working, group)]
    return DeviceKv(layout, blocks, resolved.device, resolved.dtype, group), working


def working_memory(
    family: ModelFamily,
    resolved: ResolvedSettings,
    shard: Shard,
    bytes_per_token: int,
    draft: LoadedDraft | None = None,
    partial_bytes: int = 0,
) -> WorkingMemory:
    """Return the plan of a rank's memory besides weights and KV. `bytes_per_token` are those of all models together.
    `partial_bytes`: what numerics=exact adds."""
    context_bytes = partial(exchanged_bytes, family.kv_groups[0].width, shard.cp, resolved.dtype.itemsize)
    if shard.layers is not None:
        bytes_per_token += kept_bytes_per_token(family.shape.hidden_size, resolved.dtype.itemsize)
    return WorkingMemory.plan(
        resolved.step_tokens,
        resolved.captured_tokens,
        resolved.max_rows,
        family.shape.vocab_size,
        resolved.dtype.itemsize,
        bytes_per_token,
        resolved.keeps_spare,
        partial_bytes,
        0 if draft is None else draft.logits_bytes(resolved.max_rows),
        shard.has_ends,
        context_bytes,
    )


def max_context(resolved: ResolvedSettings, kv: DeviceKv) -> int:
    """Return the longest context: the model's, or what the KV cache holds. A set with a bounded reach limits nothing."""
    if kv.layout.sets[0].reach.is_bounded:
        return resolved.max_model_tokens
    return min(resolved.max_model_tokens, kv.sets[0].num_blocks * resolved.block_tokens)


def _partial_bytes(
    family: ModelFamily, resolved: ResolvedSettings, layout: KvLayout, draft: LoadedDraft | None, free_bytes: int
) -> int:
    """Return the memory for attention's partial results with numerics=exact, if the KV cache took all free memory."""
    shape, max_blocks = family.shape, -(-resolved.max_model_tokens // layout.block_tokens) + 1
    most_blocks = free_bytes // min(one.layout.block_bytes for one in layout.sets)
    groups = [(shape.num_heads * layout.num_parts, group) for group in layout.groups]
    if draft is not None:
        groups.append((draft.num_heads, draft.kv_group))
    heads = [cut_heads(num_heads, group) for num_heads, group in groups]
    cutter = ExactCutter.for_model(heads, layout.block_tokens, resolved.dtype, max_blocks, most_blocks)
    return cutter.partial_bytes(resolved.max_rows, most_shared(heads), max(group.width for _, group in groups))


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


def kv_layout(family: ModelFamily, resolved: ResolvedSettings, shard: Shard = WHOLE) -> KvLayout:
    """Return the layout of the KV blocks of a rank. `family` is the rank's part of the model."""
    heads = min(group.num_heads for group in family.kv_groups)
    piece = shard.kv_heads(heads)
    return KvLayout(
        groups=family.kv_groups,
        block_tokens=resolved.block_tokens,
        dtype=str(resolved.kv_dtype).removeprefix("torch."),
        dtype_bytes=resolved.kv_dtype.itemsize,
        first_head=piece.index * (heads // piece.of),
        held_heads=None if piece.is_whole else heads // piece.of,
        part=shard.context.index,
        num_parts=shard.cp,
    )
