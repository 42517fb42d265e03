"""The load view of a gateway holds the work of all gateways, whatever reports are missed, and returns to zero."""

from __future__ import annotations

import random

from stoker.base.ids import WorkerId
from stoker.fleet.load_book import LoadBook, LoadTotals
from stoker.gateway.watch.other_work import OtherWork
from stoker.proto.work import WorkChange, read_work_header, work_header
from stoker.worker.open_work import AcceptedWork, OpenWork

WORKER = WorkerId("w:1")
NOTHING = LoadTotals(0, 0, 0, 0)


def test_requests_of_other_gateways_are_reserved_until_they_end() -> None:
    book = LoadBook()
    view = OtherWork(book, "g1")
    work = OpenWork()
    work.publish = lambda change: view.saw(WORKER, [change], None, 1.0)
    mine = work.accept(work_header("g1", 50, 10), 100, 20)
    assert book.totals() == NOTHING  # this gateway has reserved it itself
    theirs = work.accept(work_header("g2", 50, 10), 100, 20)
    direct = work.accept(None, 30, 5)
    assert book.totals() == LoadTotals(80, 130, 15, 2)
    theirs.first_token()
    assert book.totals() == LoadTotals(30, 130, 15, 2)
    for one in (mine, theirs, theirs, direct):
        one.end()
    assert book.totals() == NOTHING
    assert work.snapshot() == []


def test_a_gateway_that_misses_reports_agrees_after_the_next_list() -> None:
    """Reports are lost at random; seed 2."""
    rng = random.Random(2)
    book = LoadBook()
    view, work, now = OtherWork(book, "g1"), OpenWork(), 0.0

    def publish(change: WorkChange) -> None:
        if rng.random() < 0.5:
            view.saw(WORKER, [change], None, now)

    work.publish = publish
    running: list[AcceptedWork] = []
    for _ in range(400):
        now += 0.01
        running.append(work.accept(work_header("g2", rng.randrange(1000), 5), 1000, 5))
        if rng.random() < 0.8:
            rng.choice(running).first_token()
        if rng.random() < 0.9:
            running.pop(rng.randrange(len(running))).end()
        if rng.random() < 0.1:
            view.saw(WORKER, (), work.snapshot(), now)
            assert book.totals().requests == len(running)
    view.forget(WORKER, now)
    assert book.totals() == NOTHING


def test_a_worker_cannot_fill_the_book_without_bound() -> None:
    book = LoadBook()
    view = OtherWork(book, "g1")
    view.saw(WORKER, (WorkChange(n, "accept", "g2", -5, 1 << 60, 1) for n in range(20_000)), None, 0.0)
    assert view.num_open == 8192
    assert book.totals().prefill_tokens == 0


def test_headers_that_are_not_valid_are_ignored() -> None:
    assert read_work_header("host.x:12:ab;5;7") == ("host.x:12:ab", 5, 7, False)
    assert read_work_header(work_header("g", 5, 7, is_flex=True)) == ("g", 5, 7, True)
    for text in (None, "", "a;b;c", "a;1", "a b;1;2", "a;-1;2", "a;999999999;1", "x" * 97 + ";1;2", "a;1;2\n"):
        assert read_work_header(text) is None
