"""What the expert kernels must do, on a CPU in the interpreter (moe_interpreted.py) or on a GPU (tests/gpu). They are
compared with the reference in float64 on the same inputs, with routing that has no near ties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from kernels.quant_cases import made_fp8, made_int4
from torch import Tensor

from stoker.kernels.activation import silu_mul_ref
from stoker.kernels.linear import Norm
from stoker.kernels.moe import (
    Experts,
    add_experts_ref,
    add_experts_triton,
    plain_ref,
    to_kernel_layout,
)
from stoker.kernels.moe_choice import ExpertRouter, Routing, Scoring, choose_ref
from stoker.kernels.moe_few import down_few, gate_up_few
from stoker.kernels.moe_gate import SILU, Clamp, Gate
from stoker.kernels.moe_many import combine, down_lists, gate_up_lists
from stoker.kernels.moe_prompt import down_prompt, gate_up_prompt
from stoker.kernels.moe_quant import quant_down, quant_gate_up, takes_codes
from stoker.kernels.moe_quant_few import quant_down_few, quant_gate_up_few
from stoker.kernels.moe_route import COUNT_STRIDE, Lists, list_by_expert, router_logits
from stoker.kernels.moe_tile_model import PairTile
from stoker.kernels.norm import rms_norm_ref
from stoker.kernels.quant import QuantWeight
from stoker.kernels.quant_many import quantise_triton

MOST_ERROR = {torch.float32: 5e-6, torch.bfloat16: 8e-3}


def close(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < MOST_ERROR[found.dtype], f"relative error {error:.2e}"  # NaN fails too


@dataclass(frozen=True)
class Shape:
    hidden: int
    width: int
    experts: int
    top_k: int
    renormalises: bool = True
    granule: int = 8
    scoring: Scoring = "softmax"
    scaling: float = 1.0
    groups: tuple[int, int] = (1, 1)  # all, and those that experts are chosen from
    bias: bool = False
    correction: bool = False
    on_input: bool = False
    expert_bias: bool = False
    clamp: Clamp | None = None
    first: int = 0  # the experts of a rank: the first one, and how many there are
    held: int | None = None  # None: all

    @property
    def num_held(self) -> int:
        return self.held or self.experts

    @property
    def part(self) -> range | None:
        return None if self.held is None else range(self.first, self.first + self.held)

    @property
    def routing(self) -> Routing:
        given = (self.top_k, self.scoring, self.renormalises, self.scaling, *self.groups)
        return Routing(*given, self.bias, self.correction, self.on_input)


# How models with many experts choose them, and Llama 4 and gpt-oss.
ROUTINGS: dict[str, dict[str, Any]] = {
    "groups": {"scoring": "sigmoid", "scaling": 2.5, "groups": (4, 2), "correction": True},
    "one group": {"scoring": "sigmoid", "scaling": 2.827, "correction": True},
    "uncorrected": {"scoring": "sigmoid", "groups": (4, 3), "renormalises": False},
    "bias": {"bias": True},
    "gpt-oss": {"bias": True, "expert_bias": True, "clamp": Clamp(0.8, 1.702)},
    "input": {"top_k": 1, "scoring": "sigmoid", "renormalises": False, "on_input": True},
}


def routed(shape: Shape, name: str) -> Shape:
    """Return the shape with one of the ROUTINGS."""
    return replace(shape, **ROUTINGS[name])


@dataclass(frozen=True)
class Case:
    x: Tensor
    norm: Norm
    experts: Experts

    @property
    def wide(self) -> Case:
        norm, experts = self.norm, self.experts
        gate_up, down = (
            plain_ref(weight, len(experts.router.held), torch.float64) for weight in (experts.gate_up, experts.down)
        )
        router = experts.router
        bias, correction = (None if extra is None else extra.double() for extra in (router.bias, router.correction))
        router = ExpertRouter(router.weight.double(), router.routing, bias, correction, router.part)
        return Case(
            self.x.double(),
            Norm(norm.weight.double(), norm.eps),
            replace(
                experts,
                router=router,
                gate_up=gate_up.double(),
                down=down.double(),
                gate=Gate(experts.gate.clamp, None if experts.gate.bias is None else experts.gate.bias.double()),
                down_bias=None if experts.down_bias is None else experts.down_bias.double(),
            ),
        )

    def expected(self) -> Tensor:
        wide = self.wide
        return add_experts_ref(wide.x, wide.norm, wide.experts)


def make(num_tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> Case:
    """Small changes of a token's logits do not change its experts: rounding must not decide."""

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=device) * scale).to(dtype)

    hidden, width, experts = shape.hidden, shape.width, shape.experts
    bias = random(experts) if shape.bias else None
    correction = torch.rand(experts, device=device) if shape.correction else None
    router_weight = random(experts, hidden, scale=2 * hidden**-0.5)
    router = ExpertRouter(router_weight, shape.routing, bias, correction, shape.part)
    norm = Norm(random(hidden), 1e-5)
    kept: list[Tensor] = []
    while sum(map(len, kept)) < num_tokens:
        x = random(num_tokens + 64, hidden)
        logits = rms_norm_ref(x.double(), norm.weight.double(), norm.eps) @ router.weight.double().t()
        chosen = choose_ref(logits, router)[1].sort(-1).values
        for _ in range(16):
            changed = logits + torch.empty_like(logits).uniform_(-0.03, 0.03)
            is_same = (choose_ref(changed, router)[1].sort(-1).values == chosen).all(-1)
            x, logits, chosen = x[is_same], logits[is_same], chosen[is_same]
        kept.append(x)
    x = torch.cat(kept)[:num_tokens].contiguous()
    held = shape.num_held
    gate_up = random(held, 2 * width, hidden, scale=hidden**-0.5)
    down = random(held, hidden, width, scale=4 * width**-0.5)
    gate, down_bias = SILU, None
    if shape.expert_bias:
        gate, down_bias = Gate(shape.clamp, random(held, 2 * width)), random(held, hidden)
    return Case(x, norm, Experts(router, gate_up, down, shape.granule, gate=gate, down_bias=down_bias))


