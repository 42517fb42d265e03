"""DeviceDrafter: lets a draft model guess the next tokens of each row, at the end of a step and on the device.

First the draft model runs over all tokens of the step, which fills its KV, at a prompt too. Then it continues each row
that sampled, from the last accepted token on, for as many guesses as the plan says. It samples its guesses like the target
model, with the same noise. They stay in the row table (kernels/row_tokens.py), where the next step takes them as drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stoker.base.ids import Row
from stoker.engine.rows import RowTable
from stoker.engine.sampler import choose_tokens
from stoker.kernels.attention import SpanGroup, SpanShape, group_spans
from stoker.kernels.attention_rows import RowGroup
from stoker.kernels.draft_inputs import draft_rows, next_tokens
from stoker.kernels.draft_steps import DraftInputs, PageSizes, draft_step, put_draft
from stoker.kernels.paged import PagedSpans
from stoker.kernels.sample_rows import sample_rows_triton
from stoker.kv.device.device_kv import GroupKv
from stoker.layers.batch import ForwardBatch, GroupInputs
from stoker.layers.features import Tap
from stoker.models.draft import DraftModel, StepFeatures


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What drafting needs of a step of the target model."""

    batch: ForwardBatch
    token_rows: Tensor  # [tokens]: the row of each token
    heads: Tensor  # [4, heads]: see kernels/verify.py
    features: Tensor  # [tokens, hidden]


class Guesses(NamedTuple):
    """The guesses after a step, which are made one after the other. Both parts do the same each time, so that they can be
    captured as graphs."""

    first: Callable[[], None]  # makes the first guess of each row
    further: Callable[[], None]  # makes one more

    def make(self, count: int) -> None:
        if count:
            self.first()
        for _ in range(1, count):
            self.further()


NO_GUESSES = Guesses(lambda: None, lambda: None)


class Drafter(Protocol):
    """Drafts at the end of each step."""

    features_width: int
    """The width of a step's features; 0: it needs none."""

    def start(self) -> StepFeatures:
        """Return empty features, for the forward pass of one step."""

    def draft(self, step: DraftStep, sampled: Tensor, counts: Tensor) -> Guesses:
        """Take in a step that sampled and verified these tokens. Return the guesses after it, none of them made yet.
        sampled, counts [heads]: see kernels/verify.py"""


class NoFeatures:
    """The features of a step without a draft model."""

    taps: Sequence[Tap] = ()

    def value(self) -> Tensor:
        return torch.empty(0)


class NoDrafter:
    """There is no draft model."""

    features_width = 0

    def start(self) -> StepFeatures:
        return NoFeatures()

    def draft(self, step: DraftStep, sampled: Tensor, counts: Tensor) -> Guesses:
        return NO_GUESSES


