"""StepTimes: a model of the time of a step, fitted to the measured steps. Pure.

    time = fixed + token * tokens + row * rows + guess * guesses

`fixed` is mostly the reading of the weights. `row` is what a row costs beyond its token: attention over its context,
and sampling. `guess` is what a draft model takes for one guess of each row. Contexts and prompts change with the load, so
recent steps count more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

_SAMPLES = 7  # measured steps that a size class keeps; their median ignores up to three stalls
_MIN_S, _MAX_S = 1e-9, 1e6  # a step outside these is not a measurement; the squares of its time could overflow
_MAX_CLASSES = 32  # the classes that were not measured for longest are dropped
_HALF_AGE = 256  # a class counts half after this many steps without a new measurement in it
# Strength of the pull towards zero, per coefficient: fixed, token, row, guess. It decides only what the measurements leave
# open: time that several coefficients could explain goes to the tokens first, then to the fixed part.
_DAMPING = (1e-3, 1e-5, 1e-2, 1e-2)

_DAMPED = tuple(1.0 + damping for damping in _DAMPING)

Matrix = list[list[float]]


class StepCosts(NamedTuple):
    """The coefficients of the model. None of them is negative."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0
    guess_s: float = 0.0

    def decode_s(self, num_rows: int) -> float:
        """Return the time of a decode-only step of `num_rows` sequences, without drafts and guesses."""
        return self.fixed_s + (self.token_s + self.row_s) * num_rows


@dataclass(slots=True)
class _SimilarSteps:
    """The last measurements of steps of similar size: (seconds, tokens, rows, guesses)."""

    samples: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    updated: int = 0  # number of the last measurement
    _typical: tuple[float, int, int, int] | None = None  # None: a measurement was added since it was computed

    def add(self, sample: tuple[float, int, int, int], count: int) -> None:
        self.samples.extend((sample,) * (count if count < _SAMPLES else _SAMPLES))
        self._typical = None

    @property
    def typical(self) -> tuple[float, int, int, int]:
        """The median by time; of two, the faster. A stall or a compilation makes a step slower, never faster."""
        if (found := self._typical) is None:
            found = self._typical = sorted(self.samples)[(len(self.samples) - 1) // 2]
        return found


class StepTimes:
    """Measured steps in classes of similar size, and the coefficients that explain them best.

    A class keeps its last measurements until newer ones of its own size replace them. So a long phase of decode-only
    steps does not erase what is known about prefill. A class counts by its relative error. So neither large steps nor
    outliers dominate.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int, int], _SimilarSteps] = {}  # the last measured class comes last
        self._num_recorded = 0
        self._largest: int | None = 0  # tokens of the largest step among the last ones of each class; None: not known
        self._fitted = 0  # number of the measurement after which `_costs` were fitted
        self._costs = StepCosts()

    def record(self, num_tokens: int, num_rows: int, step_s: float, num_guesses: int = 0, count: int = 1) -> None:
        """Add `count` measured steps of `num_tokens` tokens, one or more for each of its rows, and `num_guesses` after them."""
        if not _MIN_S <= step_s <= _MAX_S:
            return
        key = (num_rows.bit_length(), (num_tokens - num_rows).bit_length(), num_guesses)
        cls = self._classes.pop(key, None)
        if cls is None:
            cls = _SimilarSteps()
        elif num_tokens < cls.samples[-1][1] == self._largest:
            self._largest = None
        self._classes[key] = cls
        if len(self._classes) > _MAX_CLASSES:
            del self._classes[next(iter(self._classes))]
            self._largest = None
        if self._largest is not None and num_tokens > self._largest:
            self._largest = num_tokens
        self._num_recorded += count
        cls.updated = self._num_recorded
        cls.add((step_s, num_tokens, num_rows, num_guesses), count)

    @property
    def largest_tokens(self) -> int:
        """The tokens of the largest step that the model was fitted to."""
        if self._largest is None:
            self._largest = max([cls.samples[-1][1] for cls in self._classes.values()])
        return self._largest

    @property
    def costs(self) -> StepCosts:
        """The fitted coefficients. All are zero before the first measurement."""
        if self._fitted != self._num_recorded:
            self._fitted = self._num_recorded
            self._costs = self._fit()
        return self._costs

    def _fit(self) -> StepCosts:
        """Solve the weighted normal equations. Negative coefficients are set to zero, and the others fitted again."""
        # The equation of a class, divided by its time: 1 = fixed * x + token * y + row * z + guess * g. Written out, because
        # a plan waits for it.
        xx = xy = xz = yy = yz = zz = x1 = y1 = z1 = 0.0
        gg = xg = yg = zg = g1 = 0.0
        for cls in self._classes.values():
            step_s, num_tokens, num_rows, num_guesses = cls._typical or cls.typical
            x = 1.0 / step_s
            y, z = x * num_tokens, x * num_rows
            weight = _HALF_AGE / (_HALF_AGE + self._num_recorded - cls.updated)
            wx, wy, wz = weight * x, weight * y, weight * z
            xx, xy, xz, yy, yz, zz = xx + wx * x, xy + wx * y, xz + wx * z, yy + wy * y, yz + wy * z, zz + wz * z
            x1, y1, z1 = x1 + wx, y1 + wy, z1 + wz
            if num_guesses:
                g = x * num_guesses
                gg, xg, yg, zg, g1 = gg + weight * g * g, xg + wx * g, yg + wy * g, zg + wz * g, g1 + weight * g
        xx, yy, zz, gg = xx * _DAMPED[0], yy * _DAMPED[1], zz * _DAMPED[2], gg * _DAMPED[3]
        if not gg:  # most often, and then most often none is negative
            found = _solve([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]], [x1, y1, z1])
            if min(found) >= 0.0:
                return StepCosts(*found)
        matrix = [[xx, xy, xz, xg], [xy, yy, yz, yg], [xz, yz, zz, zg], [xg, yg, zg, gg]]
        right = [x1, y1, z1, g1]
        free = [0, 1, 2, 3] if gg else [0, 1, 2]
        while free:
            found = _solve([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
            worst = min(range(len(free)), key=found.__getitem__)
            if found[worst] >= 0.0:
                values = dict(zip(free, found, strict=True))
                return StepCosts(*(values.get(i, 0.0) for i in range(4)))
            del free[worst]
        return StepCosts()


def _solve(matrix: Matrix, right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system by elimination."""
    size = len(right)
    for i in range(size):
        pivot = matrix[i]
        for k in range(i + 1, size):
            row = matrix[k]
            factor = row[i] / pivot[i]
            right[k] -= factor * right[i]
            for j in range(i + 1, size):  # nothing reads the entries below the diagonal again
                row[j] -= factor * pivot[j]
    found = [0.0] * size
    for i in reversed(range(size)):
        known, row = 0.0, matrix[i]
        for j in range(i + 1, size):
            known += row[j] * found[j]
        found[i] = (right[i] - known) / row[i]
    return found
