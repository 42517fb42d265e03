"""Runner: apply a plan to the rows, forward, sample, copy out. It decides nothing.

`launch` returns at once on a device that works on its own; `wait` gives the result. A grammar needs the token before to
say what may come next: only then does a launch wait for the step before it, with its own forward already under way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.base import garbage
from stoker.engine.gpu_steps import CardSteps
from stoker.engine.inputs import build_batch
from stoker.engine.rows import RowState, RowTable
from stoker.engine.sampler import Drawn, sample
from stoker.engine.threads import Threads
from stoker.kernels.paged import fits
from stoker.kernels.transfer import to_device
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.family import Model
from stoker.sched.plan import BlockCopy, StepPlan, StepResult

# Of blocks that are copied at a time: on their way they are held once more, and hundreds of requests may each want one in one step.
_COPIED_BYTES = 128 << 20


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step. The rows' states are those of its own time: a row may have another owner since."""

    plan: StepPlan
    drawn: Drawn | None
    states: list[RowState]  # of the spans that sample, in their order; none where all of them are plain
    started_s: float
    done: torch.cuda.Event | None  # what it drew is here, and the device is free for others
    before: PendingStep | None = None  # a row that this step has passed over may have drawn there
    _ended_s: float = 0.0
    _result: StepResult | None = None

    def wait(self) -> StepResult:
        """Steps are read in the order in which they were launched: a grammar goes on by the tokens in theirs. The device does them
        one after the other, too: a step's time begins when the one before has ended."""
        if self._result is None:
            if self.before is not None:
                self.before.wait()
                self.started_s = max(self.started_s, self.before._ended_s)
                self.before = None
            if self.done is not None:
                self.done.synchronize()
            self._ended_s = time.monotonic()
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        drawn = iter(self.drawn.token_ids.tolist() if self.drawn is not None else [])
        token_ids = [[next(drawn)] if span.samples else [] for span in self.plan.spans]
        result = StepResult(token_ids, self._ended_s - self.started_s)
        if self.states:
            samples = [number for number, span in enumerate(self.plan.spans) if span.samples]
            for i, (number, state) in enumerate(zip(samples, self.states, strict=True)):
                self._say_more(i, state, number, result)
        return result

    def _say_more(self, i: int, state: RowState, number: int, result: StepResult) -> None:
        """Of what the i-th sampling span drew, which is the plan's span `number`."""
        assert self.drawn is not None
        logprobs = self.drawn.token_logprobs(i, state.sampling.num_logprobs)
        if logprobs is not None:
            result.logprobs[number] = logprobs
        if state.matcher is None:
            return
        token_id = result.token_ids[number][0]
        if not state.matcher.done and not state.matcher.accept(token_id):
            result.errors[number] = f"the grammar has no way on from here (token {token_id})"
        elif state.matcher.done:
            result.grammar_done.add(number)
        elif state.matcher.too_slow:
            result.errors[number] = "the grammar can be followed in too many ways at once: each token takes too long"


class Runner:
    def __init__(
        self, model: Model, num_heads: int, kv: DeviceKv, rows: RowTable, threads: Threads, mixed_tokens: int
    ) -> None:
        self._model = model
        self._kv = kv
        self._rows = rows
        self._threads = threads
        is_able = fits(kv.blocks, kv.layout.block_tokens, kv.layout.head_dim)
        self._card = CardSteps(model, kv, rows, num_heads, mixed_tokens) if is_able else None
        self._last: PendingStep | None = None

    def warm_up(self) -> None:
        """On a card: compile and capture what nearly every step needs, before somebody waits for it."""
        self._choose_device()
        if self._card is not None:
            self._card.warm_up()
        garbage.freeze()

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
        launched = self._launch(plan, started_s)
        launched.before, self._last = self._last, launched
        self._threads.record(plan.num_tokens, threads, time.monotonic() - started_s)
        return launched

    def _choose_device(self) -> None:
        """Triton launches on the calling thread's card, whatever the tensors say."""
        if self._kv.blocks.is_cuda:
            torch.cuda.set_device(self._kv.blocks.device)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, started_s: float) -> PendingStep:
        self._rows.apply(plan)
        self._copy_blocks(plan.copies)
        if plan.fresh_blocks:
            self._kv.clear(plan.fresh_blocks)
        if not plan.spans:
            return PendingStep(plan, None, [], started_s, None)
        states = [self._rows.states[span.row] for span in plan.spans if span.samples]
        plain = all(state.is_plain for state in states)
        drawn = self._step(plan, states) if self._card is None else self._card_step(self._card, plan, states, plain)
        drawn = None if drawn is None else drawn.to_host()
        done = None
        if self._kv.blocks.is_cuda:
            # Also where nothing is drawn: else a long prompt's steps would all be launched at once.
            done = torch.cuda.Event(blocking=True)
            done.record()
        return PendingStep(plan, drawn, [] if plain else states, started_s, done)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, a few at a time: what was copied from may be another's to copy into."""
        most = max(1, _COPIED_BYTES // self._kv.layout.block_bytes)
        for first in range(0, len(copies), most):
            some = copies[first : first + most]
            self._kv.copy([copy.src for copy in some], [copy.dst for copy in some])

    def _card_step(self, card: CardSteps, plan: StepPlan, states: list[RowState], plain: bool) -> Drawn | None:
        outputs = card.run(plan, draws=plain)
        if plain or outputs.logits is None:
            return Drawn(outputs.token_ids[: len(states)], None, None, None) if states else None
        return self._sample(outputs.logits[: len(states)], plan, states)

    def _step(self, plan: StepPlan, states: list[RowState]) -> Drawn | None:
        """By the references."""
        hidden = self._model(build_batch(plan, self._rows, self._kv))
        if not states:
            return None
        ends, end = [], 0
        for span in plan.spans:
            end += span.count
            if span.samples:
                ends.append(end - 1)
        return self._sample(self._model.logits(hidden[to_device(ends, hidden.device)]), plan, states)

    def _sample(self, logits: Tensor, plan: StepPlan, states: list[RowState]) -> Drawn:
        if self._last is not None and any(state.matcher is not None for state in states):
            self._last.wait()
        sampling = [span for span in plan.spans if span.samples]
        lengths = [span.start + span.count for span in sampling]
        return sample(logits, [span.row for span in sampling], lengths, self._rows)
