"""What the kernels must do with numerics=exact, in the interpreter (exact_interpreted.py) and on a GPU (tests/gpu): the
result of a row has the same bits, whatever else is computed with it. Errors are relative, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from kernels.cases import MOST_ERROR, close, new_pages, read
from kernels.moe_cases import Shape, make, make_quantised
from kernels.moe_cases import close as moe_close
from kernels.quant_cases import weights
from torch import Tensor

from stoker.kernels.attention import SpanShape, group_spans, paged_attention_ref
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.exact_rows import ExactWeight, exact_linear
from stoker.kernels.exact_tiles import ExactTiles
from stoker.kernels.moe import add_experts_triton
from stoker.kernels.paged import Cutter, PagedSpans, new_counters, paged_attention_triton
from stoker.kernels.pieces import FIELDS
from stoker.kernels.reach import FULL, Reach

SCALE = 0.2
BLOCK = 16


@dataclass(frozen=True)
class KernelSpan:
    """`count` tokens of a row from `start` on. The host believes that they start up to `slack` tokens later. Some of the
    tokens may be padding."""

    row: int
    start: int
    count: int
    slack: int = 0
    num_padding: int = 0


@dataclass
class AttentionWorld:
    """Rows of KV of some lengths, at random places. Unused blocks and slots are NaN."""

    lengths: list[int]
    num_heads: int
    kv_heads: int
    dim: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_slack: int = 40
    reach: Reach = FULL
    has_sinks: bool = False
    pages: Tensor = field(init=False)
    table: Tensor = field(init=False)
    blocks: list[list[int]] = field(init=False)
    q: list[Tensor] = field(init=False)  # of each position of each row
    sinks: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(1)
        counts = [-(-(length + self.max_slack) // BLOCK) for length in self.lengths]
        places = iter(rng.sample(range(sum(counts) + 2), sum(counts)))
        self.blocks = [[next(places) for _ in range(count)] for count in counts]
        per_block = 2 * self.kv_heads
        pages = torch.full(((sum(counts) + 2) * per_block, BLOCK * self.dim), float("nan"), device=self.device)
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        for row, (length, mine) in enumerate(zip(self.lengths, self.blocks, strict=True)):
            self.table[row, : len(mine)] = torch.tensor(mine)
            for number, block in enumerate(mine):
                filled = max(0, min(BLOCK, length - number * BLOCK)) * self.dim
                values = torch.randn(per_block, filled, device=self.device)
                # Sizes differ from token to token, so that scales of 8-bit values do.
                sizes = torch.exp(torch.randn(filled // self.dim, device=self.device)).repeat_interleave(self.dim)
                pages[block * per_block : (block + 1) * per_block, :filled] = values * sizes
        self.pages = new_pages(pages.to(self.dtype), self.dim, self.kv_dtype)
        self.table = self.table.to(self.device)
        shape = (self.num_heads, self.dim)
        self.sinks = torch.randn(self.num_heads, device=self.device) * 2 if self.has_sinks else None
        self.q = [torch.randn(length, *shape, device=self.device).to(self.dtype) for length in self.lengths]

    @property
    def cutter(self) -> ExactCutter:
        sizes = ([(self.num_heads, self.kv_heads)], BLOCK, self.dtype)
        return ExactCutter.for_model(*sizes, self.table.shape[1], 4 * self.table.numel())

    def attend(self, spans: list[KernelSpan], as_tiles: bool = False, cutter: Cutter | None = None) -> list[Tensor]:
        """Return the result of each span's tokens that are not padding."""
        cutter = cutter or self.cutter
        counts = np.array([span.count for span in spans])
        firsts = counts.cumsum() - counts
        starts = np.array([span.start + span.slack for span in spans])
        queries, positions, rows = [], [], []
        for span in spans:
            real = span.count - span.num_padding
            queries += [self.q[span.row][span.start : span.start + real]]
            queries += [torch.zeros(span.num_padding, self.num_heads, self.dim, device=self.device).to(self.dtype)]
            positions += [*range(span.start, span.start + real), *[-1] * span.num_padding]
            rows += [span.row] * span.count
        if as_tiles:
            pieces = (_no_pieces(), cutter.tiles(firsts, counts, starts, 1000))
        else:
            pieces = (cutter.singles(firsts, counts, starts, 1000), _no_pieces())
        padded = (torch.from_numpy(np.concatenate([some, _no_pieces(2)])).to(self.device) for some in pieces)
        where = (torch.tensor(rows, device=self.device), torch.tensor(positions, device=self.device))
        finished = new_counters(self.device, 1000 * self.kv_heads)
        sizes = (2 * self.kv_heads, self.kv_heads)
        on_device = PagedSpans(self.table, *where, *padded, (), finished, *sizes, cutter.form, self.reach)
        q = torch.cat(queries)
        unused = q[:, : self.kv_heads]
        found = paged_attention_triton(q.clone(), unused, unused, self.pages, on_device, SCALE, self.sinks)
        assert not finished.any()
        is_padding = where[1] < 0
        assert torch.equal(found[is_padding], q[is_padding]), "padding was changed"
        return [
            part[: span.count - span.num_padding]
            for part, span in zip(found.split(counts.tolist()), spans, strict=True)
        ]

    def expected(self, span: KernelSpan) -> Tensor:
        """Return the reference in float64."""
        pages = [block * 2 * self.kv_heads for block in self.blocks[span.row]]
        shape = SpanShape(0, span.start, span.count, pages[: -(-(span.start + span.count) // BLOCK)])
        groups = group_spans([shape], self.kv_heads, BLOCK, self.device, torch.float64, reach=self.reach)
        wide = read(self.pages, self.dim, torch.float64).nan_to_num()
        q = self.q[span.row][span.start : span.start + span.count].double()
        return paged_attention_ref(q, wide, groups, self.kv_heads, SCALE, self.sinks)

    def check_error(self, span: KernelSpan, found: Tensor) -> None:
        expected = self.expected(span)
        assert found.isfinite().all()
        error = float((found.double() - expected).norm() / expected.norm())
        most = MOST_ERROR[self.dtype] if self.kv_dtype == self.dtype else max(2e-3, MOST_ERROR[self.dtype])
        assert error < most, f"{span}: relative error {error:.2e}"


def _no_pieces(count: int = 0) -> np.ndarray:
    return np.zeros((count, FIELDS), dtype=np.int64)


def verified_attention(
    num_heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, lengths: tuple[int, ...] = (110, 45, 17), deep: bool = False,
    reach: Reach = FULL, has_sinks: bool = False,
) -> None:  # fmt: skip
    """A token has the same bits alone, with other rows, as one of several tokens of a span, and if the host knows only an
    upper bound of its position."""
    sizes = (list(lengths), num_heads, kv_heads, dim)
    world = AttentionWorld(*sizes, device, dtype, kv_dtype or dtype, reach=reach, has_sinks=has_sinks)
    alone = {}

    def one(row: int, position: int) -> Tensor:
        if (row, position) not in alone:
            span = KernelSpan(row, position, 1)
            [alone[row, position]] = world.attend([span])
            world.check_error(span, alone[row, position])
        return alone[row, position]

    rng = random.Random(0)
    for trial in range(12 if deep else 2):
        spans = []
        for row, length in enumerate(lengths):
            count = min(length, [1, 2, 4, 5, 16, 3, 9][(trial + row) % 7])
            at_edge = rng.choice([length - count, max(0, (length - count) // 32 * 32 - count // 2)])
            padding = rng.choice([0, 0, count // 2])
            spans.append(KernelSpan(row, at_edge, count, rng.choice([0, 0, 1, 15, 40]), padding))
        rng.shuffle(spans)
        for span, found in zip(spans, world.attend(spans), strict=True):
            for i in range(span.count - span.num_padding):
                expected = one(span.row, span.start + i)[0]
                assert torch.equal(found[i], expected), f"trial {trial}, {span}, token {i}"


def chunked_attention(
    num_heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, reach: Reach = FULL, has_sinks: bool = False,
) -> None:  # fmt: skip
    """A prompt's token has the same bits however the prompt is cut into chunks."""
    length = 70
    sizes = ([length, 60], num_heads, kv_heads, dim)
    world = AttentionWorld(*sizes, device, dtype, kv_dtype or dtype, reach=reach, has_sinks=has_sinks)
    whole = KernelSpan(0, 0, length)
    [expected] = world.attend([whole], as_tiles=True)
    world.check_error(whole, expected)
    for start, count in ((0, 33), (33, 33), (66, 4), (0, 1), (69, 1), (13, 7), (20, 50)):
        found = world.attend([KernelSpan(1, 3, 20), KernelSpan(0, start, count)], as_tiles=True)[1]
        assert torch.equal(found, expected[start : start + count]), f"{count} tokens from {start}"


def fast_verified_attention(
    num_heads: int, kv_heads: int, dim: int, device: torch.device, dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None, reach: Reach = FULL, has_sinks: bool = False,
) -> None:  # fmt: skip
    """Without numerics=exact, spans with drafts are computed by the same kernel, up to rounding."""
    sizes = ([200, 45], num_heads, kv_heads, dim)
    world = AttentionWorld(*sizes, device, dtype, kv_dtype or dtype, reach=reach, has_sinks=has_sinks)
    cutter = Cutter.of([(num_heads, kv_heads)], BLOCK, dtype, verifies=True)
    spans = [
        KernelSpan(0, 150, 5, slack=40),
        KernelSpan(1, 40, 1),
        KernelSpan(0, 183, 16, slack=7),
        KernelSpan(1, 0, 3),
    ]
    for span, found in zip(spans, world.attend(spans, cutter=cutter), strict=True):
        world.check_error(span, found)


def _rows_agree(matmul: Callable[[Tensor, Tensor], Tensor], x: Tensor, total: Tensor, counts: Sequence[int]) -> Tensor:
    """Check that parts of x give the bits of all of x, which are returned."""
    whole = matmul(x, total.clone())
    for count in counts:
        for first in {0, (len(x) - count) // 2, len(x) - count}:
            mine = slice(first, first + count)
            found = matmul(x[mine].clone(), total[mine].clone())
            assert torch.equal(found, whole[mine]), f"{count} rows from {first}"
    return whole


def exact_matmul(
    num_outs: int, num_ins: int, device: torch.device, dtype: torch.dtype, counts: Sequence[int],
    tiles: ExactTiles | None = None, add: bool = False,
) -> None:  # fmt: skip
    """`tiles` in place of those that are chosen for the shape."""
    weight = (torch.randn(num_outs, num_ins, device=device) * num_ins**-0.5).to(dtype)
    x = torch.randn(max(counts), num_ins, device=device).to(dtype)
    ready = ExactWeight.of(weight) if tiles is None else ExactWeight(weight, tiles)
    total = torch.randn(len(x), num_outs, device=device).to(dtype)
    found = _rows_agree(lambda x, total: exact_linear(x, ready, add_to=total if add else None), x, total, counts)
    expected = x.double() @ weight.double().t()
    close(found, expected + total.double() if add else expected)


def exact_quant_matmul(
    num_outs: int, num_ins: int, device: torch.device, dtype: torch.dtype, counts: Sequence[int],
    tiles: ExactTiles | None = None,
) -> None:  # fmt: skip
    for weight, meant in weights(num_outs, num_ins, device):
        x = torch.randn(max(counts), num_ins, device=device).to(dtype)
        ready = ExactWeight.of(replace(weight, quantises_inputs=not weight.is_int4))
        ready = ready if tiles is None else ExactWeight(ready.weight, tiles)
        total = torch.randn(len(x), num_outs, device=device).to(dtype)
        found = _rows_agree(lambda x, total, ready=ready: exact_linear(x, ready, add_to=total), x, total, counts)
        close(found, x.double() @ meant.t() + total.double())


def exact_experts(
    shape: Shape, device: torch.device, dtype: torch.dtype, counts: Sequence[int], form: str | None = None,
    in_codes: bool = False,
) -> None:  # fmt: skip
    """A token's experts and their sum do not depend on the other tokens. `in_codes`: both sides in 8 bits."""
    most = max(counts)
    case = make(most, shape, device, dtype) if form is None else make_quantised(most, shape, form, device, dtype)
    experts = replace(case.experts, exact=True)
    if in_codes:
        gate_up, down = (replace(weight, quantises_inputs=True) for weight in (experts.gate_up, experts.down))
        experts = replace(experts, gate_up=gate_up, down=down)
    whole = add_experts_triton(case.x.clone(), case.norm, experts)
    if not in_codes:
        moe_close(whole, case.expected())
    for count in counts:
        for first in {0, most - count}:
            mine = slice(first, first + count)
            found = add_experts_triton(case.x[mine].clone(), case.norm, experts)
            assert torch.equal(found, whole[mine]), f"{count} tokens from {first}"
