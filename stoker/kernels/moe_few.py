# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Experts for a step of one token or very few tokens, which hardly share any expert: each pair of token and expert
reads the expert's weights itself.

There are two kernels, and neither uses the tensor cores. Every program of the first kernel finds its pair's expert from
the logits. The second kernel runs over all experts of a token, so that their weighted sum stays in one program. These
kernels read plain weights; moe_quant_few.py has the quantised versions. A pair whose expert another rank holds is only
noted, because its weight scales those of the token's other pairs. moe.py has the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.moe_choice import ExpertRouter, Routing, choice_keys, index_of, logits_of, row_scale, shares
from stoker.kernels.moe_gate import SILU, Gate, gate_biases, gated
from stoker.kernels.moe_tile_model import ExpertTile, few_tile

MAX_TOKENS = 1  # lists are faster from two tokens on, measured with the shape of Qwen3-30B-A3B


@dataclass(frozen=True, slots=True)
class Chosen:
    """The output of the first kernel and input of the second, per pair."""

    inner: Tensor  # [pairs, width]
    experts: Tensor  # [pairs], counted from the first expert of this rank; -1: another rank holds it
    weights: Tensor  # [pairs], in float32; the second kernel scales the weights of a token's experts
    routing: Routing
    is_split: bool  # other ranks have other experts

    @classmethod
    def empty(cls, x: Tensor, router: ExpertRouter, width: int) -> Chosen:
        num_pairs = len(x) * router.routing.top_k
        experts = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
        weights = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        is_split = len(router.held) < len(router)
        return cls(x.new_empty(num_pairs, width), experts, weights, router.routing, is_split)


