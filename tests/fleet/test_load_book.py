from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook, LoadTotals, Reservation
from stoker.fleet.spec import WorkerSpec

A, B = WorkerId("a"), WorkerId("b")
ZERO = LoadTotals(0, 0, 0, 0)


def reserve(load_book: LoadBook, worker_id: WorkerId = A, tokens: int = 100, now: float = 0.0) -> Reservation:
    return load_book.reserve(worker_id, prefill_tokens=tokens, context_tokens=200, output_tokens=50, now=now)


def test_a_reservation_is_released_in_two_parts_each_once() -> None:
    load_book = LoadBook()
    reservation = reserve(load_book)
    assert load_book.totals() == LoadTotals(100, 200, 50, 1)
    reservation.first_token(1.0)
    reservation.first_token(1.1)
    assert load_book.totals() == LoadTotals(0, 200, 50, 1)
    reservation.end(2.0)
    reservation.end(2.1)
    reservation.first_token(2.2)
    assert load_book.totals() == ZERO


def test_an_end_without_a_first_token_releases_everything() -> None:
    load_book = LoadBook()
    reserve(load_book).end(1.0)
    assert load_book.totals() == ZERO
    assert load_book.load(A, 1.0).queued_tokens == 0


def test_queued_tokens_fall_at_the_prefill_rate_but_not_below_those_behind_the_oldest_prompt() -> None:
    load_book = LoadBook()
    first, second = reserve(load_book, tokens=1000), reserve(load_book, tokens=600)
    assert load_book.load(A, 0.0, 100.0).queued_tokens == 1600
    assert load_book.load(A, 4.0, 100.0).queued_tokens == 1200
    assert load_book.load(A, 60.0, 100.0).queued_tokens == 600, (
        "slower than estimated: the first prompt is still not done"
    )
    first.first_token(61.0)
    assert load_book.load(A, 61.0, 100.0).queued_tokens == 600
    second.first_token(61.0)
    assert load_book.load(A, 61.0, 100.0).queued_tokens == 0, "faster than estimated"


def test_recent_work_halves_after_the_half_life() -> None:
    load_book = LoadBook(recent_half_life_s=10.0)
    reserve(load_book).end(0.0)
    assert load_book.load(A, 10.0).recent_requests == pytest.approx(0.5)
    assert load_book.load(A, 20.0).recent_tokens == pytest.approx(25.0)


def test_a_new_worker_starts_with_the_mean_of_recent_work() -> None:
    load_book = LoadBook()
    for _ in range(8):
        reserve(load_book).end(0.0)
    assert load_book.load(B, 0.0).recent_requests == 8


def test_a_worker_that_left_is_forgotten_with_its_last_reservation() -> None:
    load_book = LoadBook()
    reservation = reserve(load_book)
    load_book.forget(A)
    assert load_book.totals().requests == 1
    reservation.end(1.0)
    assert load_book.totals() == ZERO
    reserve(load_book, B)
    assert load_book.load(A, 1.0).requests == 0


@given(st.lists(st.tuples(st.sampled_from(["reserve", "first", "end", "forget"]), st.integers(0, 5)), max_size=60))
def test_no_sequence_of_calls_leaks_load(steps: list[tuple[str, int]]) -> None:
    load_book, reservations, now = LoadBook(), [], 0.0
    for act, number in steps:
        now += 0.5
        worker_id = WorkerId(f"w{number % 2}")
        if act == "reserve":
            reservations.append(reserve(load_book, worker_id, tokens=number * 10, now=now))
        elif act == "forget":
            load_book.forget(worker_id)
        elif reservations:
            reservation = reservations[number % len(reservations)]
            reservation.first_token(now) if act == "first" else reservation.end(now)
        for name in ("w0", "w1"):
            load = load_book.load(WorkerId(name), now, 7.0)
            assert 0 <= load.queued_tokens <= load.prefill_tokens
    for reservation in reservations:
        reservation.end(now)
    assert load_book.totals() == ZERO


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 2), st.integers(0, 500)), max_size=40))
def test_the_loads_of_all_members_are_those_of_single_reads(steps: list[tuple[int, float, int]]) -> None:
    fleet, now = Fleet(), 0.0
    members = [fleet.add(WorkerSpec(worker_id=WorkerId(f"w{i}"), url=""), 0.0) for i in range(4)]
    together, single = LoadBook(), LoadBook()
    for worker, pause_s, tokens in steps:
        now += pause_s
        for book in (together, single):
            reserve(book, members[worker].worker_id, tokens, now)
        expected = [single.load(one.worker_id, now, one.tokens_per_s) for one in members]
        for load, other in zip(together.loads(members, now), expected, strict=True):
            for name in ("queued_tokens", "recent_requests", "recent_tokens", "recent_returns", "mean_queued_tokens"):
                assert getattr(load, name) == getattr(other, name)
