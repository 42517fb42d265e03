# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The router: which expert gets which token.

x [tokens, hidden]   router [experts, hidden]   ->  logits [tokens, parts, experts], float32

The logits are those of x times the norm's weight. The kernel that reads them adds up their parts and divides by the
token's norm, which does not change their order. A token and one of its experts are a pair, numbered token * top_k +
rank. An expert's pairs are listed in any order, because the result of a pair depends on nothing else in the list.
Listed are the experts that this rank holds, counted from the first of them. The other pairs get the weight zero.
moe_choice.py says which experts are chosen; moe.py has the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton, wait_for_inputs
from stoker.kernels.moe_choice import ExpertRouter, choice_keys, index_of, logits_of, shares
from stoker.kernels.moe_tile_model import RouterTile, list_warps, router_tile

# Each expert's counter has a cache line of its own: thousands of tokens count at the same time.
COUNT_STRIDE = 32
_WARP = 32


@dataclass(frozen=True, slots=True)
class Lists:
    normed: Tensor  # [tokens, hidden]; scaled by the weight if that multiplies the expert's input
    weights: Tensor  # [tokens, top_k], in float32; zero for experts of other ranks
    counts: Tensor  # [at least experts * COUNT_STRIDE]: the number of pairs of each expert
    pairs: Tensor  # [experts, at least tokens]
    num_routed: int  # the experts of all ranks

    @property
    def load(self) -> float:
        """Average number of pairs per expert."""
        return self.num_pairs / self.num_routed

    @property
    def num_pairs(self) -> int:
        """The pairs of all experts, which have a place in the results."""
        return self.weights.numel()

    @property
    def expected_pairs(self) -> int:
        """The pairs of this rank's experts, if all experts have the same number."""
        return cdiv(self.num_pairs * self.num_experts, self.num_routed)

    @property
    def num_experts(self) -> int:
        """The experts of this rank."""
        return len(self.pairs)

    @property
    def is_split(self) -> bool:
        """True if other ranks have other experts."""
        return self.num_experts < self.num_routed


