"""What one rank of a layout needs and has left for KV, computed as a worker computes it at its start, on tensors without
memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.base.config import EngineSettings
from stoker.base.errors import ConfigError
from stoker.engine.gpu_memory import CONTEXT_BYTES
from stoker.engine.kernel_plan import build_model
from stoker.engine.kv_memory import divide_memory, max_sequences
from stoker.engine.memory import ResolvedSettings
from stoker.engine.part import kv_layout, working_memory
from stoker.kv.blocks.layout import KvLayout
from stoker.layers.mla import MlaConfig
from stoker.layers.moe import MoeConfig
from stoker.models.decoder_family import DecoderFamily
from stoker.parallel.shard import Shard
from stoker.planner.rates import StageWork

GIB = 1 << 30
COMMUNICATION_BYTES = 400 << 20  # of the collectives of a rank; an assumption


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """The memory of one rank, without KV."""

    weights: int
    working: int
    unused: int  # of `working`: the reserve, and the context of the spare engine
    kv: KvLayout
    work: StageWork


@dataclass(frozen=True, slots=True)
class KvRoom:
    """The KV of one rank."""

    num_bytes: int
    num_tokens: int
    sequences: int  # of the planned length that can run at a time


@dataclass(frozen=True, slots=True)
class PartSizes:
    """The sizes of a rank's part of a model, in bytes."""

    weights: int
    experts: int  # of `weights`
    tables: int
    per_token: int  # of a forward pass


def part_sizes(family: DecoderFamily, resolved: ResolvedSettings, shard: Shard) -> PartSizes:
    """Measure a rank's part of a model. `family` is that of the whole model. Raises ConfigError for what cannot be split."""
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
    return PartSizes(total, experts, tables, model.bytes_per_token)


def rank_needs(
    family: DecoderFamily, resolved: ResolvedSettings, shard: Shard, num_ranks: int, sizes: PartSizes
) -> RankNeeds:
    """Return what a rank needs. `family` is that of the whole model, `sizes` are those of the rank's part."""
    part = family.sized(shard)
    working = working_memory(part, resolved, shard, sizes.per_token)
    taken = working.total_bytes + CONTEXT_BYTES + (COMMUNICATION_BYTES if num_ranks > 1 else 0)
    kv = kv_layout(part, resolved, shard)
    moe = next((layer.mlp for layer in part.layers if isinstance(layer.mlp, MoeConfig)), None)
    attention = part.layers[0].attention
    exchanged = 0
    if shard.cp > 1 and isinstance(attention, MlaConfig):
        exchanged = attention.num_heads * shard.cp * (2 * attention.latent + attention.rope) * resolved.dtype.itemsize
    work = StageWork(
        num_layers=part.shape.num_layers,
        dense_bytes=sizes.weights - sizes.experts,
        expert_bytes=sizes.experts,
        num_experts=0 if moe is None else moe.num_experts,
        top_k=0 if moe is None else moe.routing.top_k,
        kv_token_bytes=kv.sets[0].layout.block_bytes / resolved.block_tokens,
        flop_per_token=2.0 * part.shape.active_weights * shard.tp,
        hidden_bytes=part.shape.hidden_size * resolved.dtype.itemsize,
        exchanged_bytes=exchanged,
    )
    unused = working.reserve_bytes + working.spare_bytes
    return RankNeeds(sizes.weights + sizes.tables, taken, unused, kv, work)


def rank_kv(
    needs: RankNeeds,
    memory_bytes: int,
    settings: EngineSettings,
    resolved: ResolvedSettings,
    context: int,
    unused: int | None = None,
) -> KvRoom:
    """Return the KV that fits on a rank beside its needs. Raises ConfigError if none does. `unused` replaces the part of the
    working memory that stays free."""
    working = needs.working if unused is None else needs.working - needs.unused + unused
    budget = memory_bytes - needs.weights - working
    if budget <= 0:
        raise ConfigError(
            f"weights of {needs.weights / GIB:.1f} GiB and working memory of {working / GIB:.1f} GiB do not fit into "
            f"{memory_bytes / GIB:.1f} GiB"
        )
    blocks = divide_memory(budget, settings, resolved, needs.kv)
    sizes = [one.layout.block_bytes for one in needs.kv.sets]
    return KvRoom(
        sum(count * size for count, size in zip(blocks, sizes, strict=True)),
        blocks[0] * resolved.block_tokens,
        max_sequences(blocks, resolved, needs.kv, context),
    )
