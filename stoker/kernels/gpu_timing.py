"""GPU time of calls without the host's part: they are captured in one CUDA graph, which is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch


def graph_s(calls: Sequence[Callable[[], Any]], repeats: int = 10) -> float:
    """Return the seconds of one call: the median replay time of a graph of all calls, divided by their number."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    new_event: Callable[..., Any] = torch.cuda.Event  # untyped in torch
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (new_event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times) / len(calls)
