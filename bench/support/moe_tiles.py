"""Candidate tiles for a layer of experts on a GPU. Used by `tile_search`; imports torch: import it inside `run`.

The weights of several layers are used in turn, so that the L2 cache holds none of them. Their kind is bf16 or one of
those in stoker.kernels.random_weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import moe_few, moe_many
from stoker.kernels.gpu_timing import graph_s
from stoker.kernels.linear import Norm
from stoker.kernels.moe import Experts, add_experts_triton, to_kernel_layout
from stoker.kernels.moe_choice import ExpertRouter, Routing
from stoker.kernels.moe_many import down_lists, gate_up_lists
from stoker.kernels.moe_prompt import down_prompt, gate_up_prompt
from stoker.kernels.moe_quant import quant_down, quant_gate_up
from stoker.kernels.moe_quant_few import quant_down_few, quant_gate_up_few
from stoker.kernels.moe_route import Lists, list_by_expert, router_logits
from stoker.kernels.moe_tile_model import ExpertTile, PairTile, RouterTile
from stoker.kernels.quant import QuantWeight
from stoker.kernels.random_weights import bytes_of, make_weight

FEW_GATE_UP = [
    ExpertTile(*numbers)
    for numbers in (
        (16, 256, 4), (16, 512, 8), (32, 256, 8), (8, 512, 4),
        (8, 256, 4, 3), (8, 256, 4, 4), (16, 256, 4, 3), (8, 512, 4, 3), (4, 512, 4, 3),
    )
]  # fmt: skip
FEW_DOWN = [ExpertTile(*t) for t in ((4, 256, 4), (8, 256, 8), (8, 256, 4), (16, 256, 8), (4, 256, 2), (2, 256, 4))]
ROUTER: dict[int, list[tuple[int, ...]]] = {
    8: [(16, 16, 512, 4), (16, 16, 512, 2, 4), (16, 16, 256, 2, 8), (16, 16, 256, 2, 4)],
    512: [(16, 16, 512, 4), (16, 16, 512, 2, 4), (32, 32, 256, 3), (32, 32, 256, 2, 4), (64, 32, 128, 3, 4)],
    8192: [(64, 128, 64, 3), (64, 64, 64, 4), (32, 128, 64, 4), (128, 64, 64, 3), (64, 128, 128, 3)],
}
# Tokens -> the candidates for gate_up and down.
MANY = {
    8: ([(16, 64, 128, 4, 3), (16, 64, 128, 4, 2)], [(16, 64, 128, 4, 3), (16, 64, 128, 4, 2)]),
    64: ([(16, 64, 128, 4, 3), (16, 64, 64, 4, 4)], [(16, 64, 128, 4, 3), (16, 128, 128, 8, 3), (16, 64, 128, 4, 2)]),
    256: ([(32, 64, 64, 4, 4), (32, 64, 64, 4, 3)], [(32, 128, 64, 4, 4), (32, 128, 64, 4, 3), (32, 64, 64, 4, 4)]),
    512: ([(64, 64, 64, 4, 4), (64, 64, 64, 4, 3)], [(64, 128, 64, 4, 4), (64, 128, 64, 4, 3)]),
}
PROMPT = (
    [(128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 4)],
    [(128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4)],
)
PROMPT_TOKENS = (1024, 2048, 8192)
# The same for weights in 8 bits (with block scales: 128 inputs at a time) and in 4.
QUANT_FEW = {
    8: (
        [(16, 256, 4), (16, 256, 4, 3), (8, 256, 4, 3), (16, 512, 8), (32, 256, 8), (8, 512, 4, 2)],
        [(4, 1024, 4, 2), (4, 1024, 4), (8, 1024, 8, 2), (4, 256, 4, 3), (8, 256, 4), (2, 1024, 4, 2)],
    ),
    4: (
        [(16, 512, 4), (16, 512, 4, 3), (8, 1024, 4), (8, 512, 4, 3), (32, 512, 8), (16, 1024, 8)],
        [(8, 1024, 4, 3), (8, 1024, 4), (4, 1024, 4, 3), (16, 1024, 8, 2), (4, 1024, 2, 3)],
    ),
}
QUANT_MANY = {
    8: {
        8: [(16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (16, 64, 128, 4, 3), (16, 32, 128, 4, 6)],
        64: [(16, 32, 128, 4, 4), (16, 64, 128, 4, 4), (16, 64, 128, 4, 3)],
        256: [(16, 64, 128, 4, 4), (32, 64, 128, 4, 4), (32, 64, 128, 4, 3), (32, 128, 128, 8, 3)],
        512: [(32, 64, 128, 4, 4), (64, 64, 128, 8, 4), (64, 64, 128, 4, 3)],
        2048: [(64, 64, 128, 4, 3), (64, 128, 128, 8, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 3)],
        8192: [(64, 64, 128, 4, 3), (64, 128, 128, 8, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 3)],
    },
    4: {
        8: [(16, 64, 256, 4, 3), (16, 32, 256, 4, 3), (16, 64, 256, 4, 2), (16, 64, 256, 4, 4)],
        64: [(16, 64, 256, 4, 3), (16, 32, 256, 4, 3), (16, 64, 256, 4, 2)],
        256: [(32, 64, 256, 4, 3), (32, 64, 256, 4, 2), (32, 64, 256, 8, 2)],
        512: [(32, 64, 256, 4, 2), (64, 64, 256, 8, 2), (64, 64, 256, 4, 2)],
        2048: [(64, 64, 256, 4, 2), (64, 64, 256, 8, 2), (64, 128, 256, 8, 2), (128, 64, 256, 8, 2)],
        8192: [(64, 64, 256, 4, 2), (64, 64, 256, 8, 2), (64, 128, 256, 8, 2), (128, 64, 256, 8, 2)],
    },
}


@dataclass(frozen=True)
class MoeShape:
    hidden: int = 2048
    width: int = 768
    experts: int = 128
    top_k: int = 8


def layers(shape: MoeShape, count: int, kind: str) -> list[Experts]:
    hidden, width, experts = shape.hidden, shape.width, shape.experts
    found = []
    for _ in range(count):
        weight = torch.empty(experts, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        router = ExpertRouter(weight, Routing(shape.top_k, renormalises=True))
        gate_up = make_weight(kind, experts * 2 * width, hidden)
        down = make_weight(kind, experts * hidden, width)
        found.append(to_kernel_layout(router, gate_up, down))
    return found


class MoeBench:
    def __init__(self, shape: MoeShape, kind: str, num_layers: int = 4) -> None:
        self._shape = shape
        self._layers = layers(shape, num_layers, kind)
        self._norm = Norm(torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16), 1e-6)

    def tokens(self, count: int) -> Tensor:
        return torch.randn(count, self._shape.hidden, device="cuda", dtype=torch.bfloat16)

    def whole(self, count: int) -> float:
        """Seconds of a layer. Every call starts from the same tokens: the kernels add to x in place, and the routing of
        a sum of many layers is not that of a real model."""
        x = self.tokens(count)

        def call(layer: Experts) -> Tensor:
            return add_experts_triton(x.clone(), self._norm, layer)

        return graph_s([partial(call, layer) for layer in self._layers] * 2)

    def lists(self, x: Tensor) -> list[Lists]:
        norm = (self._norm.weight, self._norm.eps)
        return [
            list_by_expert(x, *norm, *router_logits(x, self._norm.weight, layer.router.weight), layer.router)
            for layer in self._layers
        ]

    def router(self, count: int, tile: RouterTile) -> float:
        x, norm, router = self.tokens(count), self._norm.weight, self._layers[0].router.weight
        return graph_s([partial(router_logits, x, norm, router, tile)] * 20)

    def lists_and_sum(self, count: int) -> tuple[float, float]:
        """Seconds of making the token lists by expert, counts reset included, and of the weighted sum of the experts' outputs."""
        x, norm, layer = self.tokens(count), (self._norm.weight, self._norm.eps), self._layers[0]
        top_k = self._shape.top_k
        logits, counts = router_logits(x, self._norm.weight, layer.router.weight)
        made = torch.empty(count * top_k, x.shape[1], device="cuda", dtype=x.dtype)
        lists = list_by_expert(x, *norm, logits, counts, layer.router)
        lists_s = graph_s([lambda: list_by_expert(x, *norm, logits, counts.zero_(), layer.router)] * 20)
        return lists_s, graph_s([partial(moe_many.combine, x, made, lists)] * 20)

    def few(self, count: int, gate_up: ExpertTile, down: ExpertTile) -> float:
        """Seconds of the two kernels for few tokens."""
        x = self.tokens(count)
        calls = [
            partial(self._few, x, router_logits(x, self._norm.weight, layer.router.weight)[0], layer, gate_up, down)
            for layer in self._layers
        ]
        return graph_s(calls * 4)

    def _few(self, x: Tensor, logits: Tensor, layer: Experts, gate_up: ExpertTile, down: ExpertTile) -> Tensor:
        given = (x, self._norm.weight, self._norm.eps, logits, layer.router)
        if isinstance(layer.gate_up, Tensor):
            found = moe_few.gate_up_few(*given, layer.gate_up, layer.granule, gate_up)
        else:
            found = quant_gate_up_few(*given, layer.gate_up, gate_up)
        run: Any = moe_few.down_few if isinstance(layer.down, Tensor) else quant_down_few
        summed: Tensor = run(x, found, layer.down, down)
        return summed

    def gate_up(self, run: Any, lists: list[Lists], tile: PairTile) -> float:
        pairs = zip(lists, self._layers, strict=True)
        return graph_s([partial(run, one, layer.gate_up, layer.granule, tile) for one, layer in pairs] * 2)

    def down(self, run: Any, lists: list[Lists], tile: PairTile) -> float:
        inner = torch.randn(lists[0].weights.numel(), self._shape.width, device="cuda", dtype=torch.bfloat16)
        pairs = zip(lists, self._layers, strict=True)
        return graph_s([partial(run, one, inner, layer.down, tile) for one, layer in pairs] * 2)

    @property
    def third_bytes(self) -> float:
        """Bytes of a third of an expert's weights (gate, up or down)."""
        layer = self._layers[0]
        return (bytes_of(layer.gate_up) + bytes_of(layer.down)) / 3 / self._shape.experts

    def active(self, lists: list[Lists]) -> float:
        """The mean number of experts that got any token."""
        counts = torch.stack([one.counts.view(self._shape.experts, -1)[:, 0] for one in lists])
        return float((counts > 0).sum(1).float().mean())