def routing(num_tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    case = make(num_tokens, shape, device, dtype)
    wide, experts = case.wide, case.experts
    normed = rms_norm_ref(wide.x, wide.norm.weight, wide.norm.eps)
    expected = (wide.x * wide.norm.weight) @ wide.experts.router.weight.t()
    logits, counts = router_logits(case.x, case.norm.weight, experts.router.weight)
    logits_sum = logits.double().sum(1)
    assert float((logits_sum - expected).norm() / expected.norm()) < (1e-5 if dtype == torch.float32 else 1e-2)
    assert not counts.view(-1, COUNT_STRIDE)[:, 0].any()
    lists = list_by_expert(case.x, case.norm.weight, case.norm.eps, logits, counts, experts.router)
    scale = torch.rsqrt(wide.x.square().mean(-1, keepdim=True) + case.norm.eps)
    weights, chosen = choose_ref(logits_sum * scale, wide.experts.router)
    if shape.on_input:
        normed, weights = normed * weights, torch.ones_like(weights)
    close(lists.normed, normed)
    is_held = (chosen >= shape.first) & (chosen < shape.first + shape.num_held)
    assert (lists.weights.double() - weights.where(is_held, 0)).abs().max() < 1e-5
    assert torch.equal(experts_of(lists, shape), chosen.where(is_held, -1).flatten())


def experts_of(lists: Lists, shape: Shape) -> Tensor:
    """Return the expert of each pair that a list has; -1 for the others."""
    found = torch.full((lists.num_pairs,), -1, device=lists.pairs.device)
    counts = lists.counts.view(-1, COUNT_STRIDE)[: shape.num_held, 0].tolist()
    for number, count in enumerate(counts):
        found[lists.pairs[number, :count].long()] = shape.first + number
    return found


def few(num_tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    case = make(num_tokens, shape, device, dtype)
    experts = case.experts
    logits, _counts = router_logits(case.x, case.norm.weight, experts.router.weight)
    x, norm = case.x.clone(), case.norm
    given = (x, norm.weight, norm.eps, logits, experts.router, experts.gate_up, experts.granule)
    found = gate_up_few(*given, gate=experts.gate)
    close(down_few(x, found, experts.down, bias=experts.down_bias), case.expected())


def listed(case: Case) -> Lists:
    experts, norm = case.experts, case.norm
    logits, counts = router_logits(case.x, norm.weight, experts.router.weight)
    return list_by_expert(case.x, norm.weight, norm.eps, logits, counts, experts.router)


def many(num_tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    case = make(num_tokens, shape, device, dtype)
    lists = listed(case)
    inner = gate_up_lists(lists, case.experts.gate_up, shape.granule, gate=case.experts.gate)
    made = down_lists(lists, inner, case.experts.down, bias=case.experts.down_bias)
    close(combine(case.x.clone(), made, lists), case.expected())


def prompt(
    num_tokens: int,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    gate_up: PairTile | None = None,
    down: PairTile | None = None,
) -> None:
    case = make(num_tokens, shape, device, dtype)
    lists = listed(case)
    inner = gate_up_prompt(lists, case.experts.gate_up, shape.granule, gate_up, case.experts.gate)
    made = down_prompt(lists, inner, case.experts.down, down, case.experts.down_bias)
    close(combine(case.x.clone(), made, lists), case.expected())


def whole(num_tokens: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Run a layer with the kernels and tiles that are selected for its shape, after packing as at load time."""
    case = make(num_tokens, shape, device, dtype)
    router, gate_up, down = case.experts.router, case.experts.gate_up, case.experts.down
    stacked = (gate_up.clone().view(-1, shape.hidden), down.clone().view(-1, shape.width))
    plain = replace(case, experts=replace(case.experts, granule=shape.width))
    packed = to_kernel_layout(router, *stacked, gate=case.experts.gate, down_bias=case.experts.down_bias)
    close(add_experts_triton(case.x.clone(), case.norm, packed), plain.expected())


# Ranks that hold some of the experts: the last ones, a single one, and some in the middle.
PARTS = [
    Shape(72, 40, 6, 3, scoring="sigmoid", scaling=2.5, first=3, held=3),
    Shape(100, 20, 11, 6, granule=4, bias=True, expert_bias=True, first=10, held=1),
    Shape(32, 16, 8, 1, granule=16, scoring="sigmoid", renormalises=False, on_input=True, first=2, held=4),
]


# How experts may be stored: rows and columns that share a scale (None: all columns), or inputs of 4 bits that do.
FORMS: dict[str, tuple[int, int | None] | int] = {
    "fp8 channels": (1, None),
    "fp8 blocks": (128, 128),
    "fp8 rows of blocks": (1, 128),
    "int4 groups of 32": 32,
    "int4 groups of 64": 64,
    "mxfp4": 32,
}


def make_quantised(num_tokens: int, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> Case:
    case, described = make(num_tokens, shape, device, dtype), FORMS[form]

    def weight(num_out: int, num_in: int) -> QuantWeight:
        if isinstance(described, int):
            return made_int4(num_out, num_in, described, device, floats=form == "mxfp4")[0]
        return made_fp8(num_out, num_in, *described, device)[0]

    gate_up = weight(shape.num_held * 2 * shape.width, shape.hidden)
    down = weight(shape.num_held * shape.hidden, shape.width)
    return replace(case, experts=replace(case.experts, gate_up=gate_up, down=down, granule=shape.width))


def few_quantised(num_tokens: int, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> None:
    case = make_quantised(num_tokens, shape, form, device, dtype)
    x, norm, experts = case.x.clone(), case.norm, case.experts
    logits, _counts = router_logits(x, norm.weight, experts.router.weight)
    given = (x, norm.weight, norm.eps, logits, experts.router, experts.gate_up)
    found = quant_gate_up_few(*given, gate=experts.gate)
    close(quant_down_few(x, found, experts.down, bias=experts.down_bias), case.expected())


def many_quantised(num_tokens: int, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> None:
    case = make_quantised(num_tokens, shape, form, device, dtype)
    lists = listed(case)
    inner = quant_gate_up(lists, case.experts.gate_up, gate=case.experts.gate)
    made = quant_down(lists, inner, case.experts.down, bias=case.experts.down_bias)
    close(combine(case.x.clone(), made, lists), case.expected())


def one_quantised(num_tokens: int, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> None:
    """Quantise one of the two weights; the other stays plain."""
    case, plain = make_quantised(num_tokens, shape, form, device, dtype), make(1, shape, device, dtype).experts
    for experts in (
        replace(case.experts, gate_up=plain.gate_up, granule=shape.granule),
        replace(case.experts, down=plain.down),
    ):
        mixed = replace(case, experts=experts)
        close(add_experts_triton(mixed.x.clone(), mixed.norm, experts), mixed.expected())


def many_in_codes(num_tokens: int, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> None:
    """Both sides in 8 bits, as for checkpoints made for it: matmuls of the codes that the inputs become."""
    case = make_quantised(num_tokens, shape, form, device, dtype)
    lists, wide, top_k = listed(case), case.wide.experts, shape.top_k
    gate_up, down = (replace(weight, quantises_inputs=True) for weight in (case.experts.gate_up, case.experts.down))
    assert takes_codes(gate_up)
    chosen = experts_of(lists, shape)
    inner = quant_gate_up(lists, gate_up)
    both = torch.einsum(
        "pi,poi->po", _as_codes(lists.normed, gate_up).repeat_interleave(top_k, 0), wide.gate_up[chosen]
    )
    close(inner, silu_mul_ref(both))
    expected = torch.einsum("pi,poi->po", _as_codes(inner, down), wide.down[chosen])
    close(quant_down(lists, inner, down), expected)


def _as_codes(x: Tensor, weight: QuantWeight) -> Tensor:
    """Return what is left of x after quantisation, in float64."""
    codes, scale = quantise_triton(x, weight.col_block)
    return codes[: len(x)].double() * scale[: len(x)].double().repeat_interleave(weight.col_block, 1)
