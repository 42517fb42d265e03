"""Runs the target model over whole sequences, for the features and the distributions that a head is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.ids import BlockId, Row
from stoker.engine.build import BuiltEngine
from stoker.engine.gpu_batches import StepBatches, can_page
from stoker.engine.grammar import NoGrammars
from stoker.engine.inputs import build_inputs
from stoker.engine.packed import StepInputs
from stoker.engine.rows import RowTable
from stoker.kv.device.device_kv import DeviceKv
from stoker.layers.batch import ForwardBatch
from stoker.layers.features import Tap
from stoker.sched.plan import BlockTableChange, Span, StepPlan

_LOGITS_BYTES = 1 << 30  # of the whole vocabulary, at a time


@dataclass(frozen=True, slots=True)
class TargetStates:
    """The hidden states of a batch, one sequence after the other without padding."""

    features: Tensor  # [tokens, taps * hidden]: those that enter the tapped layers
    hidden: Tensor  # [tokens, hidden]: the input of the model's head


class TargetForward:
    """The target model for batches of at most `max_rows` sequences and `max_tokens` tokens, rounded up to blocks."""

    def __init__(
        self,
        built: BuiltEngine,
        num_heads: int,
        taps: Sequence[int],
        max_rows: int,
        max_tokens: int,
        max_length: int,
    ) -> None:
        self._model = built.model
        self._taps = taps
        self._block_tokens = built.layout.block_tokens
        self.device, self.vocab_size = built.settings.device, built.vocab_size
        num_blocks = max_tokens // self._block_tokens + max_rows
        self._kv = DeviceKv(built.layout, num_blocks, self.device, built.settings.dtype)
        max_blocks = -(-max_length // self._block_tokens)
        self._rows = RowTable(
            max_rows, max_blocks, built.vocab_size, self.device, NoGrammars(), num_sets=len(built.layout.sets)
        )
        has_kernels = can_page(self._kv)
        self._gpu_batches = StepBatches(built.model, self._kv, self._rows, num_heads) if has_kernels else None

    @torch.no_grad()
    def run(self, sequences: Sequence[Sequence[int]]) -> TargetStates:
        """Compute whole sequences from their first token on."""
        changes, spans, first = [], [], 0
        for number, sequence in enumerate(sequences):
            count = -(-len(sequence) // self._block_tokens)
            blocks = [BlockId(block) for block in range(first, first + count)]
            changes += [BlockTableChange(Row(number), 0, blocks, kv_set) for kv_set in range(len(self._kv.sets))]
            spans.append(Span(Row(number), 0, len(sequence), False))
            first += count
        self._rows.apply(StepPlan([], [], block_table_changes=changes))
        token_ids = [token for sequence in sequences for token in sequence]
        batch = self._batch(StepPlan(spans, token_ids))
        kept: list[Tensor] = []
        # The next layer reuses the memory of what a tap gets.
        hidden = self._model(batch, [Tap(layer, lambda x: kept.append(x.clone())) for layer in self._taps])
        count = len(token_ids)  # the rest is padding
        return TargetStates(torch.cat(kept, 1)[:count], hidden[:count])

    def _batch(self, plan: StepPlan) -> ForwardBatch:
        if self._gpu_batches is None:
            return build_inputs(plan, self._rows, self._kv).batch
        # The reference kernels would launch the attention of each sequence by itself.
        data = self._gpu_batches.data(plan)
        packed = self._gpu_batches.pack(data, data.exact, samples=False).to(self.device, non_blocking=True)
        return self._gpu_batches.batch(StepInputs.of(packed, data.exact))

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]"""
        found: Tensor = self._model.embedding(token_ids.flatten())  # type: ignore[attr-defined]
        return found.view(*token_ids.shape, -1)

    @torch.no_grad()
    def logits(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the tokens `ids`, [rows, ids], and the most likely token of all, [rows]."""
        part = max(1, _LOGITS_BYTES // (self.vocab_size * hidden.dtype.itemsize))
        found, best = [], []
        for first in range(0, len(hidden), part):
            logits = self._model.logits(hidden[first : first + part])
            found.append(logits[:, ids])
            best.append(logits.argmax(-1))
        return torch.cat(found), torch.cat(best)
