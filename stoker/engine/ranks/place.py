"""RankPlace: what a rank holds, and its connections to the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stoker.base.errors import ConfigError
from stoker.engine.kernel_plan import build_model
from stoker.engine.memory import ResolvedSettings
from stoker.models.family import ModelFamily
from stoker.parallel.collectives import Collectives
from stoker.parallel.mesh import ALONE, Mesh, mesh_of
from stoker.parallel.shard import WHOLE, RankLayout, Shard, shards_of
from stoker.parallel.stages import ONE_STAGE, PipelineStage, Stages

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of an engine. `agree_on` returns the smallest of the ranks' numbers."""

    rank: int
    layout: RankLayout
    shard: Shard
    mesh: Mesh
    stages: Stages
    agree_on: Callable[[int], int]

    @property
    def tells_when_to_sample(self) -> bool:
        """True if other ranks of the first stage sample too, some time after the launch of a step. Rank 0 tells them when."""
        return self.stages.is_deferred and self.layout.tp > 1


ALONE_PLACE = RankPlace(0, RankLayout(), WHOLE, ALONE, ONE_STAGE, lambda number: number)

# Returns the collectives of this rank within a group, given the group's name and its ranks.
MakeGroup = Callable[[str, tuple[int, ...]], Collectives]


def find_place(
    rank: int, family: ModelFamily, resolved: ResolvedSettings, make_group: MakeGroup, control: Collectives
) -> RankPlace:
    """Return a rank's part of the model and its connections. `control` is the group of all ranks, on the host."""
    layout = resolved.layout
    shards = plan_shards(family, resolved)
    shard = shards[rank]
    stage, ranks = layout.stage_of(rank), range(layout.num_ranks)
    mesh: Mesh = ALONE
    if layout.tp > 1:
        first = stage * layout.tp
        in_stage = make_group(f"stage {stage}", tuple(range(first, first + layout.tp)))
        context: Collectives | None = None
        if layout.cp > 1:
            holders = tuple(first + rank for rank in shard.context_ranks)
            context = in_stage if layout.cp == layout.tp else make_group(f"context {holders[0]}", holders)
        mesh = mesh_of(in_stage, shard, context)
    stages: Stages = ONE_STAGE
    if layout.pp > 1:
        same_part = tuple(r for r in ranks if r % layout.tp == shard.tp_rank)
        forth, back = (make_group(f"pipeline {shard.tp_rank} {way}", same_part) for way in ("forth", "back"))
        layers = [one.layers_of(family.shape.num_layers) for one in shards[:: layout.tp]]
        stages = PipelineStage(forth, layers, family.shape.hidden_size, resolved.dtype, resolved.device, back)

    def agree_on(number: int) -> int:
        return min(int(one) for one in control.gather(torch.tensor([number])))

    return RankPlace(rank, layout, shard, mesh, stages, agree_on)


def plan_shards(family: ModelFamily, resolved: ResolvedSettings) -> list[Shard]:
    """Return the shard of each rank. Stages are balanced by the bytes of their weights. Raises ConfigError for what cannot be
    split, on every rank and before anything is loaded."""
    shards = shards_of(resolved.layout, *layer_bytes(family, resolved))
    for shard in shards:
        family.sharded(shard)
    return shards


def layer_bytes(family: ModelFamily, resolved: ResolvedSettings) -> tuple[list[int], int]:
    """Return the bytes of each layer's weights, and those of the embedding, the last norm and the head.

    Memory is what GPUs lack. On a CPU stages should take equal times, and an embedding that is not the head too takes none."""
    layers: dict[int, int] = {}
    ends: dict[str, int] = {}
    for name, parameter in build_model(family, resolved, torch.device("meta")).named_parameters():
        first, _, rest = name.partition(".")
        if first == "layers":
            number = int(rest.partition(".")[0])
            layers[number] = layers.get(number, 0) + parameter.nbytes
        else:
            ends[first] = ends.get(first, 0) + parameter.nbytes
    if resolved.device.type == "cpu" and "head" in ends:
        del ends["embedding"]
    return [layers[i] for i in sorted(layers)], sum(ends.values())


def compare_ranks(control: Collectives, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same model, version and settings. Raises ConfigError, which names the rank that differs
    from rank 0 and the facts in which it differs."""
    names = sorted(facts)
    digests = b"".join(hashlib.sha256(facts[name].encode()).digest()[:_DIGEST_BYTES] for name in names)
    parts = control.gather(torch.frombuffer(bytearray(digests), dtype=torch.uint8))
    found = [part.view(-1, _DIGEST_BYTES) for part in parts]
    for rank, part in enumerate(found):
        if differing := differing_facts(names, found[0].tolist(), part.tolist()):
            raise ConfigError(
                f"rank {rank} differs from rank 0 in {', '.join(differing)}; start all ranks with the same files and settings"
            )


def differing_facts(names: Sequence[str], first: list[list[int]], other: list[list[int]]) -> list[str]:
    return [name for name, a, b in zip(names, first, other, strict=True) if a != b]
