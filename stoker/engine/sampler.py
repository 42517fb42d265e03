"""Logits -> tokens by the references, for rows of any kind: each row's settings, as data for the kernels. On a card, steps
whose rows are all plain draw by themselves (card.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base.ids import Row
from stoker.engine.rows import RowState, RowTable
from stoker.kernels.sample import draw, mask_tokens, penalise, uniform
from stoker.kernels.transfer import to_device, to_host
from stoker.sched.request import TokenLogprobs

DRAWN_TOGETHER = 64  # rows: it takes many times the memory of their logits, which is planned for (card_memory.py)


@dataclass(frozen=True, slots=True)
class Drawn:
    """On the device. Log-probabilities are of the model's own distribution, for all rows if any asked."""

    token_ids: Tensor  # [rows]
    logprobs: Tensor | None  # [rows]
    top_ids: Tensor | None  # [rows, k]
    top_logprobs: Tensor | None  # [rows, k]

    def token_logprobs(self, i: int, num: int | None) -> list[TokenLogprobs] | None:
        if num is None or self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return None
        top_ids, top_logprobs = self.top_ids[i, :num].tolist(), self.top_logprobs[i, :num].tolist()
        return [TokenLogprobs(int(self.token_ids[i]), float(self.logprobs[i]), top_ids, top_logprobs)]

    def to_host(self) -> Drawn:
        rest = (self.logprobs, self.top_ids, self.top_logprobs)
        return Drawn(to_host(self.token_ids), *(None if part is None else to_host(part) for part in rest))


def sample(logits: Tensor, rows: Sequence[Row], lengths: Sequence[int], table: RowTable) -> Drawn:
    """`lengths[i]`: tokens before the one that row i draws, which is its position and half of its randomness."""
    states = [table.states[row] for row in rows]
    num_logprobs = max((-1 if s.sampling.num_logprobs is None else s.sampling.num_logprobs for s in states), default=-1)
    parts = []
    for i in range(0, len(states), DRAWN_TOGETHER):
        some = slice(i, i + DRAWN_TOGETHER)
        parts.append(_sample(logits[some], states[some], lengths[some], num_logprobs))
    drawn = parts[0] if len(parts) == 1 else _joined(parts)
    table.last_token[to_device(rows, logits.device)] = drawn.token_ids
    return drawn


def _sample(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int], num_logprobs: int) -> Drawn:
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logprobs = torch.log_softmax(logits, -1) if num_logprobs >= 0 else None
    logits = _shape(logits, states, lengths)
    warm = [i for i, s in enumerate(states) if s.sampling.temperature > 0]
    token_ids = logits.argmax(-1)
    if warm:
        chosen = [states[i] for i in warm]
        where = to_device(warm, logits.device)
        token_ids[where] = _draw(logits[where], chosen, [lengths[i] for i in warm])
    for i, state in enumerate(states):
        if state.output_counts is not None:
            drawn = token_ids[i : i + 1]
            state.output_counts.scatter_add_(0, drawn, torch.ones_like(drawn, dtype=state.output_counts.dtype))
    if logprobs is None:
        return Drawn(token_ids, None, None, None)
    top = logprobs.topk(max(1, num_logprobs), -1)
    return Drawn(token_ids, logprobs.gather(1, token_ids[:, None]).squeeze(1), top.indices, top.values)


def _joined(parts: Sequence[Drawn]) -> Drawn:
    def column(name: str) -> Tensor | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else torch.cat(columns)

    return Drawn(
        torch.cat([part.token_ids for part in parts]), column("logprobs"), column("top_ids"), column("top_logprobs")
    )


def _draw(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int]) -> Tensor:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return to_device([getattr(s.sampling, name) for s in states], logits.device, dtype)

    positions = to_device(lengths, logits.device)
    return draw(
        logits,
        column("temperature", logits.dtype),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", logits.dtype),
        uniform(column("seed", torch.int64), positions),
    )


def _shape(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int]) -> Tensor:
    """Penalties, biases and masks, for the rows that have them."""
    penalised = [i for i, s in enumerate(states) if s.output_counts is not None]
    if penalised:
        where = to_device(penalised, logits.device)
        logits[where] = _penalise(logits[where], [states[i] for i in penalised])
    for i, state in enumerate(states):
        if state.bias is not None:
            logits[i, state.bias[0]] += state.bias[1].to(logits.dtype)
    ruled = [i for i, s in enumerate(states) if s.matcher is not None and not s.matcher.done]
    if ruled:
        allowed = torch.zeros(len(ruled), -(-logits.shape[1] // 32), dtype=torch.int32)
        for number, i in enumerate(ruled):
            states[i].matcher.fill(allowed[number])  # type: ignore[union-attr]
        where = to_device(ruled, logits.device)
        logits[where] = mask_tokens(logits[where], allowed)
    for i, state in enumerate(states):
        if state.stop_ids is not None and lengths[i] - state.num_prompt < state.sampling.min_tokens:
            going_on = logits[i].index_fill(0, state.stop_ids, float("-inf"))
            # A grammar that is at its end leaves nothing but the stop tokens: then min_tokens cannot be had.
            if state.matcher is None or bool(going_on.isfinite().any()):
                logits[i] = going_on
    return logits


def _penalise(logits: Tensor, states: Sequence[RowState]) -> Tensor:
    def column(name: str) -> Tensor:
        return to_device([getattr(s.sampling, name) for s in states], logits.device, logits.dtype)

    counts = torch.stack([s.output_counts for s in states])  # type: ignore[misc]
    in_prompt = torch.stack([s.in_prompt for s in states])  # type: ignore[misc]
    columns = (column("repetition_penalty"), column("frequency_penalty"), column("presence_penalty"))
    return penalise(logits, counts, in_prompt, *columns)
