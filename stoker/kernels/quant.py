# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""8-bit and 4-bit weights: what the codes mean, and how to dequantise them.

The weight is a code's value times the scale of its block; a scale covers `row_block` outputs and `col_block` inputs.

8 bits: codes [out, in] float8_e4m3fn, scale [row blocks, column blocks] float32.
4 bits: codes [out, words] int32, scale [in / 64, out], two bfloat16 in a word. The codes are integers plus 8, or floating-point
numbers with a sign, two bits of exponent and one of mantissa (MXFP4).

4-bit codes are laid out for the kernels: the 256 inputs of 32 words stand together, and code j of word w is input 32 j
+ w of them, so that the same four bits of all words are 32 consecutive inputs, which share a scale. The layout of the
scales lets a program read those of its outputs at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels.dispatch import cdiv, on_gpu, overlaps, tl, triton, wait_for_inputs
from stoker.kernels.tile_choice import max_rows

WORD_CODES = 8  # 4-bit codes in a word
GROUP = 32  # the smallest number of inputs that share a scale
MAX_INT4_PAIRS = (1 << 31) - 1  # of scales, because their offsets have 32 bits
SPAN = WORD_CODES * GROUP  # inputs whose codes are interleaved


@dataclass(frozen=True, slots=True)
class QuantWeight:
    codes: Tensor
    scale: Tensor
    shape: tuple[int, int]
    row_block: int
    col_block: int
    quantises_inputs: bool = False  # the other operand may be quantised to 8 bits too
    floats: bool = False  # 4-bit codes are floating-point numbers

    @property
    def is_int4(self) -> bool:
        return self.codes.dtype == torch.int32

    @property
    def kind(self) -> str:
        """How the weight is stored, for the choice of tiles."""
        if self.is_int4:
            return "int4"
        return "fp8" if self.col_block >= self.shape[1] else "blocks"

    def is_few(self, num_rows: int) -> bool:
        """Return True if reading the codes is most of the work of a matmul with this many rows."""
        return num_rows <= max_rows(self.kind)


def fp8_weight(
    codes: Tensor, scale: Tensor, row_block: int, col_block: int, quantises_inputs: bool = False
) -> QuantWeight:
    """Make an 8-bit weight. `scale` is [row blocks, column blocks]."""
    shape = (len(codes), codes.shape[1])
    return QuantWeight(codes, scale.float().contiguous(), shape, row_block, col_block, quantises_inputs)