class DraftPlaces(Protocol):
    """Runs single tokens of some rows, with the reference kernels or with those of a GPU."""

    @property
    def table(self) -> Tensor:
        """The rows' blocks: see kernels/draft_steps.py."""

    def forward(
        self, model: DraftModel, token_ids: Tensor, features: Tensor, rows: Tensor, inputs: DraftInputs
    ) -> Tensor:
        """Return the draft model's hidden states for one token of each row; undefined for padding. All [rows, ...]"""

    def sample(self, logits: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        """Sample one token per row of logits; undefined for length 0. lengths [rows]: the tokens before it"""


class DeviceDrafter:
    """Drafts with one draft model. `num_positions` is the longest context."""

    def __init__(
        self, model: DraftModel, rows: RowTable, group: GroupKv, places: DraftPlaces, num_positions: int
    ) -> None:
        self._model = model
        self.features_width = model.hidden_size
        self._rows = rows
        self._places = places
        self._sizes = PageSizes(group.num_heads, group.block_tokens, group.pages_per_block)
        self._num_positions = num_positions

    def start(self) -> StepFeatures:
        return self._model.features()

    def draft(self, step: DraftStep, sampled: Tensor, counts: Tensor) -> Guesses:
        batch, heads = step.batch, step.heads
        assert batch.draft is not None
        following = (heads, sampled, self._rows.tokens)
        next_ids = next_tokens(step.token_rows, batch.token_ids, batch.positions, *following)
        hidden = self._model(next_ids, step.features, batch.positions, batch.draft)
        if not heads.shape[1]:
            return NO_GUESSES
        num_rows = min(self._rows.max_rows, heads.shape[1])
        rows = draft_rows(heads, counts, batch.positions, num_rows, padding=self._rows.max_rows)
        return self._guesses(rows, hidden[rows[1]])

    def _guesses(self, rows: Tensor, hidden: Tensor) -> Guesses:
        """Return the guesses for the next positions of each row, which are put into the row table.

        `hidden` are the draft model's states one position before the last known token, from which the first guess comes.
        They and the last guesses are overwritten by each guess.
        """
        number, token_ids = torch.zeros_like(rows[0, :1]), torch.zeros_like(rows[0])

        def guess(lengths: Tensor) -> None:
            """Sample the next guess of each row."""
            logits = self._model.logits(hidden)
            sampled = self._places.sample(logits, rows[0], lengths)
            token_ids.copy_(put_draft(rows, lengths, sampled, self._rows.tokens, number, logits.shape[1]))
            number.add_(1)

        def further() -> None:
            inputs = draft_step(rows, self._places.table, number, self._sizes, self._num_positions)
            features = self._model.feedback(hidden)
            hidden.copy_(self._places.forward(self._model, token_ids, features, rows[0], inputs))
            guess(inputs.lengths)

        return Guesses(lambda: guess(rows[2]), further)


class ReferencePlaces:
    """Single tokens with the reference kernels. Padding is left out."""

    def __init__(self, group: GroupKv, rows: RowTable, attention_dtype: torch.dtype, in_place: bool) -> None:
        """See `group_spans` for the last two."""
        self._group = group
        self._rows = rows
        self._options = attention_dtype, in_place

    @property
    def table(self) -> Tensor:
        return torch.from_numpy(self._rows.blocks[self._group.kv_set]).to(self._rows.tokens.device)

    def forward(
        self, model: DraftModel, token_ids: Tensor, features: Tensor, rows: Tensor, inputs: DraftInputs
    ) -> Tensor:
        hidden, positions = torch.zeros_like(features), inputs.positions
        there = (positions >= 0).nonzero()[:, 0]
        if len(there):
            slots = inputs.slots.view(len(rows), -1)[there].flatten()
            where = GroupInputs(slots, self._spans(rows[there].tolist(), positions[there].tolist()), self._group)
            hidden[there] = model(token_ids[there], features[there], positions[there], where)
        return hidden

    def _spans(self, rows: list[int], positions: list[int]) -> list[SpanGroup | RowGroup]:
        group, shapes = self._group, []
        for number, (row, position) in enumerate(zip(rows, positions, strict=True)):
            blocks = self._rows.blocks[group.kv_set][row, : position // group.block_tokens + 1]
            shapes.append(SpanShape(number, position, 1, (blocks * group.pages_per_block).tolist()))
        device = self._rows.tokens.device
        return group_spans(shapes, group.num_heads, group.block_tokens, device, *self._options)

    def sample(self, logits: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        there = (lengths > 0).nonzero()[:, 0]
        if len(there):
            states = [self._rows.states[Row(row)] for row in rows[there].tolist()]
            wide = logits[there] if logits.dtype == torch.float64 else logits[there].float()
            found[there] = choose_tokens(wide, states, lengths[there].tolist())
        return found


class PagedPlaces:
    """Single tokens with the kernels of a GPU. Padding is computed too, so that shapes never change."""

    def __init__(self, group: GroupKv, rows: RowTable) -> None:
        self._group = group
        self._rows = rows

    @property
    def table(self) -> Tensor:
        return self._rows.tables[self._group.kv_set]

    def forward(
        self, model: DraftModel, token_ids: Tensor, features: Tensor, rows: Tensor, inputs: DraftInputs
    ) -> Tensor:
        group, no_tiles = self._group, inputs.pieces[:0]
        # One piece per row with all of its keys.
        where = (self.table, rows, inputs.positions, inputs.pieces, no_tiles, (), self._rows.finished)
        spans = PagedSpans(*where, group.pages_per_block, group.num_heads)
        return model(token_ids, features, inputs.positions, GroupInputs(inputs.slots, spans, group))

    def sample(self, logits: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        return sample_rows_triton(logits, rows, lengths, self._rows.settings)
