"""Samples tokens from logits with the reference kernels, for rows with any settings.

On a GPU, steps whose rows are all plain sample by themselves instead (gpu_steps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.heads import SamplingSpan
from stoker.engine.rows import RowState, RowTable
from stoker.kernels.sample import mask_tokens, noise_keys, penalise, sample_tokens
from stoker.kernels.transfer import to_device, to_host
from stoker.sched.request import TokenLogprobs

# Rows that are sampled at a time. Sampling needs many times the memory of the logits, which gpu_memory.py plans for.
SAMPLE_BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens, on the device. If any row needs logprobs, all rows have them. They come from the raw logits."""

    token_ids: Tensor  # [heads]; -1 where nothing was sampled, because an earlier draft of the span was wrong
    logprobs: Tensor | None  # [heads]
    top_ids: Tensor | None  # [heads, k]
    top_logprobs: Tensor | None  # [heads, k]

    def token_logprobs(self, head: int, num: int | None) -> TokenLogprobs | None:
        if num is None or self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return None
        top_ids, top_logprobs = self.top_ids[head, :num].tolist(), self.top_logprobs[head, :num].tolist()
        return TokenLogprobs(int(self.token_ids[head]), float(self.logprobs[head]), top_ids, top_logprobs)

    def to_host(self) -> SampledTokens:
        rest = (self.logprobs, self.top_ids, self.top_logprobs)
        return SampledTokens(to_host(self.token_ids), *(None if part is None else to_host(part) for part in rest))


@dataclass(frozen=True, slots=True)
class _SampledHead:
    """The `number`-th head of a span: it samples the token after the span's `number`-th draft."""

    span: SamplingSpan
    number: int
    state: RowState

    @property
    def next_draft(self) -> int | None:
        return self.span.drafts[self.number] if self.number < len(self.span.drafts) else None


def sample(logits: Tensor, spans: Sequence[SamplingSpan], table: RowTable) -> SampledTokens:
    """Sample a token for each head of the spans. logits [heads, vocab].

    Position and seed determine the random numbers for a token. Where sampling also depends on the tokens before, by
    penalties or a grammar, the heads of a span are sampled one after the other, up to the first wrong draft.
    """
    states = [table.states[span.row] for span in spans if span.head >= 0]
    num_logprobs = max((-1 if s.sampling.num_logprobs is None else s.sampling.num_logprobs for s in states), default=-1)
    heads = []
    for span, state in zip((span for span in spans if span.head >= 0), states, strict=True):
        num_heads = 1 if state.depends_on_output else 1 + len(span.drafts)
        heads += [_SampledHead(span, number, state) for number in range(num_heads)]
    if len(heads) == len(logits):
        return _sample_heads(logits, heads, num_logprobs)
    if not heads:  # all rows are at their limits
        return SampledTokens(torch.full((len(logits),), -1, device=logits.device), None, None, None)
    parts, places = [], []
    while heads:
        where = [head.span.head + head.number for head in heads]
        part = _sample_heads(logits[to_device(where, logits.device)], heads, num_logprobs)
        parts.append(part)
        places += where
        pairs = zip(heads, part.token_ids.tolist(), strict=True)
        heads = [
            _SampledHead(one.span, one.number + 1, one.state) for one, token_id in pairs if _accepts(one, token_id)
        ]
    return _scattered(_concatenated(parts), to_device(places, logits.device), len(logits))


def _accepts(head: _SampledHead, token_id: int) -> bool:
    """Advance the row's grammar if the sampled token is the next draft. Return True if the next head is to be sampled."""
    if not head.state.depends_on_output or head.next_draft != token_id:
        return False
    matcher = head.state.matcher
    return matcher is None or (not matcher.done and matcher.accept(token_id) and not matcher.done)


def _sample_heads(logits: Tensor, heads: Sequence[_SampledHead], num_logprobs: int) -> SampledTokens:
    """Sample one token per row of logits."""
    parts = []
    for i in range(0, len(heads), SAMPLE_BATCH_ROWS):
        batch = heads[i : i + SAMPLE_BATCH_ROWS]
        lengths = [head.span.length + head.number for head in batch]
        states = [head.state for head in batch]
        parts.append(_sample(logits[i : i + SAMPLE_BATCH_ROWS], states, lengths, num_logprobs))
    return parts[0] if len(parts) == 1 else _concatenated(parts)


