"""What the kernels of latent attention must do, on a CPU in the interpreter (mla_interpreted.py) or on a GPU (tests/gpu):
the reference's result in float64, whatever the spans, the splits of keys and the form of the computation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.kernels.attention import SpanShape, group_spans
from stoker.kernels.block_split import BlockSplit
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.head_matmul import head_matmul_ref, head_matmul_triton
from stoker.kernels.kv_pages import LARGEST_CODE
from stoker.kernels.latent_pages import entries_read, entries_write, entry_values
from stoker.kernels.latent_write import latent_write_ref, latent_write_triton
from stoker.kernels.linear import Norm
from stoker.kernels.mla import LatentShape, cut_heads, mla_attention_ref, mla_attention_triton
from stoker.kernels.mla_split import split_attention_triton
from stoker.kernels.paged import Cutter, PagedSpans, new_counters
from stoker.kernels.pieces import FIELDS
from stoker.kernels.split_parts import merge_parts

MOST_ERROR = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
PER_BLOCK = 3  # pages of a block: those of three layers
# Odd sizes of heads, one tile of heads, and several.
SHAPES = [LatentShape(5, 24, 16, 20, 32), LatentShape(72, 8, 16, 16, 32)]


def close(found: Tensor, expected: Tensor) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < MOST_ERROR[found.dtype], f"relative error {error:.2e}"  # NaN fails too


@dataclass(frozen=True)
class LatentSpan:
    """`count` tokens of a row from position `start` on; the host believes that it starts `slack` later, and the last
    `num_padding` are padding."""

    row: int
    start: int
    count: int
    slack: int = 0
    num_padding: int = 0


class LatentWorld:
    """Rows with entries in the cache, in blocks in any order. Everything that a row may not see is NaN."""

    def __init__(
        self,
        lengths: list[int],
        shape: LatentShape,
        block: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.block, self.device, self.dtype = shape, block, device, dtype
        max_blocks = -(-(max(lengths) + 64) // block)
        order = torch.randperm(len(lengths) * max_blocks)
        self.table = order.view(len(lengths), max_blocks).to(device)
        self.lengths, self.num_blocks, self.kv_dtype = lengths, len(order), kv_dtype or dtype
        # Tokens of very different size: with 8-bit pages, each has a scale.
        self.written = [torch.randn(length, shape.width, device=device).to(dtype) for length in lengths]
        for entries in self.written:
            entries[:, : shape.latent] *= torch.rand(len(entries), 1, device=device).mul(4).exp().to(dtype) / 16
        self.pages = self.new_pages(0, block)
        numbers = torch.arange(len(self.pages), device=device)
        wide = entries_read(self.pages, numbers, shape.latent, shape.rope, torch.float64)
        self.wide_pages = wide.nan_to_num().view(len(self.pages), -1)
        sizes = (shape.num_heads, shape.nope + shape.rope)
        self.queries = [torch.randn(length, *sizes, device=device).to(dtype) for length in lengths]
        self.weight = (torch.randn(shape.num_heads, shape.nope + shape.value, shape.latent, device=device) / 8).to(
            dtype
        )
        self.scale = (shape.nope + shape.rope) ** -0.5

    def new_pages(self, first: int, count: int) -> Tensor:
        """Return pages that hold `count` tokens of each block."""
        shape, dtype = self.shape, self.kv_dtype
        like = torch.empty(0, dtype=dtype)
        values = count * entry_values(like, shape.latent, shape.rope) * like.itemsize
        raw = torch.full((self.num_blocks * PER_BLOCK, values), 255, dtype=torch.uint8, device=self.device)
        pages = raw.view(dtype)  # of NaN
        for entries, blocks in zip(self.written, self.table, strict=True):
            at = torch.arange(len(entries), device=self.device)
            inside = at % self.block - first
            index = blocks[at // self.block] * PER_BLOCK * count + inside
            entries_write(entries, pages, index.where((inside >= 0) & (inside < count), -1), shape.latent)
        return pages

    def cutter(self, exact: bool) -> Cutter:
        heads = [cut_heads(self.shape.num_heads)]
        if exact:
            return ExactCutter.for_model(heads, self.block, self.dtype, self.table.shape[1], self.num_blocks)
        return Cutter.of(heads, self.block, self.dtype, verifies=True)

    def attend(
        self, spans: list[LatentSpan], *, as_tiles: bool, exact: bool = False, whole: bool = False, contexts: int = 1
    ) -> list[Tensor]:
        """`contexts`: how many ranks split the context."""
        cutter = self.cutter(exact)
        counts = np.array([span.count for span in spans])
        firsts, starts = counts.cumsum() - counts, np.array([span.start + span.slack for span in spans])
        queries, positions, rows = [], [], []
        for span in spans:
            real = span.count - span.num_padding
            queries += [self.queries[span.row][span.start : span.start + real]]
            queries += [torch.zeros(span.num_padding, *queries[0].shape[1:], device=self.device, dtype=self.dtype)]
            positions += [*range(span.start, span.start + real), *[-1] * span.num_padding]
            rows += [span.row] * span.count
        none = np.zeros((0, FIELDS), dtype=np.int64)
        dense: tuple[tuple[int, int], ...] = ()
        if whole:
            dense = tuple(zip(firsts.tolist(), counts.tolist(), strict=True))
            pieces = (none, none)
        elif as_tiles:
            pieces = (none, cutter.tiles(firsts, counts, starts, 1000))
        else:
            pieces = (cutter.singles(firsts, counts, starts, 1000), none)
        padding = np.zeros((2, FIELDS), dtype=np.int64)
        padded = (torch.from_numpy(np.concatenate([some, padding])).to(self.device) if len(some) else torch.from_numpy(some)
                  for some in pieces)  # fmt: skip
        where = (torch.tensor(rows, device=self.device), torch.tensor(positions, device=self.device))
        finished = new_counters(self.device, 20_000)
        on_device = PagedSpans(self.table, *where, *padded, dense, finished, PER_BLOCK, 1, cutter.form)
        q = torch.cat(queries)
        entries = torch.cat([self.entries(span) for span in spans]) if whole else q[:, 0, :1]
        if contexts > 1:
            found = self.merged(q, on_device, contexts)
        else:
            found = mla_attention_triton(q, entries, self.pages, on_device, self.weight, self.shape, self.scale)
        assert not finished.any()
        assert found[where[1] < 0].isfinite().all(), "padding became infinite"
        parts = zip(found.split(counts.tolist()), spans, strict=True)
        return [part[: span.count - span.num_padding] for part, span in parts]

    def merged(self, q: Tensor, spans: PagedSpans, contexts: int) -> Tensor:
        """Return what ranks find together that each hold a part of each block."""
        key_weight, value_weight = self.weight.split([self.shape.nope, self.shape.value], 1)
        absorbed = head_matmul_ref(q[..., : self.shape.nope], key_weight)
        query = torch.cat([absorbed, q[..., self.shape.nope :]], -1)
        pieces = spans.singles if len(spans.singles) else spans.tiles
        assert spans.form.exact or int(pieces[:, 5].max()) > 1, "no keys are split among programs"
        parts, sums = [], []
        for index in range(contexts):
            held, split = (
                self.new_pages(index * self.block // contexts, self.block // contexts),
                BlockSplit(index, contexts),
            )
            part, own = split_attention_triton(query.clone(), held, spans, split, self.shape, self.scale)
            parts.append(part)
            sums.append(own)
        assert torch.stack(sums)[:, spans.positions < 0].eq(float("-inf")).all(), "padding sees keys"
        return head_matmul_ref(merge_parts(parts, sums).to(q.dtype), value_weight.transpose(1, 2))

    def entries(self, span: LatentSpan) -> Tensor:
        blocks = self.wide_pages.view(-1, PER_BLOCK, self.block, self.shape.width)[self.table[span.row], 0]
        return blocks.flatten(0, 1)[span.start : span.start + span.count].to(self.dtype)

    def expected(self, span: LatentSpan) -> Tensor:
        """Return the reference in float64, in the form that takes fewer multiplications."""
        count = span.count - span.num_padding
        blocks = self.table[span.row, : -(-(span.start + count) // self.block)]
        given = SpanShape(0, span.start, count, (blocks * PER_BLOCK).tolist())
        groups = group_spans([given], 1, self.block, self.device, torch.float64)
        q = self.queries[span.row][span.start : span.start + count].double()
        wide = (self.wide_pages, groups, self.weight.double())
        return mla_attention_ref(q, *wide, self.shape, self.scale)


def spans_of_all_kinds(shape: LatentShape, device: torch.device, dtype: torch.dtype, block: int = 16) -> None:
    """Decoding with split keys, verification with padding, chunks of prompts, and whole prompts."""
    world = LatentWorld([150, 45, 17, 1], shape, block, device, dtype)
    decoding = [LatentSpan(0, 149, 1), LatentSpan(2, 16, 1, slack=40), LatentSpan(3, 0, 1)]
    verifying = [LatentSpan(0, 120, 5, slack=20), LatentSpan(1, 30, 4, num_padding=2)]
    chunks = [LatentSpan(0, 100, 20), LatentSpan(1, 0, 45), LatentSpan(2, 13, 4)]
    for spans, as_tiles in ((decoding, False), (verifying, False), (chunks, True)):
        for span, found in zip(spans, world.attend(spans, as_tiles=as_tiles), strict=True):
            close(found, world.expected(span))
    prompts = [LatentSpan(0, 0, 40), LatentSpan(1, 0, 45)]
    for spans in (prompts, prompts[:1]):
        for span, found in zip(spans, world.attend(spans, as_tiles=False, whole=True), strict=True):
            close(found, world.expected(span))


def split_spans(shape: LatentShape, contexts: int, device: torch.device, dtype: torch.dtype, length: int = 300) -> None:
    """Ranks that split the context find together what one rank finds, with keys that are split among programs too, and with
    tokens of which some ranks have no key."""
    world = LatentWorld([length, 45, 17, 1], shape, 16 * contexts, device, dtype)
    decoding = [LatentSpan(0, length - 1, 1), LatentSpan(2, 16, 1, slack=40), LatentSpan(3, 0, 1)]
    verifying = [LatentSpan(0, length - 50, 2, slack=20), LatentSpan(1, 14, 3, num_padding=1)]
    chunks = [LatentSpan(0, length - 30, 4), LatentSpan(1, 14, 5)]
    cases = ((decoding, False, False), (verifying, False, True), (chunks, True, False))
    for spans, as_tiles, exact in cases:
        found = world.attend(spans, as_tiles=as_tiles, exact=exact, contexts=contexts)
        for span, tokens in zip(spans, found, strict=True):
            close(tokens, world.expected(span))


def exact_spans(shape: LatentShape, device: torch.device, dtype: torch.dtype, length: int = 290) -> None:
    """A token has the same bits alone, with other rows, and as one of several tokens; a prompt's token in any chunk."""
    world = LatentWorld([length, 45], shape, 16, device, dtype)

    def alone(row: int, position: int, as_tiles: bool) -> Tensor:
        [found] = world.attend([LatentSpan(row, position, 1)], as_tiles=as_tiles, exact=True)
        return found[0]

    for as_tiles in (False, True):
        spans = [LatentSpan(1, 40, 2), LatentSpan(0, length - 9, 4), LatentSpan(1, 15, 3, num_padding=1)]
        for span, found in zip(spans, world.attend(spans, as_tiles=as_tiles, exact=True), strict=True):
            close(found, world.expected(span))
            for i, token in enumerate(found):
                assert torch.equal(token, alone(span.row, span.start + i, as_tiles)), f"{span}, token {i}"


