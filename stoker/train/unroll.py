"""Training-time test: the loss of a head that is unrolled for some steps on its own hidden states, as in EAGLE-3.

Sequence x with features f: row p of step 0 gets f[p] and the token x[p + 1], and guesses x[p + 2]. Row p of step t gets its
own hidden state of step t - 1 and x[p + 1 + t], and guesses x[p + 2 + t]. What it should guess is the model's distribution
at position p + 1 + t, restricted to the draft vocabulary. The tokens are the true ones: a draft is only used if those
before it were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from stoker.train.draft_vocab import DraftVocab
from stoker.train.target_forward import TargetForward
from stoker.train.trainable_head import TrainableHead


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the model wrote after it."""

    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Some answers with what the target model says about them. Padded to the longest one."""

    token_ids: Tensor  # [batch, length]; 0 is padding
    embedded: Tensor  # [batch, length, hidden]
    features: Tensor  # [batch, length, taps * hidden]
    is_learnt: Tensor  # [batch, length]: the token after this position is a part of the answer
    starts: Tensor  # [batch]: the first row that a draft can start from
    target_rows: Tensor  # [batch, length]: row of `logits`
    logits: Tensor  # [learnt positions, draft vocab] of the target model
    best: Tensor  # [learnt positions]: its most likely token as a draft token; -1: it cannot be drafted


@dataclass(frozen=True, slots=True)
class UnrollResult:
    """The loss of a batch, and how often each step's best guess was the target model's best token."""

    loss: Tensor
    right: list[int]
    guesses: list[int]


def make_batch(
    target: TargetForward, answers: Sequence[Answer], vocab: DraftVocab, dtype: torch.dtype
) -> TrainingBatch:
    """Run the target model over the answers."""
    device = target.device
    states = target.run([answer.token_ids for answer in answers])
    length = max(len(answer.token_ids) for answer in answers)
    places = torch.arange(length)[None, :]
    lengths = torch.tensor([len(answer.token_ids) for answer in answers])
    starts = torch.tensor([answer.num_prompt - 1 for answer in answers])
    there = (places < lengths[:, None]).to(device)
    is_learnt = ((places >= starts[:, None]) & (places < lengths[:, None] - 1)).to(device)
    token_ids = torch.zeros(len(answers), length, dtype=torch.int64, device=device)
    token_ids[there] = torch.tensor([token for answer in answers for token in answer.token_ids], device=device)
    features = states.features.new_zeros(*there.shape, states.features.shape[1])
    features[there] = states.features
    flat = torch.zeros(there.shape, dtype=torch.int64, device=device)
    flat[there] = torch.arange(len(states.hidden), device=device)
    ids = vocab.ids.to(device)
    logits, best = target.logits(states.hidden[flat[is_learnt]], ids)
    target_rows = torch.zeros_like(flat)
    target_rows[is_learnt] = torch.arange(len(logits), device=device)
    drafts = torch.full((vocab.vocab_size,), -1, device=device).index_copy_(
        0, ids, torch.arange(len(ids), device=device)
    )
    return TrainingBatch(
        token_ids, target.embed(token_ids).to(dtype), features.to(dtype), is_learnt, starts.to(device), target_rows,
        logits.to(dtype), drafts[best],
    )  # fmt: skip


def unrolled_loss(head: TrainableHead, batch: TrainingBatch, num_steps: int, step_weight: float) -> UnrollResult:
    """Return the weighted mean of the steps' soft cross-entropies."""
    length = batch.token_ids.shape[1]
    memory: list[tuple[Tensor, Tensor]] = []
    features = head.features(batch.features)
    rows = torch.arange(length, device=features.device)[None, :]
    may_start = rows >= batch.starts[:, None]
    total, weights = features.new_zeros((), dtype=head.norm.weight.dtype), 0.0
    right, guesses = [], []
    for step in range(min(num_steps, length - 1)):
        features = head.step(_shifted(batch.embedded, step + 1), features, step, memory)
        counts = may_start & _shifted(batch.is_learnt, step + 1)
        where = _shifted(batch.target_rows, step + 1)[counts]
        loss, num_right = _step_loss(head.logits(features[counts]), batch.logits[where], batch.best[where])
        total, weights = total + step_weight**step * loss, weights + step_weight**step
        right.append(num_right)
        guesses.append(len(where))
    return UnrollResult(total / weights, right, guesses)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Move x [batch, length, ...] to the left, and fill with zeros."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def _step_loss(found: Tensor, wanted: Tensor, best: Tensor) -> tuple[Tensor, int]:
    """Return the loss of one step, and how many of its best guesses are right. Positions where the target model's best
    token cannot be drafted count as wrong, and are not learnt from."""
    wide = wanted.dtype
    can_draft = best >= 0
    num_right = int((found.detach().argmax(-1) == best).sum())
    each = -(wanted.softmax(-1) * log_softmax(found, -1, dtype=wide)).sum(-1)
    return torch.where(can_draft, each, 0.0).sum() / can_draft.sum().clamp(min=1), num_right