def int4_weight(words: Tensor, scale: Tensor, *, floats: bool = False) -> QuantWeight:
    """Make a 4-bit weight. `words` [out, in / 8] are as checkpoints have them: code j of word w is input 8 w + j. They are
    consumed. `scale` is [out, groups]. `floats`: see QuantWeight."""
    num_ins = words.shape[1] * WORD_CODES
    group = num_ins // scale.shape[1]
    assert group % GROUP == 0
    missing = -num_ins % SPAN // GROUP
    scale = torch.nn.functional.pad(scale.to(torch.bfloat16).repeat_interleave(group // GROUP, 1), (0, missing))
    pairs = scale.view(len(words), -1, 2).transpose(0, 1).contiguous().view(torch.int32).squeeze(-1)
    return QuantWeight(interleave(words), pairs, (len(words), num_ins), 1, GROUP, floats=floats)


def unpack_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight, from the same arguments as `int4_weight`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    values = ((words[..., None] >> shifts) & 15).flatten(1) - 8
    group = values.shape[1] // scale.shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (values.to(wide) * scale.to(wide).repeat_interleave(group, 1)).to(dtype)


def interleave(words: Tensor) -> Tensor:
    """[out, in / 8] -> [out, words], padded to a multiple of 256 inputs; in place if no padding is needed."""
    if missing := -words.shape[1] % GROUP:
        words = torch.nn.functional.pad(words, (0, missing))
    if words.is_meta:
        return words
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    # By slices of the outputs: unpacked codes take eight times the memory.
    rows = max(1, (1 << 24) // max(1, words.shape[1] * WORD_CODES))
    for first in range(0, len(words), rows):
        codes = (words[first : first + rows, :, None] >> shifts) & 15
        codes = codes.view(len(codes), -1, WORD_CODES, GROUP) << shifts[:, None]
        # They occupy different bits, so that their sum, which may wrap around, is their union.
        words[first : first + rows] = codes.sum(2, dtype=torch.int32).flatten(1)
    return words


def dequantise_ref(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise to `dtype`, rounding each value once."""
    num_outs, num_ins = weight.shape
    if weight.is_int4:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.codes.device)
        codes = (weight.codes.view(num_outs, -1, 1, GROUP) >> shifts[:, None]) & 15
        codes = codes.flatten(1)[:, :num_ins]
        values = float_values(codes.device)[codes] if weight.floats else (codes - 8).float()
        scale = weight.scale[..., None].view(torch.bfloat16).transpose(0, 1).flatten(1)
    else:
        values, scale = weight.codes.float(), weight.scale
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = scale.to(wide).repeat_interleave(weight.row_block, 0)[:num_outs]
    return (values.to(wide) * rows.repeat_interleave(weight.col_block, 1)[:, :num_ins]).to(dtype)


def float_values(device: torch.device) -> Tensor:
    """Return the values of the 16 codes that are floating-point numbers."""
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return torch.tensor([*positive, *(-value for value in positive)], device=device)


@triton.jit
def code_value(code, FLOATS: tl.constexpr):
    """Return the values of 4-bit codes as float32."""
    if FLOATS:
        size = code & 7
        twice = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
        value = tl.where(code > 7, -twice, twice).to(tl.float32) * 0.5
    else:
        value = (code - 8).to(tl.float32)
    return value


@triton.jit
def half_of_pair(pair, HIGH: tl.constexpr):
    """Return one of the two bfloat16 values in a word, as float32."""
    return ((pair & -65536) if HIGH else (pair << 16)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first", "count"])
def _dequantise(
    codes, scale, out, num_outs, first, count,
    INS: tl.constexpr, WORDS: tl.constexpr, INT4: tl.constexpr, FLOATS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COL_BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    is_made = row < count
    made = first + row
    wide, out_row = made.to(tl.int64), out + row.to(tl.int64) * INS
    start = tl.program_id(1) * 256
    if INT4:
        word = tl.arange(0, 32)[None, :]
        taken = tl.load(codes + wide * WORDS + tl.program_id(1) * 32 + word, mask=is_made, other=0)
        for j in tl.static_range(8):
            column = start + 32 * j + word
            pair = tl.load(scale + (tl.program_id(1) * 4 + j // 2) * num_outs + made, mask=is_made, other=0)
            value = code_value((taken >> (4 * j)) & 15, FLOATS) * half_of_pair(pair, j % 2)
            tl.store(out_row + column, value.to(out.dtype.element_ty), mask=is_made & (column < INS))
    else:
        column = start + tl.arange(0, 256)[None, :]
        inside = is_made & (column < INS)
        taken = tl.load(codes + wide * INS + column, mask=inside, other=0.0).to(tl.float32)
        COLS: tl.constexpr = (INS + COL_BLOCK - 1) // COL_BLOCK
        factor = tl.load(scale + (made // ROW_BLOCK) * COLS + column // COL_BLOCK, mask=inside, other=0.0)
        tl.store(out_row + column, (taken * factor).to(out.dtype.element_ty), mask=inside)


def dequantise_triton(weight: QuantWeight, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
    """Dequantise `count` outputs from `first` on."""
    num_outs, num_ins = weight.shape
    count = num_outs if count is None else count
    out = torch.empty(count, num_ins, dtype=dtype, device=weight.codes.device)
    overlap, rows = overlaps(out), 16
    _dequantise[(cdiv(count, rows), cdiv(num_ins, SPAN))](
        weight.codes, weight.scale, out, num_outs, first, count,
        INS=num_ins, WORDS=weight.codes.shape[1], INT4=weight.is_int4, FLOATS=weight.floats,
        ROW_BLOCK=weight.row_block, COL_BLOCK=weight.col_block, BLOCK_OUT=rows, OVERLAP=overlap, num_warps=4,
        launch_pdl=overlap,
    )  # fmt: skip
    return out


def dequantise(weight: QuantWeight, dtype: torch.dtype) -> Tensor:
    has_kernel = on_gpu(weight.codes) and dtype != torch.float64
    return (dequantise_triton if has_kernel else dequantise_ref)(weight, dtype)
