# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""8-bit and 4-bit experts (moe_quant.py) for very few tokens: the two kernels of moe_few.py, where each pair reads its
expert's weights itself.

Values are accumulated in three dimensions (outputs, groups of inputs that share a scale, inputs), so that a scale is
read once per group. moe.py has the reference.
"""

from __future__ import annotations

from torch import Tensor

from stoker.kernels.dispatch import cdiv, next_power_of_2, overlaps, tl, triton
from stoker.kernels.moe_choice import ExpertRouter, row_scale
from stoker.kernels.moe_few import Chosen, choose, put_choice, share_of, weighted
from stoker.kernels.moe_gate import SILU, Gate, gate_biases, gated
from stoker.kernels.moe_tile_model import ExpertTile, few_tile
from stoker.kernels.quant import SPAN, QuantWeight, code_value, half_of_pair

_FP8_GROUP = 128  # inputs that share a scale: this many, or all


@triton.jit
def _add_fp8(
    sums, x, norm, share, codes, scale, made, start, num_ins,
    INS: tl.constexpr, NORM: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    group = start + tl.arange(0, BLOCK_IN // 128) * 128
    column = group[:, None] + tl.arange(0, 128)[None, :]
    is_in = column < num_ins
    given = tl.load(x + column, mask=is_in, other=0.0).to(tl.float32) * share
    if NORM:
        given = given * tl.load(norm + column, mask=is_in, other=0.0).to(tl.float32)
    taken = tl.load(
        codes + made.to(tl.int64)[:, None, None] * INS + column[None, :, :], mask=is_in[None, :, :], other=0.0
    )
    COLS: tl.constexpr = (INS + COL_BLOCK - 1) // COL_BLOCK
    factor_from = scale + (made // ROW_BLOCK)[:, None] * COLS + (group // COL_BLOCK)[None, :]
    factor = tl.load(factor_from, mask=(group < num_ins)[None, :], other=0.0)
    return sums + taken.to(tl.float32) * given[None, :, :] * factor[:, :, None]


@triton.jit
def _add_int4(
    sums, x, norm, share, codes, scale, made, start, num_ins,
    INS: tl.constexpr, ALL_OUTS: tl.constexpr, FLOATS: tl.constexpr, NORM: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    SPANS: tl.constexpr = (INS + 255) // 256
    span = start // 256 + tl.arange(0, BLOCK_IN // 256)
    is_span = span * 256 < num_ins
    word = tl.arange(0, 32)
    place = span[:, None] * 32 + word[None, :]
    taken_from = codes + made.to(tl.int64)[:, None, None] * (SPANS * 32) + place[None, :, :]
    taken = tl.load(taken_from, mask=is_span[None, :, None], other=0)
    pairs_from = scale + span[None, :] * (4 * ALL_OUTS) + made[:, None]
    for j in tl.static_range(8):
        column = span[:, None] * 256 + j * 32 + word[None, :]
        is_in = column < num_ins
        given = tl.load(x + column, mask=is_in, other=0.0).to(tl.float32) * share
        if NORM:
            given = given * tl.load(norm + column, mask=is_in, other=0.0).to(tl.float32)
        pair = tl.load(pairs_from + (j // 2) * ALL_OUTS, mask=is_span[None, :], other=0)
        code = (taken >> (4 * j)) & 15
        if FLOATS:
            value = code_value(code, FLOATS)
        else:
            # A code in the low bits of 2**23 makes 2**23 + code, and codes are stored plus 8. This is faster than a
            # conversion.
            value = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        sums += value * given[None, :, :] * half_of_pair(pair, j % 2)[:, :, None]
    return sums


@triton.jit
def _add(
    sums, x, norm, share, codes, scale, made, start, num_ins,
    INS: tl.constexpr, ALL_OUTS: tl.constexpr, INT4: tl.constexpr, FLOATS: tl.constexpr, NORM: tl.constexpr,
    ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Add to `sums` the weight rows `made` multiplied by BLOCK_IN values of a row of x. The result is scaled by `share`
    and optionally by the norm's weight. `num_ins` is INS, or 0 where nothing is to be read or added."""
    if INT4:
        return _add_int4(
            sums, x, norm, share, codes, scale, made, start, num_ins, INS, ALL_OUTS, FLOATS, NORM, BLOCK_IN
        )  # fmt: skip
    else:
        return _add_fp8(
            sums, x, norm, share, codes, scale, made, start, num_ins, INS, NORM, ROW_BLOCK, COL_BLOCK, BLOCK_IN
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_expert"])
def _gate_up(
    x, norm, logits, bias, correction, codes, scale, gate_up_bias, inner, chosen, weights, eps, first_expert,
    HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISES: tl.constexpr,
    ON_INPUT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CORRECTION: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_MEMBERS: tl.constexpr, HELD: tl.constexpr, INT4: tl.constexpr,
    FLOATS: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATE_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    token = pair // TOP_K
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    mine = x + token * HIDDEN
    size = row_scale(mine, eps, HIDDEN, BLOCK_HIDDEN)
    routed = logits + token * PARTS * EXPERTS
    expert = choose(
        routed, pair % TOP_K, size, bias, correction, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS,
        HAS_CORRECTION, GROUPS, TOP_GROUPS, BLOCK_GROUPS, BLOCK_MEMBERS,
    )  # fmt: skip
    held = expert
    if HELD < EXPERTS:
        held = expert - first_expert
        if (held < 0) | (held >= HELD):
            if tl.program_id(0) == 0:
                put_choice(
                    routed, expert, first_expert, size, bias, chosen, weights, pair, PARTS, EXPERTS, BLOCK_EXPERTS,
                    SIGMOID, HAS_BIAS, RENORMALISES, ON_INPUT, HELD,
                )  # fmt: skip
            return
    first_out = tl.program_id(0) * BLOCK_OUT
    both = tl.arange(0, 2 * BLOCK_OUT)
    # Padding reads the last output and is written nowhere.
    made = (held * 2 + both // BLOCK_OUT).to(tl.int32) * WIDTH + tl.minimum(first_out + both % BLOCK_OUT, WIDTH - 1)
    sums = tl.zeros([2 * BLOCK_OUT, GROUP, TOGETHER], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_IN, num_stages=STAGES):
        sums = _add(
            sums, mine, norm, 1.0, codes, scale, made, start, HIDDEN,
            HIDDEN, HELD * 2 * WIDTH, INT4, FLOATS, True, ROW_BLOCK, COL_BLOCK, BLOCK_IN,
        )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if ON_INPUT:
        size *= share_of(routed, expert, size, bias, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID, HAS_BIAS, RENORMALISES)
    gate, up = (tl.sum(tl.sum(sums, 2), 1) * size).reshape(2, BLOCK_OUT).permute(1, 0).split()
    out = first_out + tl.arange(0, BLOCK_OUT)
    if GATE_BIAS:
        gate_bias, up_bias = gate_biases(gate_up_bias, held, out, WIDTH)
        gate, up = gate + gate_bias, up + up_bias
    found = gated(gate, up, LIMIT, ALPHA)
    tl.store(inner + pair * WIDTH + out, found.to(inner.dtype.element_ty), mask=out < WIDTH)
    if tl.program_id(0) == 0:
        put_choice(
            routed, expert, first_expert, size, bias, chosen, weights, pair, PARTS, EXPERTS, BLOCK_EXPERTS, SIGMOID,
            HAS_BIAS, RENORMALISES, ON_INPUT, HELD,
        )  # fmt: skip


@triton.jit
def _down(
    x, inner, codes, scale, bias, chosen, weights, scaling,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, HELD: tl.constexpr, INT4: tl.constexpr,
    FLOATS: tl.constexpr, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, RENORMALISES: tl.constexpr, DOWN_BIAS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = out < HIDDEN
    sums = tl.zeros([BLOCK_OUT, GROUP, TOGETHER], tl.float32)
    biases = tl.zeros([BLOCK_OUT], tl.float32)
    all_shares = 0.0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for rank in tl.range(0, TOP_K, num_stages=STAGES):
        pair = token * TOP_K + rank
        share = tl.load(weights + pair)
        all_shares += share
        expert = tl.load(chosen + pair)
        num_outs, num_ins = HIDDEN, WIDTH
        if SPLIT:  # nothing is read for an expert of another rank, and what `inner` has for it is undefined
            num_outs, num_ins = tl.where(expert >= 0, HIDDEN, 0), tl.where(expert >= 0, WIDTH, 0)
        made = expert * HIDDEN + tl.minimum(out, HIDDEN - 1)
        if DOWN_BIAS:
            biases += share * tl.load(bias + made, mask=out < num_outs, other=0.0).to(tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK_IN):
            sums = _add(
                sums, inner + pair * WIDTH, inner, share, codes, scale, made, start, num_ins,
                WIDTH, HELD * HIDDEN, INT4, FLOATS, False, ROW_BLOCK, COL_BLOCK, BLOCK_IN,
            )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    found = weighted(tl.sum(tl.sum(sums, 2), 1) + biases, all_shares, scaling, RENORMALISES)
    total = tl.load(x + token * HIDDEN + out, mask=is_out, other=0.0).to(tl.float32) + found
    tl.store(x + token * HIDDEN + out, total.to(x.dtype.element_ty), mask=is_out)


def _of_weight(weight: QuantWeight, tile: ExpertTile) -> dict[str, int]:
    """Return the arguments of both kernels that describe a weight and how to traverse it."""
    num_ins, group = weight.shape[1], SPAN if weight.is_int4 else _FP8_GROUP
    assert weight.is_int4 or weight.col_block % _FP8_GROUP == 0 or weight.col_block == num_ins
    block = min(tile.ins, max(group, next_power_of_2(num_ins)))
    return {
        "INT4": weight.is_int4, "FLOATS": weight.floats, "ROW_BLOCK": weight.row_block, "COL_BLOCK": weight.col_block,
        "BLOCK_IN": block, "GROUP": block // group, "TOGETHER": 32 if weight.is_int4 else group,
        "BLOCK_OUT": tile.outs, "STAGES": tile.num_stages, "num_warps": tile.num_warps,
    }  # fmt: skip


def quant_gate_up_few(
    x: Tensor, norm: Tensor, eps: float, logits: Tensor, router: ExpertRouter, gate_up: QuantWeight,
    tile: ExpertTile | None = None, gate: Gate = SILU,
) -> Chosen:  # fmt: skip
    assert x.is_contiguous()
    hidden, width = gate_up.shape[1], gate_up.shape[0] // len(router.held) // 2
    tile = tile or few_tile("int4" if gate_up.is_int4 else "fp8", "gate_up", width, hidden)
    found, overlap = Chosen.empty(x, router, width), overlaps(x)
    _gate_up[(cdiv(width, tile.outs), len(found.inner))](
        x, norm, logits, *router.extras, gate_up.codes, gate_up.scale, x if gate.bias is None else gate.bias,
        found.inner, found.experts, found.weights, eps, router.held.start,
        HIDDEN=hidden, BLOCK_HIDDEN=next_power_of_2(hidden), WIDTH=width, PARTS=logits.shape[1], OVERLAP=overlap,
        launch_pdl=overlap, **router.constants, **gate.constants, **_of_weight(gate_up, tile),
    )  # fmt: skip
    return found


def quant_down_few(
    x: Tensor, found: Chosen, down: QuantWeight, tile: ExpertTile | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x + the weighted sum of the experts, in place. bias [experts, hidden]"""
    hidden, width, routing = x.shape[1], down.shape[1], found.routing
    tile = tile or few_tile("int4" if down.is_int4 else "fp8", "down", hidden, width)
    overlap = overlaps(x)
    _down[(cdiv(hidden, tile.outs), len(x))](
        x, found.inner, down.codes, down.scale, x if bias is None else bias, found.experts, found.weights,
        routing.scaling,
        HIDDEN=hidden, WIDTH=width, TOP_K=routing.top_k, HELD=down.shape[0] // hidden,
        RENORMALISES=routing.renormalises, DOWN_BIAS=bias is not None, SPLIT=found.is_split, OVERLAP=overlap,
        launch_pdl=overlap, **_of_weight(down, tile),
    )  # fmt: skip
    return x
