"""GPU time of attention over a cache of one dtype. Imports torch: import this module inside `run`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stoker.kernels import paged
from stoker.kernels.exact_pieces import ExactCutter
from stoker.kernels.gpu_timing import graph_s
from stoker.kernels.kv_pages import LARGEST_CODE, quantise
from stoker.kernels.pieces import FIELDS

BLOCK_TOKENS = 64
_TOTAL_BYTES = 256 << 20  # the layers of a call together, so that they are not read from the GPU's own cache
_MAX_LAYERS = 16


def attention_s(
    kv_dtype: torch.dtype,
    heads: tuple[int, int, int],
    spans: list[tuple[int, int]],
    kernels: Any = paged,
    dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
    verifies: bool = False,
) -> float:
    """Return the time of one layer's attention. `heads`: query heads, KV heads and head size. `spans`: tokens before and
    tokens of each row. `exact`: with numerics=exact. `verifies`: all tokens of a span but the first are drafts."""
    device = torch.device("cuda")
    num_heads, kv_heads, dim = heads
    counts = [-(-(before + count) // BLOCK_TOKENS) for before, count in spans]
    block_bytes = 2 * kv_heads * BLOCK_TOKENS * dim * kv_dtype.itemsize
    layers = max(1, min(_MAX_LAYERS, -(-_TOTAL_BYTES // (sum(counts) * block_bytes))))
    pages = _random_pages(sum(counts) * layers * 2 * kv_heads, dim, kv_dtype, device)
    order = torch.randperm(sum(counts))
    table = torch.zeros(len(spans), max(counts), dtype=torch.int64)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[first : first + count]
        first += count
    token_rows = torch.tensor([row for row, (_, count) in enumerate(spans) for _ in range(count)], device=device)
    positions = torch.cat([torch.arange(before, before + count) for before, count in spans]).to(device)
    sizes = ([(num_heads, kv_heads)], BLOCK_TOKENS, dtype)
    cutter, finished = paged.Cutter.of(*sizes, verifies), paged.new_counters(device)
    if exact:
        cutter = made = ExactCutter.for_model(*sizes, max(counts), sum(counts))
        finished = paged.new_counters(device, made.max_groups(len(spans)) * kv_heads)
    starts, numbers = (np.array(column) for column in zip(*spans, strict=True))
    firsts = numbers.cumsum() - numbers
    none = torch.zeros(0, FIELDS, dtype=torch.int64, device=device)
    singles = tiles = none
    if verifies or (numbers == 1).all():
        room = cutter.max_singles(len(spans), int(numbers.max()))
        singles = torch.from_numpy(cutter.singles(firsts, numbers, starts, room)).to(device)
    else:
        room = cutter.max_tiles(cutter.num_tiles(numbers))
        tiles = torch.from_numpy(cutter.tiles(firsts, numbers, starts, room)).to(device)
    where = (table.to(device), token_rows, positions, singles, tiles, (), finished)
    on_device = kernels.PagedSpans(*where, layers * 2 * kv_heads, kv_heads, cutter.form)
    q = torch.randn(len(positions), num_heads, dim, device=device).to(dtype)

    def call(layer: int) -> Any:
        mine = pages[layer * 2 * kv_heads :]
        return lambda: kernels.paged_attention_triton(q, q, q, mine, on_device, dim**-0.5)

    return graph_s([call(layer) for layer in range(layers)] * (2 if layers < _MAX_LAYERS else 1))


def _random_pages(num_pages: int, dim: int, kv_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return pages of random values: some are made once and repeated."""
    some = torch.randn(min(num_pages, 256), BLOCK_TOKENS, dim, device=device)
    if kv_dtype in LARGEST_CODE:
        codes, scales = quantise(some, kv_dtype)
        stored = torch.cat([codes.view(torch.uint8).flatten(1), scales.view(torch.uint8)], 1)
    else:
        stored = some.flatten(1).to(kv_dtype)
    repeated = stored.repeat(-(-num_pages // len(some)), 1)[:num_pages]
    return repeated.view(kv_dtype) if kv_dtype in LARGEST_CODE else repeated
