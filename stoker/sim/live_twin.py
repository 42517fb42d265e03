"""LiveTwin: predicts the time to first token of each request, and names workers that are slower than predicted.

The prediction uses the gateway's own counts at the moment of routing: the tokens that are queued at the worker, and those that
the request adds. It does not use what the worker says about its speed, which would hide that it became slow. Pure: the time is
an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from stoker.base.ids import WorkerId
from stoker.sim.calibration import Calibration

_WINDOW_S = 60.0
_MAX_SAMPLES = 64  # of one worker
_MIN_SAMPLES = 6
_MAX_RATIO = 20.0  # one request that took very long must not decide alone
_SLOW, _RECOVERED = 2.0, 1.4  # relative to the other workers
_MIN_EXCESS_S = 0.02  # smaller differences are noise
_CHECK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """What a prediction rests on: the counts when the request was routed."""

    queued_tokens: float  # at the worker, before this request
    new_tokens: int  # of this request, not cached
    prompt_tokens: int


Predict = Callable[[PrefillWork], float]


def calibrated(calibration: Calibration) -> Predict:
    """Return a prediction from a calibration file."""
    step, shape, host = calibration.step, calibration.shape, calibration.host
    whole_step_s = step.curve_s(shape.step_tokens)

    def predict(work: PrefillWork) -> float:
        num_whole, rest = divmod(int(work.queued_tokens) + work.new_tokens, shape.step_tokens)
        steps_s = num_whole * whole_step_s + (step.curve_s(rest) if rest else 0.0)
        cached = work.prompt_tokens - work.new_tokens
        pairs = work.new_tokens * (cached + work.new_tokens / 2)
        return host.accept_s + host.write_s + steps_s + step.row_s + step.attention_s * pairs

    return predict


def by_rates(tokens_per_s: Callable[[], Sequence[float]], step_s: Callable[[], Sequence[float]]) -> Predict:
    """Return a prediction from the typical speed of the fleet's workers, where there is no calibration."""

    def predict(work: PrefillWork) -> float:
        rates, steps = tokens_per_s(), step_s()
        rate = median(rates) if rates else 1.0
        return (work.queued_tokens + work.new_tokens) / rate + (median(steps) if steps else 0.0)

    return predict


@dataclass(frozen=True, slots=True)
class Drift:
    """A worker that became slow, or recovered."""

    worker_id: WorkerId
    is_slow: bool
    ratio: float  # of actual to predicted time, mean over the last minute
    typical_ratio: float  # of the other workers
    actual_s: float  # mean
    predicted_s: float  # mean
    num_requests: int


@dataclass(slots=True)
class _Samples:
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    is_slow: bool = False

    @property
    def ratio(self) -> float:
        ratios = [min(actual / predicted, _MAX_RATIO) for _, predicted, actual in self.recent]
        return sum(ratios) / len(ratios)


class LiveTwin:
    """Compares predictions with what happened. See the module docstring."""

    def __init__(self, predict: Predict, *, is_absolute: bool) -> None:
        """`is_absolute`: the predictions are from a calibration, so that a single worker can be judged too."""
        self._predict = predict
        self._is_absolute = is_absolute
        self._workers: dict[WorkerId, _Samples] = {}
        self._checked_s = 0.0
        self.num_predictions = 0

    def observe(self, worker_id: WorkerId, work: PrefillWork, actual_s: float, now: float) -> list[Drift]:
        """Take in a first token. `actual_s` is the time since the request was sent to the worker.

        Return the workers that became slow or recovered.
        """
        predicted_s = max(self._predict(work), 1e-4)
        self.num_predictions += 1
        self._workers.setdefault(worker_id, _Samples()).recent.append((now, predicted_s, actual_s))
        if now - self._checked_s < _CHECK_EVERY_S:
            return []
        self._checked_s = now
        return self._check(now)

    def forget(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)

    def ratios(self) -> dict[WorkerId, float]:
        """Return the mean of actual over predicted time of each worker with recent requests."""
        return {name: samples.ratio for name, samples in self._workers.items() if samples.recent}

    def slow(self) -> list[WorkerId]:
        return [name for name, samples in self._workers.items() if samples.is_slow]

    def _check(self, now: float) -> list[Drift]:
        for samples in self._workers.values():
            while samples.recent and samples.recent[0][0] < now - _WINDOW_S:
                samples.recent.popleft()
        judged = {name: one.ratio for name, one in self._workers.items() if len(one.recent) >= _MIN_SAMPLES}
        found = []
        for name, ratio in judged.items():
            others = [other for other_name, other in judged.items() if other_name != name]
            if not others and not self._is_absolute:
                continue
            typical = max(min(others), 0.25) if others else 1.0
            samples = self._workers[name]
            predicted_s, actual_s = (sum(one[i] for one in samples.recent) / len(samples.recent) for i in (1, 2))
            exceeds = ratio > _SLOW * typical and actual_s - predicted_s * typical > _MIN_EXCESS_S
            changes = exceeds if not samples.is_slow else ratio < _RECOVERED * typical
            if changes:
                samples.is_slow = not samples.is_slow
                counts = (actual_s, predicted_s, len(samples.recent))
                found.append(Drift(name, samples.is_slow, ratio, typical, *counts))
        return found