def spans_over_codes(
    shape: LatentShape, device: torch.device, dtype: torch.dtype, block: int, kv_dtype: torch.dtype
) -> None:
    """Like `spans_of_all_kinds`, but few, because the interpreter takes long for them."""
    world = LatentWorld([70, 17], shape, block, device, dtype, kv_dtype)
    decoding = [LatentSpan(0, 69, 1), LatentSpan(1, 3, 1, slack=10)]
    verifying = [LatentSpan(0, 60, 2, slack=4), LatentSpan(1, 14, 3, num_padding=1)]
    for spans, as_tiles in ((decoding, False), (verifying, False), ([LatentSpan(0, 30, 6)], True)):
        for span, found in zip(spans, world.attend(spans, as_tiles=as_tiles), strict=True):
            close(found, world.expected(span))
    prompt = LatentSpan(1, 0, 17)
    [found] = world.attend([prompt], as_tiles=False, whole=True)
    close(found, world.expected(prompt))


def split_codes(
    shape: LatentShape,
    contexts: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    length: int = 150,
) -> None:
    """Like `split_spans`, but few."""
    world = LatentWorld([length, 17], shape, 16 * contexts, device, dtype, kv_dtype)
    spans = [LatentSpan(0, length - 1, 1), LatentSpan(1, 3, 1, slack=10)]
    for span, tokens in zip(spans, world.attend(spans, as_tiles=False, contexts=contexts), strict=True):
        close(tokens, world.expected(span))


