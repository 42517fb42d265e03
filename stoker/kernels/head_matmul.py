# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""A matmul with a weight for each head.  x [tokens, heads, ins]   weight [heads, ins, outs]   ->  [tokens, heads, outs]

Both may be views: of x, the values of a head are contiguous. On a GPU, few tokens go through a kernel that reads each
weight once, many through cuBLAS. With `exact`, all of them go through the kernel: it adds up the inputs of a token in
the same order whatever other tokens there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.kernels.cpu_rows import exact_matmul
from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton, use_triton, wait_for_inputs

_FEW_TOKENS = 64
_ROWS, _OUTS, _INS = 16, 64, 64


def head_matmul_ref(x: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    if exact and x.device.type == "cpu":
        heads = zip(x.unbind(1), weight, strict=True)
        return torch.stack([exact_matmul(rows.contiguous(), one.t().contiguous()) for rows, one in heads], 1)
    out = x.new_empty(*x.shape[:2], weight.shape[2])
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _head_matmul(
    x, weight, out, num_tokens, x_token, x_head, weight_head, weight_in, weight_out,
    HEADS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    made = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    is_token, is_made = (token < num_tokens)[:, None], (made < OUTS)[None, :]
    given_from = x + token.to(tl.int64)[:, None] * x_token + head * x_head + column[None, :]
    taken_from = weight + head * weight_head + column[:, None] * weight_in + made[None, :] * weight_out
    wait_for_inputs(OVERLAP)
    sums = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in range(0, INS, BLOCK_IN):
        is_in = start + column < INS
        given = tl.load(given_from + start, mask=is_token & is_in[None, :], other=0.0)
        taken = tl.load(taken_from + start * weight_in, mask=is_made & is_in[:, None], other=0.0)
        sums = tl.dot(given, taken, sums, input_precision="ieee")
    place = out + (token.to(tl.int64)[:, None] * HEADS + head) * OUTS + made[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_token & is_made)


def head_matmul_triton(x: Tensor, weight: Tensor) -> Tensor:
    assert x.stride(2) == 1
    num_tokens, num_heads, num_ins = x.shape
    num_outs, overlap = weight.shape[2], overlaps(x)
    out = x.new_empty(num_tokens, num_heads, num_outs)
    outs, ins = min(_OUTS, max(16, next_power_of_2(num_outs))), min(_INS, max(16, next_power_of_2(num_ins)))
    _head_matmul[(cdiv(num_outs, outs), num_heads, cdiv(num_tokens, _ROWS))](
        x, weight, out, num_tokens, *x.stride()[:2], *weight.stride(),
        HEADS=num_heads, OUTS=num_outs, INS=num_ins, ROWS=_ROWS, BLOCK_OUT=outs, BLOCK_IN=ins, OVERLAP=overlap,
        num_warps=4, num_stages=3, launch_pdl=overlap,
    )  # fmt: skip
    return out


def head_matmul(x: Tensor, weight: Tensor, exact: bool = False) -> Tensor:
    if use_triton(x) and (exact or len(x) <= _FEW_TOKENS):
        return head_matmul_triton(x, weight)
    return head_matmul_ref(x, weight, exact)
