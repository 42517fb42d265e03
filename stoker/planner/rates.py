"""Estimated speed of a layout. These are estimates from published numbers of the GPU, and not measurements.

Decode is bound by memory: a step reads the weights that its tokens need, and their KV. Prefill is bound by arithmetic. The
shares of the GPU's peak that a step reaches (`DECODE_SHARE`, `PREFILL_SHARE`) are what Stoker reached on one H200 with dense
and MoE models in bf16. The cost of communication is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.planner.gpus import GpuKind

DECODE_SHARE = 0.70
PREFILL_SHARE = 0.60
_REDUCE_S = 10e-6  # of one all-reduce of a few kilobytes within a machine
_SEND_S = 20e-6  # from one stage to the next
_LAUNCH_S = 2e-6  # per layer of a captured step, beside its memory traffic


@dataclass(frozen=True, slots=True)
class StageWork:
    """What one rank of a stage reads and computes."""

    num_layers: int
    dense_bytes: int  # weights that every step reads
    expert_bytes: int  # weights of all experts of the rank
    num_experts: int  # of a layer, on all ranks; 0: none
    top_k: int
    kv_token_bytes: float  # KV of one token of context
    flop_per_token: float  # without attention
    hidden_bytes: int  # of one token's hidden state
    exchanged_bytes: int  # of one token's queries and results in one layer, if ranks split the context


@dataclass(frozen=True, slots=True)
class EstimatedRates:
    """Tokens per second of one worker, and the time between two tokens of a sequence."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    between_tokens_ms: float


def estimate(stages: list[StageWork], gpu: GpuKind, tp: int, batch: int, context: int) -> EstimatedRates:
    """Estimate a layout with `batch` sequences of `context` tokens each. With several stages, as many parts of the batch
    are in flight as there are stages."""
    part = max(1, -(-batch // len(stages)))
    times = [decode_step_s(stage, gpu, tp, part, context) + (_SEND_S if len(stages) > 1 else 0.0) for stage in stages]
    prefill_s = max(prefill_token_s(stage, gpu, tp) for stage in stages)
    in_flight = min(len(stages), batch)
    round_s = max(max(times) * in_flight, sum(times))
    return EstimatedRates(batch / round_s, 1 / prefill_s, round_s * 1e3)


def prefill_token_s(stage: StageWork, gpu: GpuKind, tp: int) -> float:
    """Return the time of one prompt token in a stage."""
    return stage.flop_per_token / (gpu.bf16_tflops * 1e12 * PREFILL_SHARE * tp) + _reduce_s(stage, gpu, tp)


def attention_pair_s(stage: StageWork, gpu: GpuKind, tp: int) -> float:
    """Return the time of the attention of one prompt token to one token before it. Heads are taken to be as wide as the
    hidden state together, in bfloat16."""
    flop = 4.0 * stage.hidden_bytes / 2 * stage.num_layers
    return flop / (gpu.bf16_tflops * 1e12 * PREFILL_SHARE * tp)


def decode_step_s(stage: StageWork, gpu: GpuKind, tp: int, rows: int, context: int) -> float:
    """Return the time of a decode-only step of a stage, with `rows` sequences of `context` tokens each."""
    touched = 1.0
    if stage.num_experts:
        touched = 1 - (1 - stage.top_k / stage.num_experts) ** rows
    read_bytes = stage.dense_bytes + touched * stage.expert_bytes + rows * context * stage.kv_token_bytes
    seconds = read_bytes / (gpu.bandwidth_gb_s * 1e9 * DECODE_SHARE) + stage.num_layers * _LAUNCH_S
    if tp > 1:
        seconds += 2 * stage.num_layers * _REDUCE_S + rows * _reduce_s(stage, gpu, tp)
    if stage.exchanged_bytes:
        exchange_s = rows * stage.exchanged_bytes / (gpu.link_gb_s * 1e9)
        seconds += stage.num_layers * (2 * _REDUCE_S + exchange_s)
    return seconds


def _reduce_s(stage: StageWork, gpu: GpuKind, tp: int) -> float:
    """Return the time to move one token's hidden states in the all-reduces of a stage."""
    return 0.0 if tp == 1 else 2 * stage.num_layers * 2 * stage.hidden_bytes / (gpu.link_gb_s * 1e9)