@triton.jit(do_not_specialize=["num_tokens"])
def _router_logits(
    x, norm, router, logits, counts, num_tokens, num_experts,
    HIDDEN: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    COUNTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    split = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_expert = row < num_tokens, expert < num_experts
    if (tl.program_id(1) == 0) & (split == 0):
        tl.store(counts + expert * COUNTS, tl.zeros([BLOCK_OUT], tl.int32), mask=is_expert)
    PART: tl.constexpr = (HIDDEN + SPLITS * BLOCK_IN - 1) // (SPLITS * BLOCK_IN) * BLOCK_IN
    column = split * PART + tl.arange(0, BLOCK_IN)
    taken_from = router + expert[:, None] * HIDDEN + column[None, :]
    given_from = x + row[None, :].to(tl.int64) * HIDDEN + column[:, None]
    sums = tl.zeros([BLOCK_OUT, ROWS], tl.float32)
    for start in range(0, PART, BLOCK_IN):
        is_in = start + column < HIDDEN
        if HIDDEN % (SPLITS * BLOCK_IN) == 0:
            is_in = column >= 0
        taken = tl.load(taken_from + start, mask=is_expert[:, None] & is_in[None, :], other=0.0)
        given = tl.load(given_from + start, mask=is_row[None, :] & is_in[:, None], other=0.0)
        # The norm's weight is applied to the router's side: x stays as it was loaded, and the division can follow
        # later.
        learned = tl.load(norm + start + column, mask=is_in, other=0.0).to(tl.float32)
        taken = (taken.to(tl.float32) * learned[None, :]).to(given.dtype)
        sums = tl.dot(taken, given, sums, input_precision="ieee")
    place = logits + (row[None, :] * SPLITS + split) * num_experts + expert[:, None]
    tl.store(place, sums, mask=is_expert[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["first"])
def _list_by_expert(
    x, norm, logits, bias, correction, normed, weights, counts, pairs, eps, scaling, capacity, first,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr,
    ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, HELD: tl.constexpr,
    COUNTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    wide = tl.load(x + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    learned = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    mine = logits + token * PARTS * EXPERTS
    found = logits_of(mine, tl.arange(0, BLOCK_EXPERTS), scale, bias, PARTS, EXPERTS, HAS_BIAS)
    key = choice_keys(
        mine, found, scale, bias, correction, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, HAS_CORRECTION,
        GROUPS, TOP_GROUPS, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip
    rank = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK_K], 0, tl.int64)
    for i in tl.static_range(TOP_K):
        one = tl.max(key)
        best = tl.where(rank == i, one, best)
        key = tl.where(key == one, -0x7FFFFFFFFFFFFFFF, key)
    is_chosen = rank < TOP_K
    chosen = tl.minimum(index_of(best, BLOCK_EXPERTS), EXPERTS - 1)
    logit = logits_of(mine, chosen, scale, bias, PARTS, EXPERTS, HAS_BIAS)
    weight = tl.where(is_chosen, shares(found, logit, SIGMOID, RENORMALISES), 0.0)
    if RENORMALISES:
        weight = weight / (tl.sum(weight) + 1e-20)
    weight = weight * scaling
    if ON_INPUT:
        scale = scale * tl.sum(weight)
        weight = tl.full([BLOCK_K], 1.0, tl.float32)
    pair = token * TOP_K + rank
    is_stored = is_chosen
    if HELD < EXPERTS:
        chosen -= first
        is_chosen = is_chosen & (chosen >= 0) & (chosen < HELD)
        chosen = tl.where(is_chosen, chosen, 0)
        weight = tl.where(is_chosen, weight, 0.0)
    tl.store(weights + pair, weight, mask=is_stored)
    slot = tl.atomic_add(counts + chosen * COUNTS, 1, mask=is_chosen, sem="relaxed")
    tl.store(pairs + chosen.to(tl.int64) * capacity + slot, pair.to(tl.int32), mask=is_chosen)
    tl.store(normed + token * HIDDEN + column, (wide * scale * learned).to(normed.dtype.element_ty), mask=inside)


def router_logits(x: Tensor, norm: Tensor, router: Tensor, tile: RouterTile | None = None) -> tuple[Tensor, Tensor]:
    """Return the router's logits, and the counters that `list_by_expert` starts from, all zero."""
    assert x.is_contiguous()
    assert router.is_contiguous()
    num_experts = len(router)
    tile = tile or router_tile(len(x), num_experts, x.element_size())
    logits = torch.empty(len(x), tile.splits, num_experts, dtype=torch.float32, device=x.device)
    counts = torch.empty(num_experts * COUNT_STRIDE, dtype=torch.int32, device=x.device)
    overlap = overlaps(x)
    _router_logits[(cdiv(num_experts, tile.outs), cdiv(len(x), tile.rows), tile.splits)](
        x, norm, router, logits, counts, len(x), num_experts,
        HIDDEN=x.shape[1], SPLITS=tile.splits, ROWS=tile.rows, BLOCK_OUT=tile.outs, BLOCK_IN=tile.ins,
        COUNTS=COUNT_STRIDE, OVERLAP=overlap, num_warps=4, num_stages=tile.num_stages, launch_pdl=overlap,
    )  # fmt: skip
    return logits, counts


def list_by_expert(x: Tensor, norm: Tensor, eps: float, logits: Tensor, counts: Tensor, router: ExpertRouter) -> Lists:
    (num_tokens, num_parts, num_experts), hidden, top_k = logits.shape, x.shape[1], router.routing.top_k
    normed = torch.empty_like(x)
    weights = logits.new_empty(num_tokens, top_k)
    # A multiple of 16 for any number of tokens, so that one compiled kernel serves all.
    pairs = counts.new_empty(len(router.held), -(-num_tokens // 16) * 16)
    overlap = overlaps(x)
    _list_by_expert[(num_tokens,)](
        x, norm, logits, *router.extras, normed, weights, counts, pairs, eps, router.routing.scaling, pairs.shape[1],
        router.held.start,
        HIDDEN=hidden, BLOCK=next_power_of_2(hidden), PARTS=num_parts, BLOCK_K=max(_WARP, next_power_of_2(top_k)),
        COUNTS=COUNT_STRIDE, OVERLAP=overlap, num_warps=list_warps(hidden), launch_pdl=overlap, **router.constants,
    )  # fmt: skip
    return Lists(normed, weights, counts, pairs, num_experts)
