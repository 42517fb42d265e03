"""A mixture of experts: each token goes through the few gated MLPs that the router likes best, and their weighted sum is added.

x [tokens, hidden]   router [experts, hidden]   gate_up [experts, 2 * width, hidden]   down [experts, hidden, width]
gate_up has so many rows of gate (a granule), then as many of up, and so on: a program finds what it needs of both in one place.

On a card nothing here waits for the host, and every shape follows from the number of tokens: few tokens read the weights of
their experts straight away (moe_few.py), more of them are first listed by expert (moe_route.py), and then it is a question of how
many pairs of token and expert each expert has (moe_many.py, moe_prompt.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.activation import silu_mul_ref
from stoker.kernels.dispatch import use_triton
from stoker.kernels.linear import Norm
from stoker.kernels.moe_few import MOST_TOKENS, few_tokens
from stoker.kernels.moe_many import combine, down_lists, gate_up_lists, tiles_for
from stoker.kernels.moe_prompt import GRANULE, LEAST_LOAD, down_prompt, fits, gate_up_prompt
from stoker.kernels.moe_route import list_by_expert, router_logits
from stoker.kernels.norm import rms_norm_ref


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's experts. Their chosen weights are made to add up to one where the model `renormalises`."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    granule: int
    top_k: int
    renormalises: bool


def weave(gate_up: Tensor, granule: int) -> None:
    """From all rows of gate, then all of up, to granules; in place, an expert at a time so that it takes hardly any memory."""
    for one in gate_up:
        one.copy_(one.view(2, -1, granule, one.shape[1]).transpose(0, 1).reshape(one.shape))


def choose_ref(logits: Tensor, top_k: int, renormalises: bool) -> tuple[Tensor, Tensor]:
    """[tokens, experts] -> the chosen experts' weights and numbers, [tokens, top_k] each."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, chosen = wide.softmax(-1).topk(top_k, -1)
    return weights / weights.sum(-1, keepdim=True) if renormalises else weights, chosen


def add_experts_ref(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    """Expert after expert over the tokens that chose it."""
    normed = rms_norm_ref(x, norm.weight, norm.eps)
    weights, chosen = choose_ref(normed @ experts.router.t(), experts.top_k, experts.renormalises)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(experts.router)).tolist()
    made = x.new_empty(len(order), x.shape[1])
    first = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[first : first + count]
            both = normed[pairs // experts.top_k] @ experts.gate_up[expert].t()
            both = both.view(count, -1, 2, experts.granule).transpose(1, 2).reshape(count, -1)
            made[pairs] = silu_mul_ref(both) @ experts.down[expert].t()
            first += count
    total = (made.view(len(x), experts.top_k, -1) * weights[:, :, None].to(x.dtype)).sum(1)
    return x.add_(total)


def add_experts_triton(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    logits, counts = router_logits(x, norm.weight, experts.router)
    gate_up, granule = experts.gate_up, experts.granule
    options = (experts.top_k, experts.renormalises)
    if len(x) <= MOST_TOKENS:
        return few_tokens(x, norm.weight, norm.eps, logits, gate_up, granule, experts.down, *options)
    lists = list_by_expert(x, norm.weight, norm.eps, logits, counts, *options)
    if lists.load >= LEAST_LOAD and fits(gate_up) and granule == GRANULE:
        made = down_prompt(lists, gate_up_prompt(lists, gate_up, granule), experts.down)
    else:
        tiles = tiles_for(lists)
        made = down_lists(lists, gate_up_lists(lists, gate_up, granule, tiles.gate_up), experts.down, tiles.down)
    return combine(x, made, lists.weights)


def add_experts(x: Tensor, norm: Norm, experts: Experts) -> Tensor:
    """x + the experts of the normed x; `x` is spent."""
    return (add_experts_triton if use_triton(x) else add_experts_ref)(x, norm, experts)