@dataclass(frozen=True)
class TileCandidate:
    """A kernel with a tile, and the function that times it."""

    kernel: str
    tokens: int
    tile: str
    run: Callable[[], float]
    num_thirds: int = 0  # of an expert's weights that the kernel reads


def few_token_candidates(
    bench: MoeBench, gate_ups: list[ExpertTile], downs: list[ExpertTile]
) -> Iterator[TileCandidate]:
    """The first gate_up tile with each down tile, and the first down tile with each gate_up tile."""
    for gate_up in gate_ups:
        yield TileCandidate("few", 1, f"{gate_up} and {downs[0]}", partial(bench.few, 1, gate_up, downs[0]), 3)
    for down in downs[1:]:
        yield TileCandidate("few", 1, f"{gate_ups[0]} and {down}", partial(bench.few, 1, gate_ups[0], down), 3)


def _quant_gate_up(lists: Lists, weight: QuantWeight, _granule: int, tile: PairTile) -> Tensor:
    return quant_gate_up(lists, weight, tile)


def quantized_candidates(bench: MoeBench, num_bits: int) -> Iterator[TileCandidate]:
    gate_ups, downs = ([ExpertTile(*numbers) for numbers in options] for options in QUANT_FEW[num_bits])
    yield from few_token_candidates(bench, gate_ups, downs)
    for count, options in QUANT_MANY[num_bits].items():
        lists = bench.lists(bench.tokens(count))
        for rows, outs, *others in options:
            # Gate and up of an output are two rows of the weight, so down has twice the outputs in the same tile.
            tile, down = PairTile(rows, outs, *others), PairTile(rows, 2 * outs, *others)
            yield TileCandidate(
                "many gate_up", count, str(tile), partial(bench.gate_up, _quant_gate_up, lists, tile), 2
            )
            yield TileCandidate("many down", count, str(down), partial(bench.down, quant_down, lists, down), 1)