def _sample(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int], num_logprobs: int) -> SampledTokens:
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logprobs = torch.log_softmax(logits, -1) if num_logprobs >= 0 else None
    logits = _process_logits(logits, states, lengths)
    token_ids = choose_tokens(logits, states, lengths)
    for i, state in enumerate(states):
        if state.output_counts is not None:
            token_id = token_ids[i : i + 1]
            state.output_counts.scatter_add_(0, token_id, torch.ones_like(token_id, dtype=state.output_counts.dtype))
    if logprobs is None:
        return SampledTokens(token_ids, None, None, None)
    top = logprobs.topk(max(1, num_logprobs), -1)
    return SampledTokens(token_ids, logprobs.gather(1, token_ids[:, None]).squeeze(1), top.indices, top.values)


def choose_tokens(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int]) -> Tensor:
    """Sample one token per row by temperature, top_k, top_p and min_p alone. Drafts are sampled like this."""
    random = [i for i, s in enumerate(states) if s.sampling.temperature > 0]
    token_ids = logits.argmax(-1)
    if random:
        chosen = [states[i] for i in random]
        where = to_device(random, logits.device)
        token_ids[where] = _sample_with_temperature(logits[where], chosen, [lengths[i] for i in random])
    return token_ids


def _concatenated(parts: Sequence[SampledTokens]) -> SampledTokens:
    def column(name: str) -> Tensor | None:
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else torch.cat(columns)

    return SampledTokens(
        torch.cat([part.token_ids for part in parts]), column("logprobs"), column("top_ids"), column("top_logprobs")
    )


def _scattered(sampled: SampledTokens, places: Tensor, num_heads: int) -> SampledTokens:
    """Move each row to its place among all heads."""

    def column(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return values.new_full((num_heads, *values.shape[1:]), -1).index_copy_(0, places, values)

    rest = (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    token_ids = sampled.token_ids.new_full((num_heads,), -1).index_copy_(0, places, sampled.token_ids)
    return SampledTokens(token_ids, *(column(part) for part in rest))


def _sample_with_temperature(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int]) -> Tensor:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return to_device([getattr(s.sampling, name) for s in states], logits.device, dtype)

    positions = to_device(lengths, logits.device)
    return sample_tokens(
        logits,
        column("temperature", logits.dtype),
        column("top_k", torch.int64),
        column("top_p", torch.float64),
        column("min_p", logits.dtype),
        noise_keys(column("seed", torch.int64), positions),
    )


def _process_logits(logits: Tensor, states: Sequence[RowState], lengths: Sequence[int]) -> Tensor:
    """Apply penalties, biases and masks to the rows that have them."""
    penalised = [i for i, s in enumerate(states) if s.output_counts is not None]
    if penalised:
        where = to_device(penalised, logits.device)
        logits[where] = _penalise(logits[where], [states[i] for i in penalised])
    for i, state in enumerate(states):
        if state.bias is not None:
            logits[i, state.bias[0]] += state.bias[1].to(logits.dtype)
    constrained = [i for i, s in enumerate(states) if s.matcher is not None and not s.matcher.done]
    if constrained:
        allowed = torch.zeros(len(constrained), -(-logits.shape[1] // 32), dtype=torch.int32)
        for number, i in enumerate(constrained):
            states[i].matcher.fill(allowed[number])  # type: ignore[union-attr]
        where = to_device(constrained, logits.device)
        logits[where] = mask_tokens(logits[where], allowed)
    for i, state in enumerate(states):
        if state.stop_ids is not None and lengths[i] - state.num_prompt < state.sampling.min_tokens:
            without_stops = logits[i].index_fill(0, state.stop_ids, float("-inf"))
            # A grammar at its end allows only stop tokens. Then min_tokens cannot be met.
            if state.matcher is None or bool(without_stops.isfinite().any()):
                logits[i] = without_stops
    return logits


def _penalise(logits: Tensor, states: Sequence[RowState]) -> Tensor:
    def column(name: str) -> Tensor:
        return to_device([getattr(s.sampling, name) for s in states], logits.device, logits.dtype)

    counts = torch.stack([s.output_counts for s in states])  # type: ignore[misc]
    in_prompt = torch.stack([s.in_prompt for s in states])  # type: ignore[misc]
    columns = (column("repetition_penalty"), column("frequency_penalty"), column("presence_penalty"))
    return penalise(logits, counts, in_prompt, *columns)
