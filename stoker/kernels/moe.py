"""A mixture of experts: each token goes through the gated MLPs that the router scores highest, and their weighted sum
is added. moe_choice.py says how they are chosen.

x [tokens, hidden]   router [experts, hidden]   gate_up [experts, 2 * width, hidden]   down [experts, hidden, width]

gate_up is interleaved: `granule` rows of gate, then the same number of rows of up, and so on. A program then reads both
from one place.

On a GPU, nothing here waits for the host, and every shape follows from the number of tokens. Few tokens read the
weights of their experts directly (moe_few.py). More tokens are first listed by expert (moe_route.py); then the kernel
depends on the number of pairs of token and expert per expert (moe_many.py, moe_prompt.py). Either weight may be in 8 or
4 bits instead (moe_quant_few.py, moe_quant.py): then it has the rows of all experts stacked, and each expert's gate
before its up. With numerics=exact, all numbers of tokens are listed, and go through the kernels of moe_many.py or
moe_quant.py: all their tiles use the same instruction of the tensor cores and do not split the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.cpu_rows import exact_matmul
from stoker.kernels.dispatch import use_triton
from stoker.kernels.linear import Norm
from stoker.kernels.moe_choice import ExpertRouter, choose_ref
from stoker.kernels.moe_few import MAX_TOKENS, Chosen, down_few, gate_up_few
from stoker.kernels.moe_gate import SILU, Gate
from stoker.kernels.moe_many import combine, down_lists, gate_up_lists
from stoker.kernels.moe_prompt import GRANULE, down_prompt, fits, gate_up_prompt
from stoker.kernels.moe_quant import quant_down, quant_gate_up
from stoker.kernels.moe_quant_few import quant_down_few, quant_gate_up_few
from stoker.kernels.moe_route import Lists, list_by_expert, router_logits
from stoker.kernels.moe_tile_model import PROMPT_LOAD, exact_router_tile
from stoker.kernels.norm import rms_norm_ref
from stoker.kernels.quant import QuantWeight, dequantise_ref


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer. With `exact`, a token's result does not depend on the other tokens of a step. The
    weights and biases are those of the experts that the router names; `partial` says that another rank adds the input."""

    router: ExpertRouter
    gate_up: Tensor | QuantWeight
    down: Tensor | QuantWeight
    granule: int
    exact: bool = False
    gate: Gate = SILU
    down_bias: Tensor | None = None  # [experts, hidden]
    partial: bool = False


def to_kernel_layout(
    router: ExpertRouter, gate_up: Tensor | QuantWeight, down: Tensor | QuantWeight, exact: bool = False, gate: Gate = SILU,
    down_bias: Tensor | None = None, partial: bool = False,
) -> Experts:  # fmt: skip
    """Return the experts in the kernels' layout. The loaded weights have the rows of all experts stacked, for each
    expert all of gate, then all of up. They are consumed."""
    num_experts = len(router.held)
    granule = gate_up.shape[0] // num_experts // 2
    if isinstance(gate_up, Tensor):
        gate_up = gate_up.view(num_experts, -1, gate_up.shape[1])
        if fits(gate_up):
            granule = GRANULE
            interleave_gate_up(gate_up, granule)
    if isinstance(down, Tensor):
        down = down.view(num_experts, -1, down.shape[1])
    return Experts(router, gate_up, down, granule, exact, gate, down_bias, partial)


def interleave_gate_up(gate_up: Tensor, granule: int) -> None:
    """Interleave gate and up in granules, in place. One expert at a time, so that it takes little memory."""
    for expert in gate_up:
        expert.copy_(expert.view(2, -1, granule, expert.shape[1]).transpose(0, 1).reshape(expert.shape))


def plain_ref(weight: Tensor | QuantWeight, num_experts: int, dtype: torch.dtype) -> Tensor:
    """[experts, outs, ins]"""
    return (
        weight if isinstance(weight, Tensor) else dequantise_ref(weight, dtype).view(num_experts, -1, weight.shape[1])
    )


