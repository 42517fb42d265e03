"""Measure the steps of an engine in this process: which shapes take how long."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.base.ids import RequestId
from stoker.engine.build import BuiltEngine
from stoker.sched.plan import StepPlan
from stoker.sched.request import GenerateRequest, SamplingParams
from stoker.sched.step_rates import StepRates
from stoker.sched.step_work import StepWork, work_of

_FIRST_TOKEN_ID = 100


@dataclass(frozen=True, slots=True)
class LoadShape:
    """`rows` sequences with prompts of `context` tokens each, which decode `decode_steps` tokens together."""

    rows: int
    context: int
    decode_steps: int = 12


class _LastPlan(StepRates):
    """Rates that also remember the plan that was committed last."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[StepPlan] = []

    def record(self, plan: StepPlan, step_s: float) -> None:
        super().record(plan, step_s)
        self.plans.append(plan)


def load_shapes(max_rows: int, max_tokens: int, kv_tokens: int, step_tokens: int) -> Iterator[LoadShape]:
    """Yield loads that cover the rows, contexts and step sizes of this engine."""
    longest = min(max_tokens, kv_tokens) - 32
    contexts = sorted({min(longest, size) for size in (32, 256, min(1024, 2 * step_tokens), 4 * step_tokens)})
    rows = 1
    while rows <= max_rows:
        for context in contexts:
            if rows * (context + 32) <= kv_tokens and rows * context <= 8 * step_tokens:
                yield LoadShape(rows, context)
        rows *= 2


def measure_steps(
    built: BuiltEngine, shapes: Sequence[LoadShape], repeats: int = 2, seed: int = 0
) -> list[tuple[StepWork, float]]:
    """Return the size of every step of these loads, and its time from the end of the step before it.

    Similar steps are summarized by their lower quartile. The first load also runs before the measurement, as a warm-up.
    """
    rng, engine = random.Random(seed), built.engine
    plans = _LastPlan()
    before, engine.rates = engine.rates, plans
    groups: dict[tuple[int, ...], list[tuple[StepWork, float]]] = {}
    try:
        for number, shape in enumerate([shapes[0], *list(shapes) * repeats]):
            for i in range(shape.rows):
                prompt = [rng.randrange(_FIRST_TOKEN_ID, built.vocab_size) for _ in range(shape.context)]
                sampling = SamplingParams(temperature=0.0)
                engine.add(
                    GenerateRequest(RequestId(f"m{number}.{i}"), prompt, len(prompt), sampling, shape.decode_steps)
                )
            while engine.has_work:
                plans.plans.clear()
                start_s = time.perf_counter()
                engine.step()
                took_s = time.perf_counter() - start_s
                if number and len(plans.plans) == 1:
                    work = work_of(plans.plans[0])
                    groups.setdefault(_key(work), []).append((work, took_s))
    finally:
        engine.rates = before
    return [_typical(steps) for steps in groups.values()]


def _typical(steps: list[tuple[StepWork, float]]) -> tuple[StepWork, float]:
    """Return the step at the lower quartile: what else runs on the machine makes a step slower, never faster."""
    return sorted(steps, key=lambda one: one[1])[(len(steps) - 1) // 4]


def _key(work: StepWork) -> tuple[int, ...]:
    """Return the class of similar steps. While rows decode, the context grows by a token of each in every step."""
    context = work.context_tokens // (64 * max(1, work.rows))
    return work.tokens, work.rows, context, int(work.attended_pairs) // (64 * work.tokens)
