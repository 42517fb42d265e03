"""A layer of experts on a card: each of its kernels by tile, and the whole by number of tokens. Used by gpu.py --tiles.

Several layers' weights are gone through in turn, so that the cache holds none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from replay import graph_s
from torch import Tensor

from stoker.kernels import moe_few, moe_many, moe_route
from stoker.kernels.linear import Norm
from stoker.kernels.moe import Experts, add_experts_triton
from stoker.kernels.moe_many import down_lists, gate_up_lists
from stoker.kernels.moe_prompt import GRANULE, down_prompt, gate_up_prompt
from stoker.kernels.moe_route import Lists, list_by_expert, router_logits

FEW_GATE_UP = [
    moe_few.Tile(*numbers)
    for numbers in (
        (16, 256, 4), (16, 512, 8), (32, 256, 8), (8, 512, 4),
        (8, 256, 4, 3), (8, 256, 4, 4), (16, 256, 4, 3), (8, 512, 4, 3), (4, 512, 4, 3),
    )
]  # fmt: skip
FEW_DOWN = [moe_few.Tile(*t) for t in ((4, 256, 4), (8, 256, 8), (8, 256, 4), (16, 256, 8), (4, 256, 2), (2, 256, 4))]
ROUTER = {
    8: [(16, 16, 512, 4), (16, 16, 512, 2, 4), (16, 16, 256, 2, 8), (16, 16, 256, 2, 4)],
    512: [(16, 16, 512, 4), (16, 16, 512, 2, 4), (32, 32, 256, 3), (32, 32, 256, 2, 4), (64, 32, 128, 3, 4)],
    8192: [(64, 128, 64, 3), (64, 64, 64, 4), (32, 128, 64, 4), (128, 64, 64, 3), (64, 128, 128, 3)],
}
# Tokens -> the candidates for both products.
MANY = {
    8: ([(16, 64, 128, 4, 3), (16, 64, 128, 4, 2)], [(16, 64, 128, 4, 3), (16, 64, 128, 4, 2)]),
    64: ([(16, 64, 128, 4, 3), (16, 64, 64, 4, 4)], [(16, 64, 128, 4, 3), (16, 128, 128, 8, 3), (16, 64, 128, 4, 2)]),
    256: ([(32, 64, 64, 4, 4), (32, 64, 64, 4, 3)], [(32, 128, 64, 4, 4), (32, 128, 64, 4, 3), (32, 64, 64, 4, 4)]),
    512: ([(64, 64, 64, 4, 4), (64, 64, 64, 4, 3)], [(64, 128, 64, 4, 4), (64, 128, 64, 4, 3)]),
}
PROMPT = (
    [(128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4)],
    [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 8, 3)],
)
PROMPT_TOKENS = (1024, 2048, 8192)


@dataclass(frozen=True)
class Shape:
    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8


def layers(shape: Shape, count: int, dtype: torch.dtype = torch.bfloat16) -> list[Experts]:
    def random(*size: int) -> Tensor:
        return torch.empty(*size, device="cuda", dtype=dtype).normal_(0, 0.02)

    hidden, width, experts = shape.hidden, shape.width, shape.experts
    return [
        Experts(
            random(experts, hidden),
            random(experts, 2 * width, hidden),
            random(experts, hidden, width),
            GRANULE,
            shape.top_k,
            True,
        )
        for _ in range(count)
    ]


class MoeBench:
    def __init__(self, shape: Shape, num_layers: int = 4) -> None:
        self._shape = shape
        self._layers = layers(shape, num_layers)
        self._norm = Norm(torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16), 1e-6)

    def tokens(self, count: int) -> Tensor:
        return torch.randn(count, self._shape.hidden, device="cuda", dtype=torch.bfloat16)

    def whole(self, count: int) -> float:
        x = self.tokens(count)
        return graph_s([partial(add_experts_triton, x, self._norm, layer) for layer in self._layers] * 2)

    def lists(self, x: Tensor) -> list[Lists]:
        norm = (self._norm.weight, self._norm.eps)
        return [
            list_by_expert(x, *norm, *router_logits(x, self._norm.weight, layer.router), layer.top_k, True)
            for layer in self._layers
        ]

    def router(self, count: int, tile: moe_route.Tile) -> float:
        x, norm, router = self.tokens(count), self._norm.weight, self._layers[0].router
        return graph_s([partial(router_logits, x, norm, router, tile)] * 20)

    def lists_and_sum(self, count: int) -> tuple[float, float]:
        """Seconds of writing the lists, with the counts set to zero, and of the weighted sum."""
        x, norm, layer = self.tokens(count), (self._norm.weight, self._norm.eps), self._layers[0]
        logits, counts = router_logits(x, self._norm.weight, layer.router)
        made = torch.empty(count * layer.top_k, x.shape[1], device="cuda", dtype=x.dtype)
        weights = torch.rand(count, layer.top_k, device="cuda")
        lists = graph_s([lambda: list_by_expert(x, *norm, logits, counts.zero_(), layer.top_k, True)] * 20)
        return lists, graph_s([partial(moe_many.combine, x, made, weights)] * 20)

    def few(self, count: int, gate_up: moe_few.Tile, down: moe_few.Tile) -> float:
        """The two kernels of few tokens."""
        x, norm = self.tokens(count), (self._norm.weight, self._norm.eps)
        calls = []
        for layer in self._layers:
            logits, _ = router_logits(x, self._norm.weight, layer.router)
            weights = (layer.gate_up, layer.granule, layer.down, layer.top_k, True)
            calls.append(partial(moe_few.few_tokens, x, *norm, logits, *weights, gate_up_tile=gate_up, down_tile=down))
        return graph_s(calls * 4)

    def gate_up(self, run: Any, lists: list[Lists], tile: moe_many.Tile) -> float:
        pairs = zip(lists, self._layers, strict=True)
        return graph_s([partial(run, one, layer.gate_up, layer.granule, tile) for one, layer in pairs] * 2)

    def down(self, run: Any, lists: list[Lists], tile: moe_many.Tile) -> float:
        inner = torch.randn(lists[0].weights.numel(), self._shape.width, device="cuda", dtype=torch.bfloat16)
        pairs = zip(lists, self._layers, strict=True)
        return graph_s([partial(run, one, inner, layer.down, tile) for one, layer in pairs] * 2)

    def active(self, lists: list[Lists]) -> float:
        """Experts that have any token, on average."""
        counts = torch.stack([one.counts.view(self._shape.experts, -1)[:, 0] for one in lists])
        return float((counts > 0).sum(1).float().mean())


@dataclass(frozen=True)
class Job:
    """A candidate, and how its time is found."""

    kernel: str
    tokens: int
    tile: str
    run: Callable[[], float]
    num_thirds: int = 0  # of an expert's weights, which are gate, up and down


def jobs(bench: MoeBench) -> Iterator[Job]:
    for gate_up in FEW_GATE_UP:
        yield Job("few", 1, f"{gate_up} and {FEW_DOWN[0]}", partial(bench.few, 1, gate_up, FEW_DOWN[0]), 3)
    for down in FEW_DOWN[1:]:
        yield Job("few", 1, f"{FEW_GATE_UP[0]} and {down}", partial(bench.few, 1, FEW_GATE_UP[0], down), 3)
    for count, candidates in ROUTER.items():
        for numbers in candidates:
            yield Job("router", count, str(numbers), partial(bench.router, count, moe_route.Tile(*numbers)))
    many = [(count, "many", gate_up_lists, down_lists, *candidates) for count, candidates in MANY.items()]
    prompt = [(count, "prompt", gate_up_prompt, down_prompt, *PROMPT) for count in PROMPT_TOKENS]
    for count, name, run_gate_up, run_down, gate_ups, downs in many + prompt:
        lists = bench.lists(bench.tokens(count))
        for numbers in gate_ups:
            tile = moe_many.Tile(*numbers)
            yield Job(f"{name} gate_up", count, str(numbers), partial(bench.gate_up, run_gate_up, lists, tile), 2)
        for numbers in downs:
            tile = moe_many.Tile(*numbers)
            yield Job(f"{name} down", count, str(numbers), partial(bench.down, run_down, lists, tile), 1)


def tiles(shape: Shape, num_layers: int = 4) -> list[dict[str, Any]]:
    """The candidates' times, best first, with the bandwidth they read weights at and their rate of arithmetic."""
    bench = MoeBench(shape, num_layers)
    lines: list[dict[str, Any]] = []
    third = shape.hidden * shape.width * 2  # bytes; and its operations on one pair
    for job in jobs(bench):
        seconds = job.run()
        active = bench.active(bench.lists(bench.tokens(job.tokens)))
        figures = {
            "us": seconds * 1e6,
            "GB/s": job.num_thirds * third * active / seconds / 1e9,
            "TFLOP/s": job.num_thirds * third * job.tokens * shape.top_k / seconds / 1e12,
        }
        lines.append({"kernel": job.kernel, "tokens": job.tokens, "tile": job.tile, **figures})
    return sorted(lines, key=lambda line: (line["kernel"], line["tokens"], line["us"]))
