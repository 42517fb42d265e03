"""A step's inputs for a GPU, packed into one array of integers.

They reach the GPU in one copy, and a captured step finds them at a fixed address. Everything else that a step reads
(block table, last tokens, tapes, sampling settings) is on the GPU already (rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.engine.heads import HEAD_FIELDS, put_heads
from stoker.kernels.paged import Cutter
from stoker.kernels.pieces import FIELDS
from stoker.sched.plan import StepPlan

Ints = NDArray[np.int64]

_MULTIPLE = 16  # the divisibility that Triton specialises kernels for


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step, or the room in a captured step."""

    tokens: int
    singles: int  # attention work items ("pieces", kernels/pieces.py) of spans that decode one token or verify drafts
    tiles: int  # attention work items of prefill
    heads: int  # tokens whose logits are computed

    def holds(self, other: StepShape) -> bool:
        """Return True if a step of the shape `other` fits into this one."""
        return (
            other.tokens <= self.tokens
            and other.singles <= self.singles
            and other.tiles <= self.tiles
            and other.heads <= self.heads
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes of the parts of the packed array, in their order."""
        return 3 * self.tokens, FIELDS * self.singles, FIELDS * self.tiles, HEAD_FIELDS * self.heads


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed array and views into it."""

    packed: Tensor
    tokens: Tensor  # [3, tokens]: each token's row, id and position (-1: padding); see kernels/step_inputs.py
    singles: Tensor  # [pieces, FIELDS]
    tiles: Tensor  # [pieces, FIELDS]
    heads: Tensor  # [4, heads]: see kernels/verify.py

    @classmethod
    def of(cls, packed: Tensor, shape: StepShape) -> StepInputs:
        tokens, singles, tiles, heads = packed.split(shape.sizes)
        return cls(
            packed,
            tokens.view(3, shape.tokens),
            singles.view(shape.singles, FIELDS),
            tiles.view(shape.tiles, FIELDS),
            heads.view(HEAD_FIELDS, shape.heads),
        )

    @classmethod
    def empty(cls, shape: StepShape, device: torch.device) -> StepInputs:
        """Return inputs that are all padding."""
        inputs = cls.of(torch.zeros(sum(shape.sizes), dtype=torch.int64, device=device), shape)
        inputs.tokens[2] = -1
        return inputs


class StepData:
    """A plan's spans as arrays, ready to be packed."""

    def __init__(self, plan: StepPlan, cutter: Cutter) -> None:
        spans, number = plan.spans, len(plan.spans)
        self._cutter = cutter
        self._token_ids = plan.token_ids
        self._rows = np.fromiter((span.row for span in spans), np.int64, number)
        self._starts = np.fromiter((span.start for span in spans), np.int64, number)
        self._counts = np.fromiter((span.count for span in spans), np.int64, number)
        self._firsts = self._counts.cumsum() - self._counts
        self._samples = np.fromiter((span.samples for span in spans), np.bool_, number)
        self._drafts = np.fromiter((span.num_drafts for span in spans), np.int64, number) if plan.num_drafts else None
        self._in_prompt = None
        if cutter.form.exact:  # a prompt's last token is prefill, even if it is a chunk of its own
            self._in_prompt = np.fromiter((span.in_prompt for span in spans), np.bool_, number)
        self._num_heads = int(np.count_nonzero(self._samples)) + plan.num_drafts
        self._cut(self._firsts, self._counts, self._starts, self._drafts, self._in_prompt)

    def take_dense_prefixes(self, lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Take the leading tokens of new prompts out of the work items, for the lengths that kernels/dense.py supports.

        Return the first token and the count of each part taken out; kernels/dense.py computes their attention. Not for
        captured steps, which contain the attention of all their tokens.
        """
        first, count, start = self._firsts, self._counts, self._starts
        if not lengths or int(count.max()) < lengths[0]:
            return ()
        taken = np.array([0, *lengths])[np.searchsorted(lengths, count, side="right")] * (start == 0)
        is_left = count > taken
        drafts = None if self._drafts is None else self._drafts[is_left]
        self._cut((first + taken)[is_left], (count - taken)[is_left], (start + taken)[is_left], drafts, None)
        return tuple((a, b) for a, b in zip(first.tolist(), taken.tolist(), strict=True) if b)

    def _cut(
        self, first: Ints, count: Ints, start: Ints, drafts: Ints | None, in_prompt: NDArray[np.bool_] | None
    ) -> None:
        """Split the spans into those that decode, with or without drafts, and prefill, and count their work items."""
        is_single = count == 1 if drafts is None else (count == 1) | (drafts > 0)
        if in_prompt is not None:
            is_single &= ~in_prompt
        self._singles = self._longer = first, count, start
        if not is_single.all():
            self._singles = first[is_single], count[is_single], start[is_single]
            self._longer = first[~is_single], count[~is_single], start[~is_single]
        tiles = self._cutter.num_tiles(self._longer[1]) if len(self._singles[0]) < len(first) else 0
        # The smallest shape that has room for this step. Cutting tiles needs room for one more than there are.
        self.needed = StepShape(
            len(self._token_ids),
            self._cutter.needed_singles(*self._singles[1:]),
            tiles + 1 if tiles else 0,
            self._num_heads,
        )

    @property
    def exact(self) -> StepShape:
        """The shape for a step that is not captured.

        Tokens and heads are rounded up to a multiple of 16. Triton would compile the kernels again for sizes
        and addresses that are not multiples.
        """
        cutter, needed = self._cutter, self.needed
        return StepShape(
            -(-needed.tokens // _MULTIPLE) * _MULTIPLE,
            cutter.room(needed.singles),
            cutter.max_tiles(needed.tiles - 1) if needed.tiles else 0,
            -(-needed.heads // _MULTIPLE) * _MULTIPLE,
        )

    def pack(self, packed: Ints, shape: StepShape, samples: bool) -> None:
        """Write the inputs into an array of zeros, for a step with room for `shape`. `samples`: the step samples
        tokens."""
        a, b, c, _ = shape.sizes
        tokens, singles = packed[:a], packed[a : a + b]
        tiles, heads = packed[a + b : a + b + c], packed[a + b + c :]
        self._put_tokens(tokens.reshape(3, -1))
        if self.needed.singles:
            pieces = self._cutter.singles(*self._singles, shape.singles)
            singles[: pieces.size] = pieces.ravel()
        if self.needed.tiles:
            pieces = self._cutter.tiles(*self._longer, shape.tiles)
            tiles[: pieces.size] = pieces.ravel()
        if self.needed.heads:
            put_heads(
                heads.reshape(HEAD_FIELDS, -1), self._firsts, self._counts, self._rows, self._samples, self._drafts
            )
            heads.reshape(HEAD_FIELDS, -1)[2, : self._num_heads] = samples

    def _put_tokens(self, tokens: Ints) -> None:
        count = self.needed.tokens
        tokens[2, count:] = -1
        tokens[1, :count] = self._token_ids
        if count == len(self._counts):
            tokens[0, :count] = self._rows
            tokens[2, :count] = self._starts
        else:
            tokens[0, :count] = self._rows.repeat(self._counts)
            tokens[2, :count] = np.arange(count) - (self._firsts - self._starts).repeat(self._counts)
