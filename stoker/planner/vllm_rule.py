"""The layout that vLLM's documentation proposes, for comparison.

Its rule: one GPU if the model fits; else tensor parallelism over the GPUs of a machine; if the model does not fit on one
machine, also as many pipeline stages as there are machines. vLLM takes a share of each GPU (gpu_memory_utilization) and keeps
the rest free. Its tensor parallelism keeps latent KV (MLA) on every rank, unless decode context parallelism is turned on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.base.errors import StokerError
from stoker.parallel.shard import RankLayout
from stoker.planner.gpus import GpuMachines

MEMORY_SHARE = 0.92  # the default of gpu_memory_utilization


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """vLLM's layout, with the weights and the working memory that Stoker plans. `kv_tokens` are of one replica."""

    tp: int
    pp: int
    fits: bool = False
    kv_gib_total: float = 0.0
    kv_tokens: int = 0
    why: str = ""


# Returns the KV of a layout, in GiB and in tokens of one replica. Raises StokerError if none fits.
MeasureKv = Callable[[RankLayout], tuple[float, int]]


def vllm_layout(gpus: GpuMachines, context: int, kv_of: MeasureKv) -> VllmLayout:
    """Return the first layout of the rule that holds a sequence of `context` tokens, or the last one with the reason why it
    does not."""
    per_machine = min(gpus.machines)
    tried = [RankLayout(), RankLayout(per_machine), RankLayout(per_machine, len(gpus.machines))]
    found = VllmLayout(1, 1)
    for layout in dict.fromkeys(tried):
        try:
            kv_gib, kv_tokens = kv_of(layout)
        except StokerError as error:
            found = VllmLayout(layout.tp, layout.pp, why=error.message)
            continue
        fits = kv_tokens >= context
        why = "" if fits else f"KV for {kv_tokens:,} tokens is left"
        found = VllmLayout(layout.tp, layout.pp, fits, round(kv_gib, 2), kv_tokens, why)
        if fits:
            break
    return found
