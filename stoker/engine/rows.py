"""RowTable: the device-side state of each running sequence, from its NewRow until the row is freed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stoker.base.ids import Row
from stoker.engine.grammar import Grammars, Matcher
from stoker.kernels.paged import new_counters
from stoker.kernels.row_tokens import MODEL, NEXT, TAPE, TAPE_START, new_row_tokens, pack_guesses, pack_row
from stoker.kernels.sample_rows import new_settings, pack_settings
from stoker.kernels.transfer import to_device
from stoker.sched.plan import BlockTableChange, NewRow, StepPlan, TapeUpload
from stoker.sched.request import SamplingParams


@dataclass(slots=True, eq=False)
class RowState:
    """What sampling needs to know about one row."""

    sampling: SamplingParams
    num_prompt: int
    matcher: Matcher | None
    output_counts: Tensor | None  # [vocab] int32 for penalties, else None
    in_prompt: Tensor | None  # [vocab] bool
    bias: tuple[Tensor, Tensor] | None  # token ids, values
    stop_ids: Tensor | None  # if min_tokens may forbid them, else None
    is_plain: bool = field(init=False)
    """True if the row needs only temperature, top_k, top_p and min_p. A GPU step can then sample by itself."""

    @property
    def depends_on_output(self) -> bool:
        """True if sampling depends on the tokens before, other than through the logits."""
        return self.matcher is not None or self.output_counts is not None

    def __post_init__(self) -> None:
        extras = (self.matcher, self.output_counts, self.bias, self.stop_ids, self.sampling.num_logprobs)
        self.is_plain = all(part is None for part in extras)


class RowTable:
    """The rows' block tables, sampling settings, last tokens and tapes."""

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars,
        has_draft_model: bool = False,
        num_sets: int = 1,
    ) -> None:
        self.max_rows = max_rows
        # For each KV set, each row's blocks, and in the last column the end of those it has. Entries beyond are an
        # earlier owner's, and so are those before the blocks that the row's next token sees. One more row is padding,
        # for drafting.
        shape = (max_rows + 1, max_blocks + 1)
        self.blocks = [np.zeros(shape, dtype=np.int64) for _ in range(num_sets)]
        # The GPU's copies, which its kernels read.
        self.tables = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(num_sets)]
        self.settings = new_settings(max_rows + 1, device)
        self.finished = new_counters(device)
        self.tokens = new_row_tokens(max_rows + 1, device)
        self.states: dict[Row, RowState] = {}
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._has_draft_model = has_draft_model

    def apply(self, plan: StepPlan) -> None:
        """Free and create rows, and update their block tables and tapes."""
        for row in plan.freed_rows:
            del self.states[row]
        for new in plan.new_rows:
            self.states[new.row] = self._new_state(new)
        for change in plan.block_table_changes:
            end = change.first + len(change.blocks)
            blocks = self.blocks[change.kv_set]
            blocks[change.row, change.first : end] = change.blocks
            blocks[change.row, -1] = end
        self._upload_tokens(plan.new_rows, plan.tapes)
        if self._has_draft_model and (parts := [span for span in plan.spans if not span.samples]):
            where = self._tensor([span.row for span in parts])
            self.tokens[where, NEXT] = self._tensor([span.next_id for span in parts])
        if self._device.type != "cpu":
            self._upload(plan.new_rows, plan.block_table_changes)

    def _upload_tokens(self, new_rows: list[NewRow], tapes: list[TapeUpload]) -> None:
        if new_rows:
            packed = [number for new in new_rows for number in pack_row(new.token_ids, new.max_tokens)]
            where = self._tensor([new.row for new in new_rows])
            self.tokens.index_copy_(0, where, self._tensor(packed).view(len(new_rows), -1))
        if tapes:
            packed = [number for tape in tapes for number in (tape.start, *pack_guesses(tape.token_ids))]
            values = self._tensor(packed).view(len(tapes), -1)
            where = self._tensor([tape.row for tape in tapes])
            self.tokens[where, TAPE_START] = values[:, 0]
            self.tokens[where, TAPE:MODEL] = values[:, 1:]

    def _upload(self, new_rows: list[NewRow], changes: list[BlockTableChange]) -> None:
        if new_rows:
            packed = []
            for new in new_rows:
                s = new.sampling
                packed += [new.row, *pack_settings(s.seed, s.top_k, s.temperature, s.top_p, s.min_p)]
            values = self._tensor(packed).view(len(new_rows), -1)
            self.settings.index_copy_(0, values[:, 0], values[:, 1:])
        for kv_set, table in enumerate(self.tables):
            entries: list[int] = []
            for change in changes:
                if change.kv_set == kv_set:
                    for column, block in enumerate(change.blocks, change.first):
                        entries += (change.row, column, block)
                    entries += (change.row, table.shape[1] - 1, change.first + len(change.blocks))
            if entries:
                where = self._tensor(entries).view(-1, 3)
                table[where[:, 0], where[:, 1]] = where[:, 2]

    def _new_state(self, new: NewRow) -> RowState:
        sampling = new.sampling
        output = new.token_ids[new.num_prompt :]
        counts = in_prompt = bias = stop_ids = None
        if sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0:
            counts = self._tensor(output).bincount(minlength=self._vocab_size).int()
            in_prompt = self._tensor(new.token_ids[: new.num_prompt]).bincount(minlength=self._vocab_size) > 0
        if sampling.logit_bias:
            values = to_device(list(sampling.logit_bias.values()), self._device, torch.float32)
            bias = (self._tensor(list(sampling.logit_bias)), values)
        if sampling.min_tokens:
            # Some configurations name end tokens outside the vocabulary. They are never sampled.
            stop_ids = self._tensor([token_id for token_id in sampling.stop_token_ids if token_id < self._vocab_size])
        matcher = None
        if sampling.grammar is not None:
            matcher = self._grammars.matcher(sampling.grammar, output, new.max_new_tokens)
        return RowState(sampling, new.num_prompt, matcher, counts, in_prompt, bias, stop_ids)

    def _tensor(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return to_device(values, self._device)