@triton.jit
def choose(
    logits, rank, scale, bias, correction,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Return a token's expert of rank `rank`."""
    found = logits_of(logits, tl.arange(0, BLOCK_EXPERTS), scale, bias, PARTS, EXPERTS, HAS_BIAS)
    key = choice_keys(
        logits, found, scale, bias, correction, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, HAS_CORRECTION,
        GROUPS, TOP_GROUPS, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip
    best = tl.max(key)
    for _ in range(rank):
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
        best = tl.max(key)
    return tl.minimum(index_of(best, BLOCK_EXPERTS), EXPERTS - 1).to(tl.int64)


@triton.jit
def share_of(
    logits, expert, scale, bias,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALISES: tl.constexpr,
):  # fmt: skip
    """Return the weight of a token's expert, before `_down` scales the weights of all its experts."""
    every = logits_of(logits, tl.arange(0, BLOCK_EXPERTS), scale, bias, PARTS, EXPERTS, HAS_BIAS)
    mine = logits_of(logits, expert, scale, bias, PARTS, EXPERTS, HAS_BIAS)
    return shares(every, mine, SIGMOID, RENORMALISES)


@triton.jit
def put_choice(
    logits, expert, first, scale, bias, chosen, weights, pair,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, RENORMALISES: tl.constexpr, ON_INPUT: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Store a pair's expert and its weight."""
    share = 1.0
    if not ON_INPUT:
        share = share_of(logits, expert, scale, bias, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, RENORMALISES)
    tl.store(weights + pair, share)
    local = expert - first
    if HELD < EXPERTS:
        local = tl.where((local >= 0) & (local < HELD), local, -1)
    tl.store(chosen + pair, local.to(tl.int32))


@triton.jit
def weighted(found, all_shares, scaling, RENORMALISES: tl.constexpr):
    """Return a token's sum over its experts, from the sum that `share_of` weighted."""
    if RENORMALISES:
        found = found / (all_shares + 1e-20)
    return found * scaling


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up(
    x, norm, logits, bias, correction, weight, gate_up_bias, inner, chosen, weights, eps, first_expert,
    HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr,
    ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, HELD: tl.constexpr,
    GRANULE: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATE_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    token, rank = pair // TOP_K, pair % TOP_K
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    size = 1.0
    if SIGMOID or HAS_BIAS:  # otherwise the norm's scale, which is known later, does not change the order
        size = row_scale(x + token * HIDDEN, eps, HIDDEN, BLOCK_HIDDEN)
    mine = logits + token * PARTS * EXPERTS
    expert = choose(
        mine, rank, size, bias, correction, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, HAS_CORRECTION,
        GROUPS, TOP_GROUPS, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip
    held = expert
    if HELD < EXPERTS:
        held = expert - first_expert
        if (held < 0) | (held >= HELD):
            if tl.program_id(0) == 0:
                put_choice(
                    mine, expert, first_expert, row_scale(x + token * HIDDEN, eps, HIDDEN, BLOCK_HIDDEN), bias, chosen,
                    weights, pair, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, RENORMALISES, ON_INPUT, HELD,
                )  # fmt: skip
            return
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < WIDTH
    column = tl.arange(0, BLOCK_IN)
    gate_row = out + (out // GRANULE) * GRANULE
    gate_from = weight + held * (2 * WIDTH * HIDDEN) + gate_row[:, None] * HIDDEN + column[None, :]
    gate = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    squares = tl.zeros([BLOCK_IN], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_IN, num_stages=STAGES):
        is_in = start + column < HIDDEN
        if HIDDEN % BLOCK_IN == 0:
            is_in = column < BLOCK_IN
        is_taken = is_out[:, None] & is_in[None, :]
        gate_weight = tl.load(gate_from + start, mask=is_taken, other=0.0)
        up_weight = tl.load(gate_from + (GRANULE * HIDDEN + start), mask=is_taken, other=0.0)
        given = tl.load(x + token * HIDDEN + start + column, mask=is_in, other=0.0).to(tl.float32)
        squares += given * given
        given = given * tl.load(norm + start + column, mask=is_in, other=0.0).to(tl.float32)
        gate += gate_weight.to(tl.float32) * given[None, :]
        up += up_weight.to(tl.float32) * given[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    scale = tl.rsqrt(tl.sum(squares) / HIDDEN + eps)
    if ON_INPUT:
        scale *= share_of(mine, expert, scale, bias, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, RENORMALISES)
    gate_sum, up_sum = tl.sum(gate, 1) * scale, tl.sum(up, 1) * scale
    if GATE_BIAS:
        gate_bias, up_bias = gate_biases(gate_up_bias, held, out, WIDTH)
        gate_sum, up_sum = gate_sum + gate_bias, up_sum + up_bias
    made = gated(gate_sum, up_sum, LIMIT, ALPHA)
    tl.store(inner + pair * WIDTH + out, made.to(inner.dtype.element_ty), mask=is_out)
    if tl.program_id(0) == 0:
        put_choice(
            mine, expert, first_expert, scale, bias, chosen, weights, pair, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID,
            HAS_BIAS, RENORMALISES, ON_INPUT, HELD,
        )  # fmt: skip


@triton.jit
def _down(
    x, inner, weight, bias, chosen, weights, scaling,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    RENORMALISES: tl.constexpr, DOWN_BIAS: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < HIDDEN
    column = tl.arange(0, BLOCK_IN)
    sums = tl.zeros([BLOCK_OUT, BLOCK_IN], tl.float32)
    biases = tl.zeros([BLOCK_OUT], tl.float32)
    all_shares = 0.0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        expert = tl.load(chosen + pair).to(tl.int64)
        share = tl.load(weights + pair)
        all_shares += share
        num_outs, num_ins = HIDDEN, WIDTH
        if SPLIT:  # nothing is read for an expert of another rank, and what `inner` has for it is undefined
            num_outs, num_ins = tl.where(expert >= 0, HIDDEN, 0), tl.where(expert >= 0, WIDTH, 0)
        is_taken = out < num_outs
        if DOWN_BIAS:
            biases += share * tl.load(bias + expert * HIDDEN + out, mask=is_taken, other=0.0).to(tl.float32)
        taken_from = weight + expert * (HIDDEN * WIDTH) + out[:, None] * WIDTH + column[None, :]
        for start in tl.static_range(0, WIDTH, BLOCK_IN):
            is_in = start + column < num_ins
            if WIDTH % BLOCK_IN == 0 and not SPLIT:
                is_in = column < BLOCK_IN
            taken = tl.load(taken_from + start, mask=is_taken[:, None] & is_in[None, :], other=0.0)
            given = tl.load(inner + pair * WIDTH + start + column, mask=is_in, other=0.0).to(tl.float32)
            sums += taken.to(tl.float32) * (given * share)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    found = weighted(tl.sum(sums, 1) + biases, all_shares, scaling, RENORMALISES)
    total = tl.load(x + token * HIDDEN + out, mask=is_out, other=0.0).to(tl.float32) + found
    tl.store(x + token * HIDDEN + out, total.to(x.dtype.element_ty), mask=is_out)


def gate_up_few(
    x: Tensor, norm: Tensor, eps: float, logits: Tensor, router: ExpertRouter, gate_up: Tensor, granule: int,
    tile: ExpertTile | None = None, gate: Gate = SILU,
) -> Chosen:  # fmt: skip
    assert x.is_contiguous()
    assert gate_up.is_contiguous()
    width, hidden = gate_up.shape[1] // 2, gate_up.shape[2]
    tile = tile or few_tile("plain", "gate_up", width, hidden)
    found, overlap = Chosen.empty(x, router, width), overlaps(x)
    _gate_up[(cdiv(width, tile.outs), len(found.inner))](
        x, norm, logits, *router.extras, gate_up, x if gate.bias is None else gate.bias, found.inner, found.experts,
        found.weights, eps, router.held.start,
        HIDDEN=hidden, BLOCK_HIDDEN=next_power_of_2(hidden), WIDTH=width, PARTS=logits.shape[1], GRANULE=granule,
        BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins, STAGES=tile.num_stages, OVERLAP=overlap, num_warps=tile.num_warps,
        launch_pdl=overlap, **router.constants, **gate.constants,
    )  # fmt: skip
    return found


def down_few(
    x: Tensor, found: Chosen, down: Tensor, tile: ExpertTile | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x + the weighted sum of the experts, in place. bias [experts, hidden]"""
    assert down.is_contiguous()
    (_num_experts, hidden, width), overlap, routing = down.shape, overlaps(x), found.routing
    tile = tile or few_tile("plain", "down", hidden, width)
    _down[(cdiv(hidden, tile.outs), len(x))](
        x, found.inner, down, x if bias is None else bias, found.experts, found.weights, routing.scaling,
        HIDDEN=hidden, WIDTH=width, TOP_K=routing.top_k, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins,
        RENORMALISES=routing.renormalises, DOWN_BIAS=bias is not None, SPLIT=found.is_split, OVERLAP=overlap,
        num_warps=tile.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return x
