"""Every layout that a model can have on given GPUs: whether it fits, how much KV it leaves, and its estimated speed.

Weights, working memory and KV are computed as a worker computes them at its start, for each rank, on tensors without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.gpu_memory import CONTEXT_BYTES
from stoker.engine.kernel_plan import build_model
from stoker.engine.kv_memory import divide_memory
from stoker.engine.memory import ResolvedSettings, resolve_on
from stoker.engine.part import kv_layout, working_memory
from stoker.engine.ranks.place import layer_bytes
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.models.family import family_of
from stoker.parallel.shard import RankLayout, Shard, shards_of
from stoker.planner.gpus import GpuMachines
from stoker.planner.rates import EstimatedRates, StageWork, estimate

_GIB = 1 << 30
_COMMUNICATION_BYTES = 400 << 20  # of the collectives of a rank; an assumption
_MAX_ROWS = 512
_NOT_ON_GPUS = "not yet served on GPUs: their kernels run whole layers and all experts of a layer"


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One layout. Sizes are of one worker, which has `tp * pp` GPUs."""

    tp: int
    pp: int
    ep: int
    cp: int = 1  # a context split is not supported yet
    workers: int = 0  # how many such workers the GPUs hold
    fits: bool = False
    served: bool = True  # False: `stoker serve` refuses it on GPUs
    weights_gib_per_gpu: float = 0.0  # of the rank that has the most
    working_gib_per_gpu: float = 0.0
    kv_gib_total: float = 0.0
    kv_tokens: int = 0
    batch: int = 0  # sequences of the planned context that the KV cache holds
    decode_tokens_per_s: float = 0.0  # of all workers, estimated
    prefill_tokens_per_s: float = 0.0
    between_tokens_ms: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """All layouts of a model on some GPUs. `picked` is the index of the proposed one, None if none fits."""

    model: str
    gpus: str
    context: int
    layouts: list[PlannedLayout]
    picked: int | None
    assumptions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _RankSizes:
    weights: int
    working: int
    kv_bytes: int  # that the rank's blocks take
    kv_tokens: int
    work: StageWork


def plan_layouts(hf: Mapping[str, Any], name: str, gpus: GpuMachines, context: int | None = None) -> LayoutPlan:
    """Plan all layouts of the model of a config.json. `context` is the length of the sequences to plan for."""
    family = family_of(hf, name)
    assert isinstance(family, DecoderFamily), f"{name}: only families of decoders can be planned"
    if context is not None and context < 1:
        raise ConfigError(f"--context {context}: give a number of tokens, at least 1")
    context = min(context or 32_768, family.shape.max_positions)
    longest = max(context, min(family.shape.max_positions, 131_072))
    settings = EngineSettings(device="cuda", dtype="bfloat16", max_model_tokens=longest)
    resolved = resolve_on(torch.device("cuda"), settings, family.shape)
    sizes = layer_bytes(family, resolved)
    layouts = [_planned(family, settings, resolved, layout, gpus, context, sizes) for layout in _candidates(gpus)]
    fitting = [i for i, one in enumerate(layouts) if one.fits]
    picked = max(
        fitting, key=lambda i: (layouts[i].served, layouts[i].decode_tokens_per_s, -layouts[i].tp), default=None
    )
    assumptions = [
        f"bfloat16 activations and KV, sequences of {context:,} tokens, at most {_MAX_ROWS} at a time",
        f"{_COMMUNICATION_BYTES / _GIB:.1f} GiB per GPU for communication, if a worker has several GPUs",
        "speeds are estimates from the GPU's bandwidth and arithmetic, not measurements",
    ]
    return LayoutPlan(name, str(gpus), context, layouts, picked, assumptions)


