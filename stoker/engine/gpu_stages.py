"""StageGpuSteps: the steps of one stage of a pipeline on a GPU.

A stage has CUDA graphs of its own layers. They read the hidden states of the stage before from a buffer that never moves, and
what they return is sent after the replay. So no graph contains an exchange between stages, and each stage may choose the
captured shape by itself: exchanged are the tokens that a plan has, without the padding.

The first stage has a second set of graphs: the head, sampling, verification and the draft model's pass. They run when the
hidden states of the last stage are back. Meanwhile the first stage runs the layers of further steps, in the same memory. What a
step still needs is therefore copied before the next one is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.engine.device_drafter import NO_GUESSES, Drafter, DraftStep, Guesses
from stoker.engine.gpu_batches import Dense, StepBatches
from stoker.engine.gpu_steps import DeviceSteps, GpuSteps, sample_step, step_shapes
from stoker.engine.graphs import StepGraphs, StepOutputs, borrow
from stoker.engine.packed import StepInputs
from stoker.engine.rows import RowTable
from stoker.engine.stage_taps import StageTaps
from stoker.kv.device.device_kv import DeviceKv
from stoker.layers.features import Tap
from stoker.models.family import Model
from stoker.parallel.stages import PipelineStage, Stages
from stoker.sched.draft_tape import max_heads
from stoker.sched.plan import StepPlan

_NOT_DENSE: Dense = ()


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """What the layers of a stage return."""

    hidden: Tensor  # [tokens, hidden], after the last layer of the stage
    token_ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    tapped: tuple[Tensor, ...]  # [tokens, hidden] each, of the layers that the draft model needs
    guesses: Guesses = NO_GUESSES

    def borrowed(self, guesses: Guesses) -> LayerOutputs:
        return replace(self, hidden=borrow(self.hidden), tapped=tuple(borrow(one) for one in self.tapped))


@dataclass(frozen=True, slots=True)
class _Started:
    """A step of the first stage that the later ones have not finished. Its tensors are copies."""

    plan: StepPlan
    known: Tensor | None  # [2, tokens]: ids and positions, if only the device knows them
    tapped: Mapping[int, Tensor]  # [tokens, hidden], by the model's layer


class StageGpuSteps:
    """The steps of one stage. See DeviceSteps."""

    def __init__(
        self,
        batches: StepBatches,
        model: Model,
        kv: DeviceKv,
        rows: RowTable,
        captured_tokens: int,
        drafter: Drafter,
        stages: PipelineStage,
        taps: StageTaps,
    ) -> None:
        self._batches, self._model, self._rows, self._drafter = batches, model, rows, drafter
        self._stages, self._taps, self._like = stages, taps, kv.like
        first, rest = step_shapes(max_heads(rows.max_rows), captured_tokens, batches.cutter)
        most_tokens, most_heads = (max(getattr(one, name) for one in (*first, *rest)) for name in ("tokens", "heads"))
        # What captured steps read, at fixed addresses: the states of the stage before, those of the heads after the last
        # stage, and a draft model's features. Zeros, so that padding is finite before the first step.
        self._entering = self._states(0 if stages.is_first else most_tokens)
        self._returned = self._states(most_heads if stages.is_first else 0)
        self._features = self._step_features(most_tokens)
        self._layers = StepGraphs(self._captured_layers, first, rest, kv.device)
        if not stages.is_first:
            first, rest = [], []
        self._heads = StepGraphs(self._captured_heads, first, rest, kv.device)
        self._graphs = (self._layers, self._heads)

    def _states(self, num_rows: int) -> Tensor:
        return self._like.new_zeros(num_rows, self._stages.hidden_size)

    def _step_features(self, num_tokens: int) -> Tensor:
        return self._like.new_zeros(num_tokens, self._drafter.features_width)

    def warm_up(self) -> None:
        for graphs in self._graphs:
            graphs.capture_first()

    def dry_run(self, *, with_rest: bool) -> None:
        for graphs in self._graphs:
            graphs.dry_run(with_rest=with_rest)

    def capture_next(self) -> bool:
        return any(graphs.capture_next() for graphs in self._graphs) or self._batches.plan_next()

    def capture_all(self) -> None:
        for graphs in self._graphs:
            while graphs.capture_next():
                pass
        self._batches.plan_all()

    def start(self, plan: StepPlan, samples: bool) -> Callable[[], StepOutputs | None]:
        started = self._run_layers(plan)
        return lambda: None if started is None else self._run_heads(started, samples)

    # ---- the layers of this stage

    def _run_layers(self, plan: StepPlan) -> _Started | None:
        """Run the layers of this stage, between receiving what they read and sending what they return."""
        stages, device, data = self._stages, self._like.device, self._batches.data(plan)
        num_tokens, num_heads = data.needed.tokens, data.needed.heads
        # Otherwise only the device of the first stage knows which drafts exist, and at which positions.
        is_known = stages.is_first or min(plan.token_ids) >= 0
        captured = self._layers.find(data.needed)
        dense = _NOT_DENSE if captured is not None else self._batches.take_dense(data)
        shape = data.exact if captured is None else captured.shape
        packed = self._batches.pack(data, shape, samples=False)
        if captured is None or not is_known:
            packed = packed.to(device, non_blocking=True)
        if not is_known:
            found = stages.tokens(num_tokens, _never)
            StepInputs.of(packed, shape).tokens[1:, :num_tokens].copy_(torch.stack(found))
        entering = self._entering
        if not stages.is_first:
            entering = self._entering if captured is not None else self._states(shape.tokens)
            stages.receive_entering(entering[:num_tokens])
        if captured is not None:
            inputs, outputs = captured.inputs, captured.run(packed, 0)
        else:
            inputs = StepInputs.of(packed, shape)
            outputs = self._stage_layers(inputs, entering, dense)
        is_reused = captured is not None and not stages.is_last
        hidden = outputs.hidden[:num_tokens].clone() if is_reused else outputs.hidden[:num_tokens]
        return self._send(plan, outputs, hidden, inputs.heads[0, :num_heads])

    def _send(self, plan: StepPlan, outputs: LayerOutputs, hidden: Tensor, heads: Tensor) -> _Started | None:
        """Send what the other stages need. Copies: the next step may be replayed before the transfers are done."""
        stages, num_tokens = self._stages, plan.num_tokens
        tapped = [one[:num_tokens].clone() for one in outputs.tapped]
        known = None
        if stages.is_first and min(plan.token_ids) < 0:
            known = torch.stack([outputs.token_ids[:num_tokens], outputs.positions[:num_tokens]])
            stages.tokens(num_tokens, lambda: (known[0], known[1]))
        if not stages.is_first:
            for one in tapped:
                stages.send_feature(one)
        stages.leave(hidden, heads)
        if not stages.is_first:
            return None
        return _Started(plan, known, dict(zip(self._taps.layers, tapped, strict=True)))

    def _captured_layers(self, inputs: StepInputs) -> LayerOutputs:
        # A copy, so that the layers, which reuse the memory, do not let padding grow from step to step.
        return self._stage_layers(inputs, self._entering[: inputs.tokens.shape[1]].clone())

    def _stage_layers(self, inputs: StepInputs, entering: Tensor, dense: Dense = _NOT_DENSE) -> LayerOutputs:
        """Run the layers. The memory of `entering` [tokens, hidden] is reused."""
        stages, tapped = self._stages, list[Tensor]()
        taps = [Tap(layer - stages.first_layer, lambda x: tapped.append(x.clone())) for layer in self._taps.layers]
        batch = self._batches.batch(inputs, dense)
        hidden = self._model(batch, taps, None if stages.is_first else entering)
        return LayerOutputs(hidden, batch.token_ids, batch.positions, tuple(tapped))

    # ---- the head, in the first stage

    def _run_heads(self, started: _Started, samples: bool) -> StepOutputs:
        """Receive what the later stages return for a step, and sample."""
        plan, device, data = started.plan, self._like.device, self._batches.data(started.plan)
        num_tokens, num_heads = data.needed.tokens, data.needed.heads
        features = self._taps.expect(self._drafter.start(), num_tokens, started.tapped)()
        captured = self._heads.find(data.needed)
        hidden, all_features, dense = self._returned, self._features, _NOT_DENSE
        if captured is not None:
            shape = captured.shape
        else:
            dense, shape = self._batches.take_dense(data), data.exact
            hidden, all_features = self._states(shape.heads), self._step_features(shape.tokens)
        packed = self._batches.pack(data, shape, samples)
        if captured is None or started.known is not None:
            packed = packed.to(device, non_blocking=True)
        if started.known is not None:
            StepInputs.of(packed, shape).tokens[1:, :num_tokens].copy_(started.known)
        if self._drafter.features_width:
            all_features[:num_tokens].copy_(features)
        if num_heads:
            self._stages.receive_result(hidden[:num_heads])()
        num_guesses = plan.num_guesses if samples else 0
        if captured is not None:
            return captured.run(packed, num_guesses)
        outputs = self._stage_heads(StepInputs.of(packed, shape), hidden, all_features, dense)
        outputs.guesses.make(num_guesses)
        return outputs

    def _captured_heads(self, inputs: StepInputs) -> StepOutputs:
        num_heads, num_tokens = inputs.heads.shape[1], inputs.tokens.shape[1]
        return self._stage_heads(inputs, self._returned[:num_heads], self._features[:num_tokens])

    def _stage_heads(
        self, inputs: StepInputs, hidden: Tensor, features: Tensor, dense: Dense = _NOT_DENSE
    ) -> StepOutputs:
        batch = self._batches.draft_batch(inputs, dense)
        step = DraftStep(batch, inputs.tokens[0], inputs.heads, features)
        return sample_step(self._model, self._rows, self._drafter, step, hidden)


def _never() -> tuple[Tensor, Tensor]:
    raise AssertionError("only the first stage finds tokens")


def device_steps(
    batches: StepBatches,
    model: Model,
    kv: DeviceKv,
    rows: RowTable,
    captured_tokens: int,
    drafter: Drafter,
    stages: Stages,
    taps: StageTaps,
) -> DeviceSteps:
    """Return the steps of a whole model, or of a stage of it."""
    given = (batches, model, kv, rows, captured_tokens, drafter)
    return StageGpuSteps(*given, stages, taps) if isinstance(stages, PipelineStage) else GpuSteps(*given)
