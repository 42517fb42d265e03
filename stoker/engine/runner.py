"""Runner: executes a plan. It updates the rows, runs the forward pass, samples, and copies the tokens to the host.

On a GPU, `launch` returns at once and `wait` returns the result. A grammar needs the previous token to know which
tokens may come next. Only in that case does a launch wait for the step before it, after it has started its own forward
pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from stoker.base import garbage
from stoker.base.errors import ConfigError
from stoker.engine.device_drafter import Drafter, DraftStep, NoDrafter
from stoker.engine.draft_model import LoadedDraft
from stoker.engine.gpu_batches import StepBatches, can_page
from stoker.engine.gpu_stages import device_steps
from stoker.engine.gpu_steps import DeviceSteps
from stoker.engine.graphs import StepOutputs
from stoker.engine.heads import SamplingSpan, first_heads, heads_of, sampling_spans
from stoker.engine.inputs import build_inputs
from stoker.engine.interrupt import NO_INTERRUPT, StepInterrupted
from stoker.engine.rows import RowState, RowTable
from stoker.engine.sampler import SampledTokens, sample
from stoker.engine.stage_taps import StageTaps
from stoker.engine.threads import Threads
from stoker.kernels.transfer import to_host
from stoker.kernels.verify import verify
from stoker.kv.device.device_kv import DeviceKv
from stoker.models.family import Model
from stoker.parallel.mesh import ALONE, Mesh
from stoker.parallel.stages import ONE_STAGE, Stages
from stoker.sched.draft_tape import TAPE_TOKENS
from stoker.sched.plan import BlockCopy, StepPlan, StepResult

# Bytes of blocks that are copied at a time. A copy needs a temporary buffer, and one step may copy hundreds of blocks.
_COPY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """What a step sampled, on the host or on its way there."""

    sampled: SampledTokens
    counts: Tensor | None  # [heads]: tokens to keep from each span's first head on; None: one each
    heads: Sequence[int]  # the first head of each sampling span; -1: it sampled nothing

    def tokens_of(self, i: int) -> range:
        """Return the heads whose tokens the i-th sampling span keeps."""
        head = self.heads[i]
        count = 0 if head < 0 else 1 if self.counts is None else int(self.counts[head])
        return range(head, head + count)


@dataclass(slots=True, eq=False)
class PendingStep:
    """A launched step. It keeps its rows' states, because a row may get another owner before the step is read."""

    plan: StepPlan
    verified: VerifiedTokens | None
    states: list[RowState]  # of the sampling spans, in their order; empty if all of them are plain
    started_s: float
    done: torch.cuda.Event | None  # recorded after this stage's part, and again after the copy of tokens sampled later
    before: PendingStep | None = None  # the step launched before; it may have sampled for rows missing here
    drafts_grammar: bool = False  # return what the grammars force as drafts
    finish: Callable[[], VerifiedTokens | None] | None = None  # samples, after the later stages of a pipeline
    is_interrupted: bool = False
    _ended_s: float = 0.0
    _result: StepResult | None = None

    def wait(self) -> StepResult:
        """Return the result, after waiting for the step.

        Steps are read in the order of their launch, because grammars advance by the sampled tokens. The device executes
        them in the same order, so a step's time starts when the step before has ended.
        """
        if self._result is None:
            if self.before is not None:
                self.before.wait()
                self.started_s = max(self.started_s, self.before._ended_s)
                self.before = None
            if self.finish is not None:
                with torch.inference_mode():
                    self.verified, self.finish = self.finish(), None
                if self.done is not None and self.verified is not None:
                    self.done.record()
            if self.done is not None:
                self.done.synchronize()
            self._ended_s = time.monotonic()
            self._result = self._read()
        return self._result

    @property
    def token_bytes(self) -> bytes:
        """The sampled tokens, for a comparison with other ranks. Call it after `wait`."""
        return b"" if self.verified is None else self.verified.sampled.token_ids.numpy().tobytes()

    def _read(self) -> StepResult:
        result = StepResult(
            [[] for _ in self.plan.spans], self._ended_s - self.started_s, is_interrupted=self.is_interrupted
        )
        if self.verified is None:
            return result
        sampled = self.verified.sampled.token_ids.tolist()
        sampling = [index for index, span in enumerate(self.plan.spans) if span.samples]
        if self.verified.counts is None:
            for span_index, head in zip(sampling, self.verified.heads, strict=True):
                result.token_ids[span_index] = sampled[head : head + 1] if head >= 0 else []
        else:
            for i, span_index in enumerate(sampling):
                kept = self.verified.tokens_of(i)
                result.token_ids[span_index] = sampled[kept.start : kept.stop]
        if self.states:
            for i, (span_index, state) in enumerate(zip(sampling, self.states, strict=True)):
                if result.token_ids[span_index]:
                    self._add_details(i, state, span_index, result)
        return result

    def _add_details(self, i: int, state: RowState, span_index: int, result: StepResult) -> None:
        """Add logprobs and grammar state of the i-th sampling span, which is the plan's span `span_index`."""
        assert self.verified is not None
        token_ids, head = result.token_ids[span_index], self.verified.heads[i]
        if state.sampling.num_logprobs is not None:
            found = (
                self.verified.sampled.token_logprobs(head + j, state.sampling.num_logprobs)
                for j in range(len(token_ids))
            )
            result.logprobs[span_index] = [logprobs for logprobs in found if logprobs is not None]
        if state.matcher is None:
            return
        token_id = token_ids[-1]  # the grammar has accepted those before it while they were sampled
        if not state.matcher.done and not state.matcher.accept(token_id):
            result.errors[span_index] = f"the grammar does not allow the sampled token {token_id}"
        elif state.matcher.done:
            result.grammar_done.add(span_index)
        elif state.matcher.too_slow:
            result.errors[span_index] = (
                "the grammar is too ambiguous: matching one token takes too long; simplify its repetitions"
            )
        elif self.drafts_grammar and (forced := state.matcher.forced(TAPE_TOKENS)):
            result.drafts[span_index] = forced


