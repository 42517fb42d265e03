"""The counts of drafts: totals, positions, and that nothing is counted without drafts."""

from __future__ import annotations

from stoker.sched.draft_tape import MAX_DRAFTS
from stoker.spec.draft_counts import DraftCounts


def test_drafts_are_counted_by_source_and_position() -> None:
    counts = DraftCounts()
    for num_accepted in (3, 1, 0):
        counts.record("cache", 3, num_accepted)
    counts.record("cache", 1, 1)
    counts.record("ngram", MAX_DRAFTS, MAX_DRAFTS)
    cache, ngram = counts.by_source["cache"], counts.by_source["ngram"]
    assert (cache.num_spans, cache.num_drafts, cache.num_accepted) == (4, 10, 5)
    assert cache.drafted_at == [4, 3, 3, *[0] * (MAX_DRAFTS - 3)]
    assert cache.accepted_at == [3, 1, 1, *[0] * (MAX_DRAFTS - 3)]
    assert ngram.drafted_at == ngram.accepted_at == [1] * MAX_DRAFTS


def test_a_step_without_drafts_is_not_counted() -> None:
    counts = DraftCounts()
    counts.record("cache", 0, 0)
    assert counts.by_source == {}


def test_numbers_beyond_the_limit_stay_within_the_lists() -> None:
    counts = DraftCounts()
    counts.record("cache", MAX_DRAFTS + 5, MAX_DRAFTS + 9)
    assert counts.by_source["cache"].num_accepted == MAX_DRAFTS
