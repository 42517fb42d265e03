"""DraftCounts: how many drafts were verified and accepted, by their source and by their position in a step."""

from __future__ import annotations

from itertools import accumulate

from stoker.sched.draft_tape import MAX_DRAFTS


class SourceCounts:
    """The counts of one source. Counters start with the engine."""

    def __init__(self) -> None:
        # Spans by their number of drafts and of accepted drafts: two increments per span, whatever its length.
        self._by_drafts = [0] * (MAX_DRAFTS + 1)
        self._by_accepted = [0] * (MAX_DRAFTS + 1)

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Count a span. The limits only guard the lists."""
        num_drafts = min(num_drafts, MAX_DRAFTS)
        self._by_drafts[num_drafts] += 1
        self._by_accepted[min(num_accepted, num_drafts)] += 1

    @property
    def num_spans(self) -> int:
        """Verified spans. Each of them produced one token besides its accepted drafts."""
        return sum(self._by_drafts)

    @property
    def drafted_at(self) -> list[int]:
        """Drafts that were verified at positions 1 to MAX_DRAFTS."""
        return _at_least(self._by_drafts)

    @property
    def accepted_at(self) -> list[int]:
        """Drafts that were accepted at positions 1 to MAX_DRAFTS."""
        return _at_least(self._by_accepted)

    @property
    def num_drafts(self) -> int:
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


class DraftCounts:
    """The counts of all sources. The names of the sources are those of the drafters, so their number is bounded."""

    def __init__(self) -> None:
        self.by_source: dict[str, SourceCounts] = {}

    def record(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """Count one verified span: its drafts came from `source`, and the first `num_accepted` were right."""
        if num_drafts <= 0:
            return
        counts = self.by_source.get(source)
        if counts is None:
            counts = self.by_source[source] = SourceCounts()
        counts.record(num_drafts, num_accepted)


def _at_least(by_number: list[int]) -> list[int]:
    """Return how many spans have at least 1, 2, ... drafts."""
    return list(accumulate(reversed(by_number[1:])))[::-1]
