"""StepOutcomes: applies what a step sampled to its sequences. Pure."""

from __future__ import annotations

from typing import NamedTuple

from stoker.sched.drafting import Drafting
from stoker.sched.leases import Leases
from stoker.sched.plan import Span, StepPlan, StepResult
from stoker.sched.prefix_cache import PrefixCache
from stoker.sched.request import Finish, TokenChunks
from stoker.sched.residency import Residency
from stoker.sched.scheduler_config import Counters
from stoker.sched.sequence import Sequence, SequenceState
from stoker.sched.step_size import StepSize


class LaunchedPlan(NamedTuple):
    """A plan's spans and their sequences. A sequence whose row epoch has changed was preempted or ended since."""

    spans: list[Span]
    seqs: list[Sequence]
    row_epochs: list[int]
    num_tokens: int
    num_guesses: int

    @classmethod
    def of(cls, plan: StepPlan, seqs: list[Sequence]) -> LaunchedPlan:
        return cls(plan.spans, seqs, [seq.row_epoch for seq in seqs], plan.num_tokens, plan.num_guesses)


class StepOutcomes:
    """Appends sampled tokens, names full blocks, and ends sequences."""

    def __init__(
        self,
        residency: Residency,
        prefixes: PrefixCache,
        leases: Leases,
        drafting: Drafting,
        step_size: StepSize,
        counters: Counters,
    ) -> None:
        self._residency = residency
        self._prefixes = prefixes
        self._leases = leases
        self._drafting = drafting
        self._step_size = step_size
        self._counters = counters

    def apply(self, launched: LaunchedPlan, result: StepResult) -> TokenChunks:
        """Apply the result of a plan. Return the new tokens of each sequence."""
        chunks = TokenChunks()
        if result.is_interrupted:
            self._requeue(launched)
            return chunks
        spans, seqs, row_epochs, num_tokens, num_guesses = launched
        done = SequenceState.DONE  # looking it up takes long for one row of hundreds
        if spans:
            self._step_size.record(num_tokens, len(spans), result.step_s, num_guesses)
        for i, (span, seq, row_epoch, token_ids) in enumerate(
            zip(spans, seqs, row_epochs, result.token_ids, strict=True)
        ):
            if seq.state is done:
                continue
            has_row = seq.row_epoch == row_epoch  # it was not preempted since
            if not span.samples:
                if has_row and span.start + span.count >= (seq.num_named + 1) * seq.block_tokens:
                    self._prefixes.name_blocks(seq, span.start + span.count)
            elif i in result.errors and len(_up_to_last(seq, token_ids)) == len(token_ids):  # no stop token before it
                self._end_with_error(seq, token_ids, i, result, chunks)
            else:
                seq.num_pending -= 1
                if span.num_drafts:
                    token_ids = self._take_drafts(seq, span, token_ids, has_row)
                self._append_tokens(seq, token_ids, has_row, i, result, chunks)
        num_generated = sum(map(len, chunks.token_ids))
        self._counters.generated_tokens += num_generated
        if result.step_s and (num_guesses or num_tokens > len(spans)):
            self._count_speed(spans, num_tokens, num_generated, result.step_s)
        return chunks

    def _requeue(self, launched: LaunchedPlan) -> None:
        """Preempt the sequences of an interrupted step. What earlier steps computed for them stays in the prefix cache."""
        self._counters.interrupted_steps += 1
        for span, seq, row_epoch in zip(launched.spans, launched.seqs, launched.row_epochs, strict=True):
            if seq.state is not SequenceState.DONE:
                seq.num_pending -= span.samples
                if span.num_drafts:
                    self._drafting.dropped(seq)
                    seq.num_drafting -= span.num_drafts
                    self._counters.draft_tokens -= span.num_drafts
                if seq.row_epoch == row_epoch:
                    self._residency.requeue(seq)

    def _count_speed(self, spans: list[Span], num_tokens: int, num_generated: int, step_s: float) -> None:
        """Compare the time of a step with drafts with that of the same tokens without. Mixed steps are left out."""
        num_rows = len(spans)
        if num_tokens == num_rows + sum(span.num_drafts for span in spans) and all(span.samples for span in spans):
            self._counters.draft_step_s += step_s
            self._counters.undrafted_s += self._step_size.costs.decode_s(num_rows) * num_generated / num_rows

    def _end_with_error(
        self, seq: Sequence, token_ids: list[int], i: int, result: StepResult, chunks: TokenChunks
    ) -> None:
        """End the sequence of span `i`, whose last sampled token is invalid. It keeps the tokens before that."""
        kept, logprobs = token_ids[:-1], result.logprobs.get(i, [])[:-1]
        seq.token_ids += kept
        self._residency.remove(seq)
        finish = Finish("error", error_code="invalid_grammar", error_message=result.errors[i])
        chunks.add(seq.request.request_id, kept, seq.usage, logprobs or None, finish)

    def _take_drafts(self, seq: Sequence, span: Span, token_ids: list[int], has_row: bool) -> list[int]:
        """Take in the outcome of a span with drafts. Return its tokens up to the sequence's last."""
        num_accepted = len(token_ids) - 1
        self._drafting.committed(seq, span.num_drafts, token_ids)
        seq.num_drafting -= span.num_drafts
        if has_row:
            seq.num_computed -= span.num_drafts - num_accepted
        seq.draft_tokens += span.num_drafts
        token_ids = _up_to_last(seq, token_ids)
        num_used = min(num_accepted, len(token_ids))  # a draft after the last token was no help
        seq.accepted_draft_tokens += num_used
        self._counters.accepted_draft_tokens += num_used
        return token_ids

    def _append_tokens(
        self, seq: Sequence, token_ids: list[int], has_row: bool, i: int, result: StepResult, chunks: TokenChunks
    ) -> None:
        """Append the tokens that span `i` sampled, and end the sequence if they are its last."""
        request = seq.request
        known = seq.token_ids
        is_first = len(known) == len(request.token_ids)
        known += token_ids
        if has_row and len(known) > (seq.num_named + 1) * seq.block_tokens:
            self._prefixes.name_blocks(seq, len(known) - 1)
        finish, ticket = _finish_of(seq, i in result.grammar_done), None
        if finish is not None:
            if request.lease_id is not None and (finish.reason == "handoff" or request.max_new_tokens == 1):
                ticket = self._leases.hold(request.lease_id, seq)
            self._residency.remove(seq)
        elif i in result.drafts:
            self._drafting.suggested(seq, result.drafts[i])
        usage = seq.usage if is_first or finish is not None or request.prediction else None
        logprobs = result.logprobs.get(i)
        if logprobs is not None and len(logprobs) > len(token_ids):
            logprobs = logprobs[: len(token_ids)]
        chunks.add(request.request_id, token_ids, usage, logprobs, finish, ticket)


def _up_to_last(seq: Sequence, token_ids: list[int]) -> list[int]:
    """Return new tokens of a sequence up to its last: a stop token, or the one that reaches its limit."""
    token_ids = token_ids[: seq.max_tokens - len(seq.token_ids)]
    if stops := seq.request.sampling.stop_token_ids:
        for i, token_id in enumerate(token_ids):
            if token_id in stops:
                return token_ids[: i + 1]
    return token_ids


def _finish_of(seq: Sequence, grammar_done: bool) -> Finish | None:
    """Return why the sequence ends after its last token, or None if it continues."""
    request, last = seq.request, seq.token_ids[-1]
    if last in request.sampling.stop_token_ids:
        return Finish("stop", stop_token_id=last)
    if grammar_done:
        return Finish("stop")
    if len(seq.token_ids) >= seq.max_tokens:
        return Finish("length")
    return Finish("handoff") if request.lease_id is not None else None