def add_experts_ref(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    """Run expert after expert over the tokens that chose it."""
    router, num_held = experts.router, len(experts.router.held)
    gate_up, down = (plain_ref(weight, num_held, x.dtype) for weight in (experts.gate_up, experts.down))
    matmul = exact_matmul if experts.exact and x.device.type == "cpu" else torch.nn.functional.linear
    normed = rms_norm_ref(x, norm.weight, norm.eps)
    weights, chosen = choose_ref(matmul(normed, router.weight), router)
    weights, top_k = weights.to(x.dtype), router.routing.top_k
    if router.routing.on_input:
        normed, weights = normed * weights, torch.ones_like(weights)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(router)).tolist()
    outputs = x.new_zeros(len(order), x.shape[1])
    first = 0
    for expert, count in enumerate(counts):
        held = expert - router.held.start
        if count and 0 <= held < num_held:
            pairs = order[first : first + count]
            both = matmul(normed[pairs // top_k], gate_up[held])
            both = both.view(count, -1, 2, experts.granule).transpose(1, 2).reshape(count, -1)
            outputs[pairs] = matmul(experts.gate.of_expert(both, held), down[held])
            if experts.down_bias is not None:
                outputs[pairs] += experts.down_bias[held]
        first += count
    total = (outputs.view(len(x), top_k, -1) * weights[:, :, None]).sum(1)
    return x.copy_(total) if experts.partial else x.add_(total)


def add_experts_triton(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    tile, router = exact_router_tile(len(x), x.element_size()) if experts.exact else None, experts.router
    logits, counts = router_logits(x, norm.weight, router.weight, tile)
    if len(x) <= MAX_TOKENS and not experts.exact:
        chosen = _gate_up_few(x, norm, logits, experts)
        return _down_few(x.zero_() if experts.partial else x, chosen, experts)
    lists = list_by_expert(x, norm.weight, norm.eps, logits, counts, router)
    outputs = _down(lists, _gate_up(lists, experts), experts)
    return combine(x.zero_() if experts.partial else x, outputs, lists)


def _gate_up_few(x: Tensor, norm: Norm, logits: Tensor, experts: Experts) -> Chosen:
    given, weight = (x, norm.weight, norm.eps, logits, experts.router), experts.gate_up
    if isinstance(weight, QuantWeight):
        return quant_gate_up_few(*given, weight, gate=experts.gate)
    return gate_up_few(*given, weight, experts.granule, gate=experts.gate)


def _down_few(x: Tensor, chosen: Chosen, experts: Experts) -> Tensor:
    weight, bias = experts.down, experts.down_bias
    if isinstance(weight, QuantWeight):
        return quant_down_few(x, chosen, weight, bias=bias)
    return down_few(x, chosen, weight, bias=bias)


def _gate_up(lists: Lists, experts: Experts) -> Tensor:
    weight = experts.gate_up
    if isinstance(weight, QuantWeight):
        return quant_gate_up(lists, weight, gate=experts.gate)
    if _has_large_tiles(lists, experts):
        return gate_up_prompt(lists, weight, experts.granule, gate=experts.gate)
    return gate_up_lists(lists, weight, experts.granule, gate=experts.gate)


def _down(lists: Lists, inner: Tensor, experts: Experts) -> Tensor:
    weight, bias = experts.down, experts.down_bias
    if isinstance(weight, QuantWeight):
        return quant_down(lists, inner, weight, bias=bias)
    if _has_large_tiles(lists, experts):
        return down_prompt(lists, inner, weight, bias=bias)
    return down_lists(lists, inner, weight, bias=bias)


def _has_large_tiles(lists: Lists, experts: Experts) -> bool:
    gate_up, down = experts.gate_up, experts.down
    if experts.exact or lists.load < PROMPT_LOAD or not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return False
    return fits(gate_up) and experts.granule == GRANULE


def add_experts(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    """Return x + experts(norm(x)). The memory of x is reused."""
    return (add_experts_triton if use_triton(x) else add_experts_ref)(x, norm, experts)