def exact_codes(shape: LatentShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Like `exact_spans`: the scales of keys that a token does not see change nothing."""
    world = LatentWorld([70], shape, 16, device, dtype, kv_dtype)
    for as_tiles in (False, True):
        [found] = world.attend([LatentSpan(0, 62, 3)], as_tiles=as_tiles, exact=True)
        close(found, world.expected(LatentSpan(0, 62, 3)))
        [alone] = world.attend([LatentSpan(0, 63, 1)], as_tiles=as_tiles, exact=True)
        assert torch.equal(found[1], alone[0])


def matmul(num_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
    q = torch.randn(num_tokens, 5, 40, device=device).to(dtype)
    weight = (torch.randn(5, 44, 72, device=device) / 8).to(dtype)
    for x, used in (
        (q[..., :24], weight[:, :24]),
        (torch.randn(num_tokens, 5, 72, device=device).to(dtype), weight.transpose(1, 2)),
    ):
        found = head_matmul_triton(x, used)
        assert found.is_contiguous()
        close(found, head_matmul_ref(x.double(), used.double()))
        assert torch.equal(found[:1], head_matmul_triton(x[:1], used)), "a token depends on the others"


def write(num_tokens: int, shape: LatentShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    q = torch.randn(num_tokens, shape.num_heads, shape.nope + shape.rope, device=device).to(dtype)
    kv = torch.randn(num_tokens, shape.width, device=device).to(dtype)
    norm = Norm(torch.randn(shape.latent, device=device).to(dtype), 1e-6)
    angles = torch.rand(num_tokens, shape.rope // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    sin[:, : shape.rope // 2] *= -1
    positions = torch.arange(num_tokens, device=device)
    positions[-1] = -1
    slots = torch.randperm(num_tokens + 9, device=device)[:num_tokens]
    slots[0] = -1  # on another rank
    block, num_pages = 16, -(-(num_tokens + 9) // 16)
    values = block * entry_values(torch.empty(0, dtype=kv_dtype), shape.latent, shape.rope)
    pages = torch.zeros(num_pages, values * kv_dtype.itemsize, dtype=torch.uint8, device=device).view(kv_dtype)
    unrounded = torch.zeros(num_pages, block * shape.width, device=device, dtype=torch.float64)
    given = [q.clone(), q.double()]
    wide = (kv.double(), Norm(norm.weight.double(), norm.eps), cos.double(), sin.double())
    found = latent_write_triton(given[0], kv, norm, cos, sin, positions, pages, slots)
    there, held = positions >= 0, (positions >= 0) & (slots >= 0)
    expected = latent_write_ref(given[1][there], *(part[there] if isinstance(part, Tensor) else part for part in wide),
                                positions[there], unrounded, slots[there])  # fmt: skip
    rotated = latent_query(q.double()[there], cos.double()[there], sin.double()[there])
    close(given[0][there], rotated)
    assert not given[0][~there].any(), "padding has a query"
    tolerance = 1e-5 if dtype == kv_dtype == torch.float32 else 3e-2
    if kv_dtype in LARGEST_CODE:
        # One rounding of the reference's values, which the kernel has in float32.
        largest = expected[:, : shape.latent].abs().amax(1, keepdim=True)
        error = (found[there].double() - expected).abs()
        half_code = 0.5 / 127 if kv_dtype == torch.int8 else 2**-4
        assert (error[:, : shape.latent] <= largest * (half_code + 2**-7)).all()
        assert (error[:, shape.latent :] <= expected[:, shape.latent :].abs() * 2**-8).all(), "keys are in bfloat16"
    else:
        assert torch.allclose(found[there].double(), expected, atol=tolerance, rtol=tolerance)
    numbers = torch.arange(num_pages, device=device)
    read = entries_read(pages, numbers, shape.latent, shape.rope, dtype).view(-1, shape.width)
    assert torch.equal(read[slots[held]], found[held]), "the cache holds something else"
    read[slots[held]] = 0
    assert not read.any(), "padding or a token of another rank was written"


def latent_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[1]
    turned = q[..., -width:]
    turned = turned * cos[:, None] + turned.roll(width // 2, -1) * sin[:, None]
    return torch.cat([q[..., :-width], turned], -1)
