"""Every layout that a model can have on given GPUs: whether it fits, how much KV it leaves, and its estimated speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.base.config import EngineSettings, KvSettings
from stoker.base.errors import ConfigError, StokerError
from stoker.engine.memory import ResolvedSettings, resolve_on
from stoker.engine.ranks.place import layer_bytes
from stoker.models.decoder_family import DecoderFamily
from stoker.models.family import family_of
from stoker.parallel.shard import RankLayout, Shard, shards_of
from stoker.planner.gpus import GpuMachines
from stoker.planner.rank_sizes import COMMUNICATION_BYTES, GIB, PartSizes, RankNeeds, part_sizes, rank_kv, rank_needs
from stoker.planner.rates import StageWork, estimate
from stoker.planner.vllm_rule import MEMORY_SHARE, VllmLayout, vllm_layout

_DEFAULT_CONTEXT = 32_768


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """One layout. Sizes are of one worker, which has `tp * pp` GPUs."""

    tp: int
    pp: int
    ep: int
    cp: int
    workers: int = 0  # how many such workers the GPUs hold
    fits: bool = False
    weights_gib_per_gpu: float = 0.0  # of the rank that has the most
    working_gib_per_gpu: float = 0.0
    kv_gib_total: float = 0.0
    kv_tokens: int = 0
    batch: int = 0  # sequences of the planned context that run at a time
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
    mean_tokens: int | None  # --kv-mean-tokens of the planned workers; None: the default
    layouts: list[PlannedLayout]
    picked: int | None
    vllm: VllmLayout
    assumptions: list[str] = field(default_factory=list)


def plan_layouts(hf: Mapping[str, Any], name: str, gpus: GpuMachines, context: int | None = None) -> LayoutPlan:
    """Plan all layouts of the model of a config.json. `context` is the length of the sequences to plan for. If it is given,
    memory is divided between the layers for this length."""
    planner = _LayoutPlanner(hf, name, gpus, context)
    context, mean_tokens = planner.context, planner.mean_tokens
    layouts = [planner.planned(layout) for layout in _candidates(gpus, planner.family)]
    fitting = [i for i, one in enumerate(layouts) if one.fits]
    picked = max(fitting, key=lambda i: (layouts[i].decode_tokens_per_s, -layouts[i].tp), default=None)
    assumptions = [
        f"bfloat16 activations and KV, sequences of {context:,} tokens, at most {planner.max_rows} at a time",
        f"{COMMUNICATION_BYTES / GIB:.1f} GiB per GPU for communication, if a worker has several GPUs",
        "speeds are estimates from the GPU's bandwidth and arithmetic, not measurements",
    ]
    vllm = vllm_layout(gpus, context, planner.vllm_kv)
    return LayoutPlan(name, str(gpus), context, mean_tokens, layouts, picked, vllm, assumptions)


def stages_of(
    hf: Mapping[str, Any], name: str, gpus: GpuMachines, layout: RankLayout, context: int | None = None
) -> list[StageWork]:
    """Return what the first rank of each stage of a layout reads and computes."""
    return [one.work for one in _LayoutPlanner(hf, name, gpus, context).needs(layout)]


def _candidates(gpus: GpuMachines, family: DecoderFamily) -> Iterator[RankLayout]:
    """Yield layouts whose workers fill all GPUs. The ranks of a stage are on one machine. Only experts can be split by their
    number, and only latent KV by context."""
    most = min(gpus.machines)
    is_latent = all(group.kind == "latent" for group in family.kv_groups)
    for tp in (n for n in range(1, most + 1) if most % n == 0):
        for pp in (n for n in range(1, gpus.total // tp + 1) if gpus.total % (tp * n) == 0):
            for ep in sorted({1, tp if family.has_experts else 1}):
                for cp in sorted({1, tp if is_latent else 1}):
                    yield RankLayout(tp, pp, ep, cp)


class _LayoutPlanner:
    """Plans layouts of one model on one kind of GPU."""

    def __init__(self, hf: Mapping[str, Any], name: str, gpus: GpuMachines, context: int | None) -> None:
        family = family_of(hf, name)
        assert isinstance(family, DecoderFamily), f"{name}: only families of decoders can be planned"
        if context is not None and context < 1:
            raise ConfigError(f"--context {context}: give a number of tokens, at least 1")
        mean_tokens = None if context is None else min(context, family.shape.max_positions)
        context = mean_tokens or min(_DEFAULT_CONTEXT, family.shape.max_positions)
        self.family, self.context, self.mean_tokens = family, context, mean_tokens
        self._gpus = gpus
        longest = max(context, min(family.shape.max_positions, 131_072))
        self._settings = EngineSettings(
            device="cuda", dtype="bfloat16", max_model_tokens=longest, kv=KvSettings(mean_tokens=mean_tokens)
        )
        self._layers = layer_bytes(family, self._resolved(RankLayout()))
        self._sizes: dict[tuple[object, ...], PartSizes] = {}
        self._memory = int(gpus.kind.memory_gib * GIB)
        self.max_rows = self._resolved(RankLayout()).max_rows

    def _resolved(self, layout: RankLayout) -> ResolvedSettings:
        return resolve_on(torch.device("cuda"), self._settings, self.family.shape, layout)

    def needs(self, layout: RankLayout) -> list[RankNeeds]:
        """Return what the first rank of each stage needs."""
        shards = shards_of(layout, *self._layers)
        stages = [shards[stage * layout.tp] for stage in range(layout.pp)]
        options = (self.family, self._resolved(layout))
        return [rank_needs(*options, shard, layout.num_ranks, self._part_sizes(shard)) for shard in stages]

    def _part_sizes(self, shard: Shard) -> PartSizes:
        """Measure a part, or find that of another stage or layout whose layers have the same sizes."""
        sizes, _ends = self._layers
        layers = tuple(sizes[i] for i in shard.layers_of(len(sizes)))
        key = (shard.tp, shard.ep, shard.has_ends, layers)
        if key not in self._sizes:
            self._sizes[key] = part_sizes(self.family, self._resolved(RankLayout()), shard)
        return self._sizes[key]

    def planned(self, layout: RankLayout) -> PlannedLayout:
        workers, context = self._gpus.total // layout.num_ranks, self.context
        given: dict[str, Any] = {"workers": workers}
        for name in ("tp", "pp", "ep", "cp"):
            given[name] = getattr(layout, name)
        try:
            needs = self.needs(layout)
            given |= {
                "weights_gib_per_gpu": round(max(one.weights for one in needs) / GIB, 2),
                "working_gib_per_gpu": round(max(one.working for one in needs) / GIB, 2),
            }
            fitting = (self._memory, self._settings, self._resolved(layout), context)
            kv = [rank_kv(one, *fitting) for one in needs]
        except StokerError as error:
            return PlannedLayout(**given, why=error.message)
        tokens = min(one.num_tokens for one in kv)
        if tokens < context:
            needed = max(one.weights + one.working for one in needs) / GIB
            what = f"{needed:.1f} of {self._memory / GIB:.1f} GiB per GPU go to weights and working memory"
            return PlannedLayout(**given, kv_tokens=tokens, why=f"{what}, which leaves KV for {tokens:,} tokens")
        batch = min(one.sequences for one in kv)
        rates = estimate([one.work for one in needs], self._gpus.kind, layout.tp, batch, context)
        return PlannedLayout(
            **given,
            fits=True,
            kv_gib_total=round(sum(one.num_bytes for one in kv) * layout.tp / GIB, 2),
            kv_tokens=tokens,
            batch=batch,
            decode_tokens_per_s=round(workers * rates.decode_tokens_per_s),
            prefill_tokens_per_s=round(workers * rates.prefill_tokens_per_s),
            between_tokens_ms=round(rates.between_tokens_ms, 1),
        )

    def vllm_kv(self, layout: RankLayout) -> tuple[float, int]:
        """Return the KV of a layout in vLLM's share of the memory. The rest of each GPU is its reserve."""
        fitting = (int(MEMORY_SHARE * self._memory), self._settings, self._resolved(layout), self.context)
        try:
            needs = self.needs(layout)
        except ConfigError:  # vLLM also splits experts that Stoker gives to ranks as a whole
            needs = self.needs(RankLayout(layout.tp, layout.pp, layout.tp))
        kv = [rank_kv(one, *fitting, unused=0) for one in needs]
        return sum(one.num_bytes for one in kv) * layout.tp / GIB, min(one.num_tokens for one in kv)
