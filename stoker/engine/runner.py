"""Runner: apply a plan to the rows, forward, sample, copy out. It decides nothing.

`launch` returns at once on a device that works on its own; `wait` gives the result. A grammar needs the token before to
say what may come next: only then does a launch wait for the step before it, with its own forward already under way.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.engine.card import CardSteps
from stoker.engine.inputs import build_batch
from stoker.engine.rows import RowState, RowTable
from stoker.engine.sampler import Drawn, sample
from stoker.engine.threads import Threads
from stoker.kernels.paged import fits
from stoker.kernels.transfer import to_device
from stoker.kv.device import DeviceKv
from stoker.models.contract import Model
from stoker.sched.plan import Span, SpanResult, StepPlan, StepResult


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step. The rows' states are those of its own time: a row may have another owner since."""

    plan: StepPlan
    drawn: Drawn | None
    states: list[RowState]  # of the spans that sample, in their order
    started_s: float
    copied: torch.cuda.Event | None
    _result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            if self.copied is not None:
                self.copied.synchronize()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        results: list[SpanResult | None] = []
        token_ids = self.drawn.token_ids.tolist() if self.drawn is not None else []
        i = 0
        for span in self.plan.spans:
            if not span.samples:
                results.append(None)
                continue
            results.append(self._take(i, token_ids[i]))
            i += 1
        return StepResult(results, time.monotonic() - self.started_s)

    def _take(self, i: int, token_id: int) -> SpanResult:
        state = self.states[i]
        assert self.drawn is not None
        logprobs = self.drawn.token_logprobs(i, state.sampling.num_logprobs)
        if state.matcher is None:
            return SpanResult([token_id], logprobs)
        if not state.matcher.done and not state.matcher.accept(token_id):
            return SpanResult([], error=f"the grammar has no way on from here (token {token_id})")
        return SpanResult([token_id], logprobs, grammar_done=state.matcher.done)


class Runner:
    def __init__(self, model: Model, num_heads: int, kv: DeviceKv, rows: RowTable, threads: Threads) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._threads = threads
        is_able = fits(kv.blocks, kv.layout.block_tokens, kv.layout.head_dim)
        self._card = CardSteps(model, kv, rows, num_heads) if is_able else None
        self._last: PendingStep | None = None

    def warm_up(self) -> None:
        """On a card: compile and capture what nearly every step needs, before somebody waits for it."""
        self._choose_device()
        if self._card is not None:
            self._card.warm_up()
        # What a start leaves behind stays: walking it would stop some step for 100 ms, now and then.
        gc.collect()
        gc.freeze()

    def capture_next(self) -> bool:
        """When there is nothing else to do: capture one more kind of step. Whether there was one left."""
        self._choose_device()
        return self._card is not None and self._card.capture_next()

    def capture_all(self) -> None:
        self._choose_device()
        if self._card is not None:
            self._card.capture_all()

    def launch(self, plan: StepPlan) -> PendingStep:
        started_s = time.monotonic()
        self._choose_device()
        threads = self._threads.choose(plan.num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._last = self._launch(plan, started_s)
        self._threads.note(plan.num_tokens, threads, time.monotonic() - started_s)
        return self._last

    def _choose_device(self) -> None:
        """Triton launches on the calling thread's card, whatever the tensors say."""
        if self._kv.blocks.is_cuda:
            torch.cuda.set_device(self._kv.blocks.device)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, started_s: float) -> PendingStep:
        self._rows.apply(plan)
        if plan.copies:
            self._kv.copy([copy.src for copy in plan.copies], [copy.dst for copy in plan.copies])
        if plan.fresh_blocks:
            self._kv.clear(plan.fresh_blocks)
        if not plan.spans:
            return PendingStep(plan, None, [], started_s, None)
        sampling = [span for span in plan.spans if span.samples]
        states = [self._rows[span.row] for span in sampling]
        drawn = (
            self._card_step(plan, sampling, states) if self._card is not None else self._step(plan, sampling, states)
        )
        copied = None
        if drawn is not None:
            drawn = drawn.to_host()
            if self._kv.blocks.is_cuda:
                copied = torch.cuda.Event(blocking=True)
                copied.record()
        return PendingStep(plan, drawn, states, started_s, copied)

    def _card_step(self, plan: StepPlan, sampling: list[Span], states: list[RowState]) -> Drawn | None:
        assert self._card is not None
        draws = all(state.is_plain for state in states)
        outputs = self._card.run(plan, sampling, draws)
        if draws or outputs.logits is None:
            return Drawn(outputs.token_ids[: len(sampling)], None, None, None) if sampling else None
        return self._sample(outputs.logits[: len(sampling)], sampling, states)

    def _step(self, plan: StepPlan, sampling: list[Span], states: list[RowState]) -> Drawn | None:
        """By the references."""
        hidden = self._model(build_batch(plan, self._rows, self._kv))
        if not sampling:
            return None
        ends, end = [], 0
        for span in plan.spans:
            end += span.count
            if span.samples:
                ends.append(end - 1)
        return self._sample(self._model.logits(hidden[to_device(ends, hidden.device)]), sampling, states)

    def _sample(self, logits: Tensor, sampling: list[Span], states: list[RowState]) -> Drawn:
        if self._last is not None and any(state.matcher is not None for state in states):
            self._last.wait()
        lengths = [span.start + span.count for span in sampling]
        return sample(logits, [span.row for span in sampling], lengths, self._rows)