def _candidates(gpus: GpuMachines) -> Iterator[RankLayout]:
    """Yield layouts whose workers fill all GPUs. The ranks of a stage are on one machine."""
    most = min(gpus.machines)
    for tp in (n for n in range(1, most + 1) if most % n == 0):
        for pp in (n for n in range(1, gpus.total // tp + 1) if gpus.total % (tp * n) == 0):
            for ep in sorted({1, tp}):
                yield RankLayout(tp, pp, ep)


def _planned(
    family: DecoderFamily,
    settings: EngineSettings,
    resolved: ResolvedSettings,
    layout: RankLayout,
    gpus: GpuMachines,
    context: int,
    weights: tuple[list[int], int],
) -> PlannedLayout:
    workers = gpus.total // layout.num_ranks
    served = layout.pp == layout.ep == 1
    given: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "workers": workers, "served": served}
    try:
        shards = shards_of(layout, *weights)
        stages = [shards[stage * layout.tp] for stage in range(layout.pp)]
        sizes = [_sizes(family, settings, resolved, shard, layout, gpus.kind.memory_gib) for shard in stages]
    except StokerError as error:
        return PlannedLayout(**given, why=error.message)
    given |= {
        "weights_gib_per_gpu": round(max(one.weights for one in sizes) / _GIB, 2),
        "working_gib_per_gpu": round(max(one.working for one in sizes) / _GIB, 2),
    }
    tokens = min(one.kv_tokens for one in sizes)
    if tokens < context:
        needed = max(one.weights + one.working for one in sizes) / _GIB
        what = f"{needed:.1f} of {gpus.kind.memory_gib:.1f} GiB per GPU go to weights and working memory"
        return PlannedLayout(**given, kv_tokens=tokens, why=f"{what}, which leaves KV for {tokens:,} tokens")
    batch = min(_MAX_ROWS, tokens // context)
    rates: EstimatedRates = estimate([one.work for one in sizes], gpus.kind, layout.tp, batch, context)
    return PlannedLayout(
        **given,
        fits=True,
        kv_gib_total=round(sum(one.kv_bytes for one in sizes) * layout.tp / _GIB, 2),
        kv_tokens=tokens,
        batch=batch,
        decode_tokens_per_s=round(workers * rates.decode_tokens_per_s),
        prefill_tokens_per_s=round(workers * rates.prefill_tokens_per_s),
        between_tokens_ms=round(rates.between_tokens_ms, 1),
        why="" if served else _NOT_ON_GPUS,
    )


def _sizes(
    family: DecoderFamily,
    settings: EngineSettings,
    resolved: ResolvedSettings,
    shard: Shard,
    layout: RankLayout,
    memory_gib: float,
) -> _RankSizes:
    """Return what a rank needs and has left. Raises ConfigError if nothing is left for KV."""
    part = family.sized(shard)
    model = build_model(part, resolved, torch.device("meta"))
    sparse = {i for i, layer in enumerate(part.layers) if isinstance(layer.mlp, MoeConfig)}
    total = experts = 0
    for name, parameter in model.named_parameters():
        total += parameter.nbytes
        words = name.split(".")
        if words[0] == "layers" and int(words[1]) in sparse and words[2:4] in (["mlp", "gate_up"], ["mlp", "down"]):
            experts += parameter.nbytes
    tables = sum(buffer.nbytes for buffer in model.buffers())
    with torch.no_grad():
        model.pack()
    taken = (
        working_memory(part, resolved, shard, model).total_bytes
        + CONTEXT_BYTES
        + (_COMMUNICATION_BYTES if layout.num_ranks > 1 else 0)
    )
    budget = int(memory_gib * _GIB) - total - tables - taken
    kv = kv_layout(part, resolved, shard)
    block_bytes = [one.layout.block_bytes for one in kv.sets]
    if budget <= 0:
        raise ConfigError(
            f"weights of {total / _GIB:.1f} GiB and working memory of {taken / _GIB:.1f} GiB do not fit into "
            f"{memory_gib:.1f} GiB"
        )
    blocks = divide_memory(budget, settings, resolved, kv)
    moe = next((layer.mlp for layer in part.layers if isinstance(layer.mlp, MoeConfig)), None)
    work = StageWork(
        num_layers=part.shape.num_layers,
        dense_bytes=total - experts,
        expert_bytes=experts,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.routing.top_k,
        kv_token_bytes=block_bytes[0] // resolved.block_tokens,
        flop_per_token=2.0 * part.shape.active_weights * layout.tp,
        hidden_bytes=part.shape.hidden_size * resolved.dtype.itemsize,
    )
    kv_bytes = sum(count * size for count, size in zip(blocks, block_bytes, strict=True))
    return _RankSizes(total + tables, taken, kv_bytes, blocks[0] * resolved.block_tokens, work)
