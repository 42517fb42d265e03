"""The kernels of 8-bit and 4-bit experts compile for a Hopper GPU with the tiles they are launched with, use its tensor
cores and fit its shared memory. test_moe_kernels.py starts this in a process of its own: in the others, kernels are
interpreted or absent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton  # before any kernel, otherwise they are not defined
from kernels.hopper import SHARED_BYTES, CompiledKernel
from kernels.moe_cases import FORMS
from kernels.quant_cases import made_fp8, made_int4

from stoker.kernels import moe_few, moe_many, moe_quant, moe_quant_few, moe_route
from stoker.kernels.moe_choice import ExpertRouter, Routing
from stoker.kernels.moe_quant import quant_down, quant_gate_up
from stoker.kernels.moe_route import COUNT_STRIDE, Lists
from stoker.kernels.quant import QuantWeight

assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is not to be set"
CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 4, 2


def weight(form: str, num_out: int, num_in: int, quantises_inputs: bool) -> QuantWeight:
    described = FORMS[form]
    if isinstance(described, int):
        return made_int4(num_out, num_in, described, CPU, floats=form == "mxfp4")[0]
    return replace(made_fp8(num_out, num_in, *described, CPU)[0], quantises_inputs=quantises_inputs)


def lists(num_tokens: int) -> Lists:
    return Lists(
        torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16),
        torch.empty(num_tokens, TOP_K),
        torch.empty(EXPERTS * COUNT_STRIDE, dtype=torch.int32),
        torch.empty(EXPERTS, num_tokens, dtype=torch.int32),
        EXPERTS,
    )


def quantised(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.float8_e4m3fn), torch.empty(x.shape[1] // group, len(x)).t()


@pytest.fixture
def kernels(monkeypatch):
    """Compile the kernels of a module as for a GPU."""

    def take(module):
        found = CompiledKernel(module._gate_up), CompiledKernel(module._down)
        for name, kernel in zip(("_gate_up", "_down"), found, strict=True):
            monkeypatch.setattr(module, name, kernel)
        monkeypatch.setattr(module, "overlaps", lambda x: True)
        return found

    monkeypatch.setattr(moe_quant, "quantise_triton", quantised)
    return take


@pytest.mark.parametrize("num_tokens", [16, 66, 100, 400])  # 8, 33, 50 and 200 pairs per expert
@pytest.mark.parametrize(
    ("form", "quantises_inputs"),
    [
        ("fp8 channels", True),
        ("fp8 blocks", True),
        ("fp8 blocks", False),
        ("int4 groups of 32", False),
        ("mxfp4", False),
    ],
)
def test_many_tokens(kernels, form, quantises_inputs, num_tokens):
    gate_up, down = kernels(moe_quant)
    inner = quant_gate_up(lists(num_tokens), weight(form, EXPERTS * 2 * WIDTH, HIDDEN, quantises_inputs))
    quant_down(lists(num_tokens), inner, weight(form, EXPERTS * HIDDEN, WIDTH, quantises_inputs))
    for kernel in (gate_up, down):
        assert kernel.found.metadata.shared <= SHARED_BYTES
        products = [line for line in kernel.found.asm["ptx"].splitlines() if "wgmma.mma_async" in line]
        assert products
        assert all(("e4m3.e4m3" in line) == quantises_inputs for line in products)


def routers() -> Iterator[ExpertRouter]:
    """Return a router of each kind, for EXPERTS experts."""
    correction = torch.empty(EXPERTS)
    weight, bias = torch.empty(EXPERTS, HIDDEN, dtype=torch.bfloat16), torch.empty(EXPERTS, dtype=torch.bfloat16)
    yield ExpertRouter(weight, Routing(TOP_K, renormalises=True))
    yield ExpertRouter(weight, Routing(TOP_K, bias=True), bias)
    yield ExpertRouter(weight, Routing(TOP_K, "sigmoid", True, 2.5, 2, 1, correction=True), None, correction)
    yield ExpertRouter(weight, Routing(1, "sigmoid", on_input=True))


def router_of_a_part() -> ExpertRouter:
    """Return the router of a rank that holds EXPERTS of twice as many experts."""
    weight = torch.empty(2 * EXPERTS, HIDDEN, dtype=torch.bfloat16)
    return ExpertRouter(weight, Routing(TOP_K, renormalises=True), part=range(EXPERTS, 2 * EXPERTS))


@pytest.mark.parametrize("form", ["fp8 channels", "fp8 blocks", "int4 groups of 32", "mxfp4"])
def test_few_tokens(kernels, form):
    gate_up, down = kernels(moe_quant_few)
    x, norm = torch.empty(1, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN, dtype=torch.bfloat16)
    weights = weight(form, EXPERTS * 2 * WIDTH, HIDDEN, False), weight(form, EXPERTS * HIDDEN, WIDTH, False)
    for router in (*routers(), router_of_a_part()):
        found = moe_quant_few.quant_gate_up_few(x, norm, 1e-6, torch.empty(1, 8, len(router)), router, weights[0])
        moe_quant_few.quant_down_few(x, found, weights[1])
        for kernel in (gate_up, down):
            assert kernel.found.metadata.shared <= SHARED_BYTES


def test_routings_of_plain_experts(kernels, monkeypatch):
    gate_up, down = kernels(moe_few)
    lists_kernel, sum_kernel = CompiledKernel(moe_route._list_by_expert), CompiledKernel(moe_many._combine)
    monkeypatch.setattr(moe_route, "_list_by_expert", lists_kernel)
    monkeypatch.setattr(moe_many, "_combine", sum_kernel)
    x, norm = torch.empty(1, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN, dtype=torch.bfloat16)
    both, last = (torch.empty(EXPERTS, *size, dtype=x.dtype) for size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    for router in (*routers(), router_of_a_part()):
        num_experts = len(router)
        logits, counts = torch.empty(1, 8, num_experts), torch.empty(num_experts * COUNT_STRIDE, dtype=torch.int32)
        moe_few.down_few(x, moe_few.gate_up_few(x, norm, 1e-6, logits, router, both, WIDTH), last)
        found = moe_route.list_by_expert(x, norm, 1e-6, logits, counts, router)
        moe_many.combine(x, x.new_empty(router.routing.top_k, HIDDEN), found)
        for kernel in (gate_up, down, lists_kernel, sum_kernel):
            assert kernel.found.metadata.shared <= SHARED_BYTES
