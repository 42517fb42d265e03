"""Closed-form estimates of a worker's steps from a GPU's published bandwidth and FLOP/s. They are not measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.base.errors import ConfigError
from stoker.parallel.shard import RankLayout
from stoker.planner.gpus import GpuMachines
from stoker.planner.layouts import PlannedLayout, plan_layouts, stages_of
from stoker.planner.rates import attention_pair_s, decode_step_s, prefill_token_s

KNOTS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192)


@dataclass(frozen=True, slots=True)
class EstimatedWorker:
    """The steps of one worker in the proposed layout."""

    gpus: int
    knots: tuple[int, ...]
    knot_s: list[float]
    context_s: float  # for each token of context
    attention_s: float  # for each pair of a prompt token and a token before it
    kv_tokens: int
    kv_token_bytes: int
    layout: PlannedLayout


def estimate_worker(hf: Mapping[str, Any], name: str, gpus: GpuMachines, context: int | None) -> EstimatedWorker:
    """Estimate one worker of the layout that `stoker plan` proposes."""
    plan = plan_layouts(hf, name, gpus, context)
    if plan.picked is None:
        raise ConfigError(f"{name} does not fit on {gpus}: {plan.layouts[0].why}; use more GPUs or a smaller --context")
    layout = plan.layouts[plan.picked]
    tp, kind = layout.tp, gpus.kind
    stages = stages_of(hf, name, gpus, RankLayout(layout.tp, layout.pp, layout.ep, layout.cp), context)
    token_s = max(prefill_token_s(stage, kind, tp) for stage in stages) * len(stages)

    def step_s(tokens: int, context_tokens: int) -> float:
        memory_s = sum(decode_step_s(stage, kind, tp, tokens, context_tokens) for stage in stages)
        return max(memory_s, token_s * tokens)

    empty_s, full_s = (sum(decode_step_s(stage, kind, tp, 1, size) for stage in stages) for size in (0, 100_000))
    return EstimatedWorker(
        gpus=layout.tp * layout.pp,
        knots=KNOTS,
        knot_s=[step_s(tokens, 0) for tokens in KNOTS],
        context_s=(full_s - empty_s) / 100_000,
        attention_s=sum(attention_pair_s(stage, kind, tp) for stage in stages),
        kv_tokens=layout.kv_tokens,
        kv_token_bytes=round(sum(stage.kv_token_bytes for stage in stages) * tp),
        layout=layout,
    )
