"""Fit a StepModel to measured steps. Errors count relative to the time of a step. No coefficient is negative.

The curve never falls from one knot to the next. Rows that decode are measured with few tokens, and prompts with many. Without
this rule, the fit could give a row the time of a token, and steps of more rows than were measured would be far too slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from stoker.base.errors import ConfigError
from stoker.sched.step_work import StepWork
from stoker.sim.calibration import CalibratedBounds, Residuals, StepModel, StepSample
from stoker.sim.summary import quantile

_DAMPING = 1e-6
_ROUNDS = 12
_SMALL_ERROR = 0.1  # smaller errors count by their squares, larger ones by their amount
_MIN_RANGE = 0.02  # no machine repeats itself better than this
_MAX_RANGE = 0.9


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The median time of steps of one shape. `held_out`: it judges the fit and is not used for it."""

    work: StepWork
    seconds: float
    held_out: bool = False


def decode_step(rows: int, context: int, seconds: float, held_out: bool) -> MeasuredStep:
    """Return a measured decode-only step of `rows` rows with `context` tokens each."""
    return MeasuredStep(StepWork(rows, rows, rows * context, 0.0, context), seconds, held_out)


def prompt_step(num_tokens: int, cached_tokens: int, seconds: float, held_out: bool) -> MeasuredStep:
    """Return a measured step that computed the last `num_tokens` of a prompt, after `cached_tokens`."""
    pairs = num_tokens * (cached_tokens + (num_tokens + 1) / 2)
    return MeasuredStep(StepWork(num_tokens, 1, 0, pairs, cached_tokens + num_tokens), seconds, held_out)


def mixed_step(rows: int, context: int, num_tokens: int, seconds: float, held_out: bool) -> MeasuredStep:
    """Return a measured step in which `rows` rows decoded with `context` tokens each, and a prompt was computed."""
    pairs = num_tokens * (num_tokens + 1) / 2
    work = StepWork(rows + num_tokens, rows + 1, rows * context, pairs, max(context, num_tokens))
    return MeasuredStep(work, seconds, held_out)


def fit(
    steps: Sequence[MeasuredStep], max_rows: int, jitter: Sequence[float] = ()
) -> tuple[StepModel, CalibratedBounds, Residuals]:
    """Return the model, the bounds of the measurements, and the errors.

    The errors of held out steps are those of a model that was fitted without them. The returned model is fitted to all.
    """
    used = [one for one in steps if not one.held_out]
    if len({one.work.tokens for one in used}) < 2:
        raise ConfigError(
            f"{len(used)} shapes of steps were measured, which is too few for a fit; measure more lengths"
        )
    judged, model = _fitted(used), _fitted(steps)
    model = StepModel(model.knots, model.knot_s, model.row_s, model.context_s, model.attention_s, list(jitter))
    samples = [_sample(judged if one.held_out else model, one) for one in steps]
    errors = sorted(abs(one.error) for one in samples)
    p90 = quantile(errors, 0.9)
    bounds = CalibratedBounds(
        rows=min(max_rows, max(one.work.rows for one in steps)),
        step_tokens=max(one.work.tokens for one in steps),
        context_tokens=max(one.work.longest for one in steps),
    )
    return model, bounds, Residuals(median(errors), p90, min(_MAX_RANGE, max(_MIN_RANGE, p90)), samples)


def _fitted(steps: Sequence[MeasuredStep]) -> StepModel:
    knots = _knots(sorted({one.work.tokens for one in steps}))
    rows = [_equation(one.work, knots) for one in steps]
    equations = [[x / one.seconds for x in row] for row, one in zip(rows, steps, strict=True)]
    found = _fit_robustly(equations)
    values = [max(value, 1e-9) for value in accumulate(found[: len(knots)])]
    row_s, context_s, attention_s = found[len(knots) :]
    return StepModel(knots, values, row_s, context_s, attention_s)


def _knots(sizes: Sequence[int]) -> list[int]:
    """Choose knots from the measured sizes, each at least 1.5 times the one before it."""
    knots = [sizes[0]]
    for size in sizes[1:]:
        if size >= 1.5 * knots[-1]:
            knots.append(size)
    if knots[-1] != sizes[-1]:
        knots[-1] = sizes[-1]
    return knots


def _equation(work: StepWork, knots: Sequence[int]) -> list[float]:
    """Return the factors of the unknowns: the curve's rise up to each knot, row, context and attention."""
    rises = [0.0] * len(knots)
    at = next((i for i, knot in enumerate(knots) if knot >= work.tokens), len(knots) - 1)
    rises[:at] = [1.0] * at
    rises[at] = 1.0 if at == 0 else (work.tokens - knots[at - 1]) / (knots[at] - knots[at - 1])
    return [*rises, float(work.rows), float(work.context_tokens), work.attended_pairs]


def _fit_robustly(equations: list[list[float]]) -> list[float]:
    """Fit with the amounts of large errors instead of their squares: a step that a busy machine delayed hardly counts."""
    weights = [1.0] * len(equations)
    found: list[float] = []
    for _ in range(_ROUNDS):
        found = _solve_not_negative(
            [[x * weight for x in row] for row, weight in zip(equations, weights, strict=True)], weights
        )
        errors = [abs(sum(x * value for x, value in zip(row, found, strict=True)) - 1) for row in equations]
        weights = [1 / max(error, _SMALL_ERROR) ** 0.5 for error in errors]
    return found


def _solve_not_negative(equations: list[list[float]], right_sides: list[float]) -> list[float]:
    """Return x >= 0 with `equation * x = right side` for each equation, as nearly as possible."""
    size = len(equations[0])
    scale = [max(abs(row[i]) for row in equations) or 1.0 for i in range(size)]
    rows = [[value / scale[i] for i, value in enumerate(row)] for row in equations]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * side for row, side in zip(rows, right_sides, strict=True)) for i in range(size)]
    free = list(range(size))
    while free:
        part = [[matrix[i][j] * (1 + _DAMPING * (i == j)) + 1e-15 * (i == j) for j in free] for i in free]
        found = _eliminate(part, [right[i] for i in free])
        worst = min(range(len(free)), key=found.__getitem__)
        if found[worst] >= 0:
            values = dict(zip(free, found, strict=True))
            return [values.get(i, 0.0) / scale[i] for i in range(size)]
        del free[worst]
    return [0.0] * size


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a linear system by elimination with pivoting."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


def _sample(model: StepModel, one: MeasuredStep) -> StepSample:
    work = one.work
    predicted_s = model.seconds(work.tokens, work.rows, work.context_tokens, work.attended_pairs)
    return StepSample(
        work.tokens, work.rows, work.context_tokens, work.attended_pairs, one.seconds, predicted_s, one.held_out
    )