def candidates(bench: MoeBench) -> Iterator[TileCandidate]:
    yield from few_token_candidates(bench, FEW_GATE_UP, FEW_DOWN)
    for count, options in ROUTER.items():
        for numbers in options:
            yield TileCandidate("router", count, str(numbers), partial(bench.router, count, RouterTile(*numbers)))
    many: list[Any] = [(count, "many", gate_up_lists, down_lists, *options) for count, options in MANY.items()]
    prompt: list[Any] = [(count, "prompt", gate_up_prompt, down_prompt, *PROMPT) for count in PROMPT_TOKENS]
    for count, name, run_gate_up, run_down, gate_ups, downs in many + prompt:
        lists = bench.lists(bench.tokens(count))
        for numbers in gate_ups:
            tile = PairTile(*numbers)
            yield TileCandidate(
                f"{name} gate_up", count, str(numbers), partial(bench.gate_up, run_gate_up, lists, tile), 2
            )
        for numbers in downs:
            tile = PairTile(*numbers)
            yield TileCandidate(f"{name} down", count, str(numbers), partial(bench.down, run_down, lists, tile), 1)


def tiles(shape: MoeShape, kind: str, num_layers: int = 4) -> list[dict[str, Any]]:
    """Time all candidates: the fastest first, with their weight bandwidth and FLOP rate."""
    bench = MoeBench(shape, kind, num_layers)
    lines: list[dict[str, Any]] = []
    operations = shape.hidden * shape.width * 2  # of one third for one (token, expert) pair
    for job in candidates(bench) if kind == "bf16" else quantized_candidates(bench, 4 if kind == "int4" else 8):
        seconds = job.run()
        active = bench.active(bench.lists(bench.tokens(job.tokens)))
        rates = {
            "us": seconds * 1e6,
            "GB/s": job.num_thirds * bench.third_bytes * active / seconds / 1e9,
            "TFLOP/s": job.num_thirds * operations * job.tokens * shape.top_k / seconds / 1e12,
        }
        lines.append({"kernel": job.kernel, "tokens": job.tokens, "tile": job.tile, **rates})
    return sorted(lines, key=lambda line: (line["kernel"], line["tokens"], line["us"]))
