"""RequestRecords: what happened to each simulated request, in columns. A million requests take about 60 MB."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from math import exp, log

_NEVER = -1.0
_BUCKETS_PER_E = 200  # gaps are counted in buckets of half a percent
_MIN_GAP_S = 1e-7


class GapHistogram:
    """Gaps between tokens, counted in buckets of half a percent."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        self._counts[_bucket(seconds)] += count
        self.count += count
        self.sum_s += seconds * count

    def add_run(self, first_s: float, last_s: float, num_steps: int, count: int) -> None:
        """Add `count` gaps for each of `num_steps` steps, whose times rise evenly from the first to the last."""
        if _bucket(first_s) == _bucket(last_s):
            self.add((first_s + last_s) / 2, num_steps * count)
            return
        for step in range(num_steps):
            self.add(first_s + (last_s - first_s) * step / (num_steps - 1), count)

    def quantile_s(self, share: float) -> float | None:
        """Return the smallest gap that at least `share` of all gaps do not exceed."""
        left = share * self.count
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                seconds = exp(bucket / _BUCKETS_PER_E)
                return 0.0 if seconds <= 1.01 * _MIN_GAP_S else seconds
        return None


def _bucket(seconds: float) -> int:
    return round(log(seconds if seconds > _MIN_GAP_S else _MIN_GAP_S) * _BUCKETS_PER_E)


class RequestRecords:
    """One row for each request that has ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()  # ok, or the reason why it was refused or failed
        self.gaps = GapHistogram()
        self.is_ok = array("b")
        self.started_s = array("d")
        self.ttft_s = array("d")
        self.ended_s = array("d")
        self.prompt_tokens = array("q")
        self.cached_tokens = array("q")
        self.output_tokens = array("q")

    def __len__(self) -> int:
        return len(self.started_s)

    def add(
        self,
        *,
        outcome: str,
        started_s: float,
        ttft_s: float | None,
        ended_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        self.outcomes[outcome] += 1
        self.is_ok.append(outcome == "ok")
        self.started_s.append(started_s)
        self.ttft_s.append(_NEVER if ttft_s is None else ttft_s)
        self.ended_s.append(ended_s)
        self.prompt_tokens.append(prompt_tokens)
        self.cached_tokens.append(cached_tokens)
        self.output_tokens.append(output_tokens)

    def answered(self) -> Iterator[int]:
        """Yield the numbers of the requests that were answered completely."""
        return (i for i, ok in enumerate(self.is_ok) if ok)
