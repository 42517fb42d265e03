"""How long calls take on a card, without the host: captured one after the other, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def graph_s(calls: list[Callable[[], Any]], repeats: int = 10) -> float:
    """Seconds of one call, from replays of all of them captured one after the other."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times) / len(calls)
