"""GPU times of numerics=exact and numerics=fast. Imports torch: import this module inside `run`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from bench.engine._kv_attention import attention_s
from stoker.kernels.exact_rows import ExactWeight
from stoker.kernels.gpu_timing import graph_s
from stoker.kernels.linear import Weight, add_linear, pack_weight
from stoker.kernels.random_weights import bytes_of, make_weight

_COLD_BYTES = 240_000_000  # several times the L2 cache
Spans = list[tuple[int, int]]


def matmul_us(kind: str, num_outs: int, num_ins: int, rows: Sequence[int]) -> Iterator[tuple[int, float, float]]:
    """Yield the number of rows, and the microseconds of exact and of fast."""
    weights = [make_weight(kind, num_outs, num_ins)]
    weights += [make_weight(kind, num_outs, num_ins) for _ in range(_COLD_BYTES // bytes_of(weights[0]))]
    plain: list[Weight] = [pack_weight(weight) for weight in weights]
    exact = [ExactWeight.of(weight) for weight in weights]
    for count in rows:
        x = torch.randn(count, num_ins, device="cuda", dtype=torch.bfloat16)
        total = torch.randn(count, num_outs, device="cuda", dtype=torch.bfloat16)
        exact_s, fast_s = (graph_s([partial(add_linear, total, x, one) for one in some]) for some in (exact, plain))
        yield count, exact_s * 1e6, fast_s * 1e6


def attention_us(heads: tuple[int, int, int], spans: Spans, verifies: bool = False) -> tuple[float, float]:
    """Return the microseconds of exact and of fast for one layer. Fast computes spans of several tokens as prefill."""
    exact = attention_s(torch.bfloat16, heads, spans, exact=True, verifies=verifies)
    return exact * 1e6, attention_s(torch.bfloat16, heads, spans) * 1e6


def step_ms(shape: str, numerics: str, steps: Sequence[Spans]) -> list[float | None]:
    """Return the milliseconds of each step of a model with random weights, None if its KV does not fit. In a process of
    its own, because an engine takes all GPU memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_step_ms, (shape, numerics, steps))


def _step_ms(shape: str, numerics: str, steps: Sequence[Spans]) -> list[float | None]:
    from bench.support.engine_steps import EngineSteps, build_llm

    engine = EngineSteps(build_llm(None, shape, 16384, numerics))
    return [engine.queued_s(spans, 20) * 1e3 if engine.fits(spans) else None for spans in steps]
