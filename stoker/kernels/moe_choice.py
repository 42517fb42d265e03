# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""How a router's logits become the experts of a token and their weights.

logits [tokens, experts]   ->  weights [tokens, top_k], float32   experts [tokens, top_k]

A score is the softmax or the sigmoid of a logit. With sigmoid scores, a correction may be added for the choice alone,
and the choice may be limited to the best groups of experts: those with the largest sum of their two best. The functions
of the kernels get logits in parts, from moe_route.py, without the scale of the token's norm.

A rank may hold some of the experts. It chooses among all of them, and runs those that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from stoker.kernels.dispatch import next_power_of_2, tl, triton

Scoring = Literal["softmax", "sigmoid"]
MAX_GROUPS = 62  # a group is a bit of an integer
_SMALLEST_SUM = 1e-20  # sigmoids may all be zero


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen. A softmax over the chosen experts alone is `softmax` that `renormalises`."""

    top_k: int
    scoring: Scoring = "softmax"
    renormalises: bool = False  # the weights of the chosen experts are scaled to add up to one
    scaling: float = 1.0  # of the weights, after that
    num_groups: int = 1  # groups of consecutive experts
    top_groups: int = 1  # groups that experts are chosen from
    bias: bool = False  # the router has a bias, which is added to its logits
    correction: bool = False  # a learned number per expert is added to the scores for the choice, not to the weights
    on_input: bool = (
        False  # the weight multiplies the expert's input instead of its output; only with top_k 1 and no scaling
    )

    def __post_init__(self) -> None:
        assert self.scoring == "sigmoid" or not (self.correction or self.num_groups > 1)
        assert (self.top_k, self.scaling) == (1, 1.0) or not self.on_input


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """The router of a layer. `bias` and `correction` are there if the routing has them."""

    weight: Tensor  # [experts, hidden]
    routing: Routing
    bias: Tensor | None = None  # [experts]
    correction: Tensor | None = None  # [experts], float32
    part: range | None = None  # the experts that this rank holds; None: all

    @property
    def held(self) -> range:
        """The experts that this rank holds."""
        return self.part or range(len(self))

    def __len__(self) -> int:
        """Return the number of experts."""
        return len(self.weight)

    @property
    def extras(self) -> tuple[Tensor, Tensor]:
        """The bias and the correction as arguments of a kernel, which does not read one that is absent."""
        bias, correction = self.bias, self.correction
        return (self.weight if bias is None else bias), (self.weight if correction is None else correction)

    @property
    def constants(self) -> dict[str, int | bool]:
        """The arguments of the kernels that describe the routing."""
        return _constants(self.routing, len(self), len(self.held))


@lru_cache(maxsize=64)
def _constants(routing: Routing, num_experts: int, num_held: int) -> dict[str, int | bool]:
    return {
        "HELD": num_held,
        "EXPERTS": num_experts, "BLOCK_EXPERTS": next_power_of_2(num_experts), "TOP_K": routing.top_k,
        "SIGMOID": routing.scoring == "sigmoid", "RENORMALISES": routing.renormalises, "ON_INPUT": routing.on_input,
        "HAS_BIAS": routing.bias, "HAS_CORRECTION": routing.correction,
        "GROUPS": routing.num_groups, "TOP_GROUPS": routing.top_groups,
        "BLOCK_GROUPS": next_power_of_2(routing.num_groups),
        "BLOCK_MEMBERS": next_power_of_2(num_experts // routing.num_groups),
    }  # fmt: skip


def choose_ref(logits: Tensor, router: ExpertRouter) -> tuple[Tensor, Tensor]:
    """[tokens, experts] -> weights and indices of the chosen experts, [tokens, top_k] each."""
    routing = router.routing
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if router.bias is not None:
        wide = wide + router.bias.to(wide.dtype)
    # In float64 and rounded: on a CPU, the last bits of a sigmoid depend on its place in memory.
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.double().sigmoid().to(wide.dtype)
    values = scores if router.correction is None else scores + router.correction.to(wide.dtype)
    if routing.num_groups > 1:
        members = values.unflatten(-1, (routing.num_groups, -1))
        best = members.topk(2, -1).values.sum(-1).topk(routing.top_groups, -1).indices
        is_open = torch.zeros_like(members[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        values = members.masked_fill(~is_open[..., None], -torch.inf).flatten(-2)
    chosen = values.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if routing.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return weights * routing.scaling, chosen


@triton.jit
def row_scale(x, eps, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr):
    """Return the scale of a token's RMS norm."""
    column = tl.arange(0, BLOCK_HIDDEN)
    whole = tl.load(x + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(whole * whole) / HIDDEN + eps)