class LaunchedStep(Protocol):
    """A step in flight."""

    @property
    def plan(self) -> StepPlan: ...

    def wait(self) -> StepResult:
        """Return the result, after waiting for the step."""


class StepRunner(Protocol):
    """Executes plans: a Runner, or all ranks of a model together."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...

    def warm_up(self) -> None: ...

    def capture_next(self) -> bool: ...

    def capture_all(self) -> None: ...


class Runner:
    """Executes plans on one device, with CUDA graphs where the kernels support the model's shape."""

    def __init__(
        self,
        model: Model,
        num_heads: int,
        kv: DeviceKv,
        rows: RowTable,
        threads: Threads,
        captured_tokens: int,
        attention_dtype: torch.dtype | None = None,
        exact: bool = False,
        drafts_grammar: bool = False,
        verifies: bool = False,
        uses_grid: bool = False,
        draft: LoadedDraft | None = None,
        mesh: Mesh = ALONE,
        stages: Stages = ONE_STAGE,
        tapped: Sequence[int] = (),
    ) -> None:
        """`attention_dtype` is that of attention with the reference kernels, by default the model's.

        `exact`: a token's logits depend only on the tokens before it. `drafts_grammar`: results contain what the grammars
        force next. `verifies`: plans may have drafts. `uses_grid`: attention is that of attention_grid.py. `draft` is the
        draft model. `mesh` has the other ranks of this stage, `stages` the other stages, and `tapped` the layers of the whole
        model whose hidden states the draft model of the first stage needs.
        """
        self._taps = StageTaps(stages, tapped)
        self._mesh, self._stages = mesh, stages
        self._grid_heads = num_heads if uses_grid else None
        self._exact = exact
        self._drafts_grammar = drafts_grammar
        self._model = model
        self._attention_dtype = attention_dtype
        self._kv = kv
        self._rows = rows
        self._threads = threads
        has_kernels = can_page(kv)
        if exact and kv.like.is_cuda and not has_kernels:
            widths = sorted({group.width for group in kv.all_groups})
            raise ConfigError(
                f"numerics=exact has no kernels for head sizes of {widths}, blocks of {kv.layout.block_tokens} tokens and "
                f"{kv.like.dtype} on this GPU; use --numerics fast"
            )
        self._drafter: Drafter = NoDrafter()
        if draft is not None:
            self._drafter = draft.drafter(kv, rows, paged=has_kernels, attention_dtype=attention_dtype)
        self._gpu_steps: DeviceSteps | None = None
        if has_kernels:
            draft_heads = 0 if draft is None else draft.num_heads
            batches = StepBatches(model, kv, rows, num_heads, exact, verifies, draft_heads)
            parts = (batches, model, kv, rows, captured_tokens, self._drafter)
            self._gpu_steps = device_steps(*parts, stages, self._taps)
        self._last: PendingStep | None = None
        self.interrupt = NO_INTERRUPT  # only for a runner without other ranks, whose steps are launched one by one

    def warm_up(self) -> None:
        """Compile the GPU kernels and capture the most useful graphs, before the first request."""
        self._set_device()
        if self._gpu_steps is not None:
            self._gpu_steps.warm_up()
        garbage.freeze()

    def capture_next(self) -> bool:
        """Capture one more graph. Return False if none was left."""
        self._set_device()
        return self._gpu_steps is not None and self._gpu_steps.capture_next()

    def capture_all(self) -> None:
        self._set_device()
        if self._gpu_steps is not None:
            self._gpu_steps.capture_all()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a plan. Its `loads` are not started here: the engine passes them to the store."""
        started_s = time.monotonic()
        self._set_device()
        threads = self._threads.choose(plan.num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        launched = self._launch(plan, started_s)
        launched.before, self._last = self._last, launched
        if not launched.is_interrupted:
            self._threads.record(plan.num_tokens, threads, time.monotonic() - started_s)
        return launched

    def _set_device(self) -> None:
        """Select the GPU. Triton launches on the calling thread's current GPU, whatever the tensors' device is."""
        if self._kv.like.is_cuda:
            torch.cuda.set_device(self._kv.device)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, started_s: float) -> PendingStep:
        self._rows.apply(plan)
        self._copy_blocks(plan.copies)
        for kv_set, fresh in enumerate(plan.fresh_blocks):
            if fresh:
                self._kv.clear(fresh, kv_set)
        for load in plan.loads:
            self._kv.clear_draft(load.blocks)
        if not plan.spans:
            return PendingStep(plan, None, [], started_s, None)
        states = [self._rows.states[span.row] for span in plan.spans if span.samples]
        plain = all(state.is_plain for state in states)
        gpu_steps = self._gpu_steps
        if gpu_steps is None:
            try:
                finish = self._step(plan, states)
            except StepInterrupted:
                return PendingStep(plan, None, [], started_s, None, is_interrupted=True)
        else:
            finish = self._gpu_step(gpu_steps, plan, states, plain)
        verified = None if self._stages.is_deferred else finish()
        done = None
        if self._kv.like.is_cuda:
            # Also if nothing is sampled: otherwise all steps of a long prefill would be launched at once.
            done = torch.cuda.Event(blocking=True)
            done.record()
        states = [] if plain else states
        pending = PendingStep(plan, verified, states, started_s, done, drafts_grammar=self._drafts_grammar)
        pending.finish = finish if self._stages.is_deferred else None
        return pending

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy in order, a few blocks at a time. The source of one copy may be the destination of a later one."""
        for kv_set, memory in enumerate(self._kv.sets):
            own = [copy for copy in copies if copy.kv_set == kv_set]
            batch_size = max(1, _COPY_BYTES // memory.layout.block_bytes)
            for first in range(0, len(own), batch_size):
                batch = own[first : first + batch_size]
                self._kv.copy([copy.src for copy in batch], [copy.dst for copy in batch], kv_set)

    def _gpu_step(
        self, gpu_steps: DeviceSteps, plan: StepPlan, states: list[RowState], plain: bool
    ) -> Callable[[], VerifiedTokens | None]:
        """Launch this stage's layers. The returned function samples."""
        finish = gpu_steps.start(plan, samples=plain)

        def sampled() -> VerifiedTokens | None:
            outputs = finish()
            return None if outputs is None else self._verified(plan, outputs, states, plain)

        return sampled

    def _verified(
        self, plan: StepPlan, outputs: StepOutputs, states: list[RowState], plain: bool
    ) -> VerifiedTokens | None:
        """Return what a GPU step sampled, after sampling what it cannot sample by itself."""
        if not states:
            return None
        firsts = first_heads(plan) if plan.num_drafts else range(len(states))
        num_heads = len(states) + plan.num_drafts
        if plain or outputs.logits is None:
            sampled = SampledTokens(outputs.sampled[:num_heads], None, None, None).to_host()
            return VerifiedTokens(sampled, to_host(outputs.counts) if plan.num_drafts else None, firsts)
        spans = sampling_spans(plan, firsts, outputs.token_ids, outputs.positions)
        heads = torch.from_numpy(heads_of(plan)).to(outputs.positions.device, non_blocking=True)
        step = replace(outputs.draft, heads=heads)
        return self._sample(outputs.logits[:num_heads], spans, step, states, plan.num_guesses)

    def _step(self, plan: StepPlan, states: list[RowState]) -> Callable[[], VerifiedTokens | None]:
        """Run this stage's layers with the reference kernels. The returned function samples."""
        stages = self._stages
        options = (self._attention_dtype, self._exact, self._grid_heads, stages)
        inputs = build_inputs(plan, self._rows, self._kv, *options)
        batch, heads = inputs.batch, inputs.heads[0]
        if not len(batch.token_ids):  # all rows are at their limits
            nothing = VerifiedTokens(SampledTokens(batch.token_ids, None, None, None), None, [-1] * len(states))
            return lambda: nothing
        features, num_tokens = self._drafter.start(), len(batch.token_ids)
        taps = self._taps.here(features)
        if plan.is_interruptible:
            taps = self.interrupt.with_checks(taps)
        hidden = self._model(batch, taps, stages.entering(num_tokens))
        stages.leave(hidden, heads)
        if not stages.is_first:
            return lambda: None
        collect = self._taps.expect(features, num_tokens)
        result = stages.result(hidden, heads) if len(heads) else None

        def finish() -> VerifiedTokens | None:
            step = DraftStep(batch, inputs.token_rows, inputs.heads, collect())
            if result is None:
                self._drafter.draft(step, heads, heads)
                return None
            logits = self._model.logits(result())
            return self._sample(logits, inputs.spans, step, states, plan.num_guesses)

        return finish

    def _sample(
        self,
        logits: Tensor,
        spans: list[SamplingSpan],
        step: DraftStep,
        states: list[RowState],
        num_guesses: int,
    ) -> VerifiedTokens:
        # A step that is finished later comes after all steps before it.
        waits = self._last is not None and not self._stages.is_deferred
        if waits and self._last is not None and any(state.matcher is not None for state in states):
            self._last.wait()
        sampled = self._sample_on_ranks(logits, spans, plain=all(state.is_plain for state in states))
        batch, token_ids = step.batch, sampled.token_ids
        counts = verify(step.heads, batch.token_ids, batch.positions, token_ids, self._rows.tokens)
        self._drafter.draft(step, token_ids, counts).make(num_guesses)
        has_drafts = any(span.drafts or span.head < 0 for span in spans)
        return VerifiedTokens(sampled.to_host(), to_host(counts) if has_drafts else None, [span.head for span in spans])

    def _sample_on_ranks(self, logits: Tensor, spans: list[SamplingSpan], *, plain: bool) -> SampledTokens:
        """Sample. All ranks have the same logits and sample the same, unless it takes what only the first rank has: grammars,
        the counts of penalties, and logprobs, which the others do not need."""
        if plain or self._mesh.is_first:
            sampled = sample(logits, spans, self._rows)
        else:
            nothing = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            sampled = SampledTokens(nothing, None, None, None)
        return sampled if plain else replace(sampled, token_ids=self._mesh.share(sampled.token_ids))