@triton.jit
def logits_of(logits, expert, scale, bias, PARTS: tl.constexpr, EXPERTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return a token's logits for some experts: -inf for those that do not exist."""
    found = tl.load(logits + expert, mask=expert < EXPERTS, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        found += tl.load(logits + part * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    found = found * scale
    if HAS_BIAS:
        found += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    return found


@triton.jit
def shares(every, mine, SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr):
    """Return the weights for the logits `mine`, where `every` has all logits of the token. Their sum is not yet one if
    the routing renormalises."""
    if SIGMOID:
        return 1 / (1 + tl.exp(-mine))
    largest = tl.max(every)
    share = tl.exp(mine - largest)
    if not RENORMALISES:
        share = share / tl.sum(tl.exp(every - largest))
    return share


@triton.jit
def _key(value, index, BLOCK: tl.constexpr):
    """Return one number that orders by value, then by index, the first of equal values first: a single maximum gives
    both."""
    bits = value.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return (ordered << 32) | (BLOCK - 1 - index).to(tl.int64)


@triton.jit
def index_of(key, BLOCK: tl.constexpr):
    """Return the index in a key."""
    return BLOCK - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _values(found, expert, correction, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr):
    """Return what experts are chosen by, from their logits."""
    if not SIGMOID:
        return found
    value = 1 / (1 + tl.exp(-found))
    if HAS_CORRECTION:
        value += tl.load(correction + expert, mask=expert < EXPERTS, other=0.0)
    return value


@triton.jit
def _open_groups(
    logits, scale, bias, correction,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Return the groups that may be chosen from, as bits."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, BLOCK_GROUPS), tl.arange(0, BLOCK_MEMBERS)
    inside = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    expert = tl.where(inside, group[:, None] * MEMBERS + member[None, :], EXPERTS)
    found = logits_of(logits, expert, scale, bias, PARTS, EXPERTS, HAS_BIAS)
    value = _values(found, expert, correction, EXPERTS, SIGMOID, HAS_CORRECTION)
    value = tl.where(inside, value, float("-inf"))
    first = tl.max(value, 1)
    place = tl.min(tl.where(value == first[:, None], member[None, :], MEMBERS), 1)
    second = tl.max(tl.where(member[None, :] == place[:, None], float("-inf"), value), 1)
    lowest = -0x7FFFFFFFFFFFFFFF
    key = tl.where(group < GROUPS, _key(first + second, group, BLOCK_GROUPS), lowest)
    opened = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(key)
        opened = opened | (key == best)
        key = tl.where(key == best, lowest, key)
    bit = tl.full([BLOCK_GROUPS], 1, tl.int64) << group.to(tl.int64)
    return tl.sum(tl.where(opened, bit, 0))


@triton.jit
def choice_keys(
    logits, found, scale, bias, correction,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr,
):  # fmt: skip
    """Return the numbers that experts are chosen by, the largest first. `found` has the token's logits for all experts,
    which `logits` has in parts."""
    expert = tl.arange(0, BLOCK_EXPERTS)
    value = _values(found, expert, correction, EXPERTS, SIGMOID, HAS_CORRECTION)
    may_choose = expert < EXPERTS
    if GROUPS > 1:
        opened = _open_groups(
            logits, scale, bias, correction, PARTS, EXPERTS, SIGMOID, HAS_BIAS, HAS_CORRECTION, GROUPS, TOP_GROUPS,
            BLOCK_GROUPS, BLOCK_MEMBERS,
        )  # fmt: skip
        group = tl.minimum(expert // (EXPERTS // GROUPS), GROUPS - 1).to(tl.int64)
        may_choose = may_choose & (((opened >> group) & 1) == 1)
    return tl.where(may_choose, _key(value, expert, BLOCK_EXPERTS), -0x7FFFFFFFFFFFFFFF)
