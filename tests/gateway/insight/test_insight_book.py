"""What the dashboard is told about ended requests: series, tiers, parts of the time to the first token, sessions, costs."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.prefix_index import Match
from stoker.fleet.spec import WorkerSpec
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.insight.bottleneck import bottleneck
from stoker.gateway.insight.canary_watch import no_canaries
from stoker.gateway.insight.insight_book import InsightBook
from stoker.gateway.insight.latency_goals import LatencyGoals
from stoker.gateway.insight.request_digest import RequestTimes, tier_tokens
from stoker.gateway.insight.series_columns import GAUGES
from stoker.gateway.key_settings import PriceSettings
from stoker.gateway.records.metrics import GatewayMetrics
from stoker.gateway.records.usage_row import UsageRow
from stoker.routing.query import Route, RouteQuery
from stoker.routing.router import PrefixIndexes, Router

PRICES = PriceList([PriceSettings(model="m", input=2.0, cached_input=0.5, output=8.0)])


def row(number: int = 1, **changes: Any) -> UsageRow:
    given = {
        "request_id": f"req_{number}", "time_s": 1000.0, "key_id": "alice", "tenant": "t", "model": "m", "session": "t:s",
        "worker": "w:1", "endpoint": "chat", "status": 200, "prompt_tokens": 1000, "cached_tokens": 600,
        "completion_tokens": 11, "ttft_ms": 100.0, "e2e_ms": 600.0, "queued_ms": 20.0, "x_request_id": f"client-{number}",
    }  # fmt: skip
    return UsageRow(**(given | changes))


def route(tokens_per_s: float = 10_000.0) -> tuple[Route, RouteQuery]:
    fleet = Fleet()
    member = fleet.add(WorkerSpec(worker_id=WorkerId("w:1"), url="http://w:1", models=("m",)), 0.0)
    query = RouteQuery(model="m", keys=[1, 2], block_tokens=16, num_tokens=40, session="t:s", parent_session="t:p")
    found = Router(fleet, LoadBook(), PrefixIndexes()).route(query, 0.0)
    member.tokens_per_s = tokens_per_s
    return found, query


class Book(InsightBook):
    def __init__(self, **gauges: float) -> None:
        self.metrics = GatewayMetrics()
        values = [gauges.get(name, 0.0) for name in GAUGES]
        goals = LatencyGoals(ttft_ms=500, itl_ms=60)
        super().__init__(self.metrics, PRICES, goals, lambda: values, no_canaries(), has_prices=True)

    def end(self, row: UsageRow, times: RequestTimes | None = None) -> None:
        chosen, query = route()
        self.metrics.ended(row)
        self.ended(row, chosen, query, times or RequestTimes(0.0, 0.05, None, 0.1), 0)


def test_a_second_has_the_requests_that_ended_in_it() -> None:
    book = Book(running_requests=3, kv_used=0.5)
    book.tick(999.0)
    for number in range(4):
        book.end(row(number))
    book.tick(1000.0)
    book.tick(1001.0)
    shown = book.series(1, 3)
    assert shown.times_s == [999.0, 1000.0, 1001.0]
    columns = shown.columns
    assert columns["requests_per_s"] == [0, 4, 0]
    assert columns["hit_ratio"] == [None, 0.6, None]
    assert columns["goodput_per_s"] == [0, 4, 0]
    assert columns["running_requests"] == [3, 3, 3]
    ttft = columns["ttft_p50_ms"]
    assert ttft[0] is None
    assert ttft[1] is not None
    assert 80 <= ttft[1] <= 100
    # 400 uncached tokens cost 2.0 per million, 600 cached ones 0.5, and 11 generated ones 8.0.
    assert columns["cost"][1] == pytest.approx(4 * (400 * 2 + 600 * 0.5 + 11 * 8) * 1e-6)
    assert columns["saved"][1] == pytest.approx(4 * 600 * 1.5e-6)


def test_the_parts_of_the_first_token_add_up() -> None:
    book = Book()
    book.end(row())
    [ended] = book.requests(1)
    queue, gateway, wait, prefill, transfer = ended.parts_ms
    assert (queue, gateway, transfer) == (20.0, pytest.approx(30.0), 0.0)
    assert prefill == pytest.approx(40.0)  # 400 uncached tokens at 10,000 per second
    assert wait == pytest.approx(10.0)
    book.tick(1.0)
    assert sum(book.metrics.ttft_parts_s.values()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"ttft_ms": 501.0, "e2e_ms": 900.0}, False),
        ({"e2e_ms": 1000.0}, False),  # 90 ms between tokens
        ({"status": 500}, False),
        ({"error": "worker_lost"}, False),
        ({"ttft_ms": None, "status": 499}, False),
        ({"completion_tokens": 1, "e2e_ms": 100.0}, True),
    ],
)
def test_goodput_counts_requests_within_both_goals(changes: dict[str, Any], good: bool) -> None:
    book = Book()
    book.end(row(**changes))
    assert book.requests(1)[0].is_good is good


@pytest.mark.parametrize(("e2e_ms", "good"), [(1000.0, True), (1200.0, False)])
def test_an_answer_that_is_not_streamed_may_take_the_sum_of_both_goals(e2e_ms: float, good: bool) -> None:
    book = Book()
    book.end(row(ttft_ms=e2e_ms, e2e_ms=e2e_ms), RequestTimes(0.0, 0.05, None, 1.0, streams=False))
    [ended] = book.requests(1)
    assert ended.is_good is good
    assert ended.parts_ms == ()


@pytest.mark.parametrize(
    ("match", "cached", "expected"),
    [
        (Match(2, 3, 4), 144, (32, 48, 64)),
        (Match(2, 3, 4), 40, (32, 8, 0)),
        (Match(2, 3, 4), 200, (88, 48, 64)),  # more than the gateway knew of
        (Match(0, 0, 4), 16, (0, 0, 16)),
        (Match(9, 0, 0), 16, (16, 0, 0)),
        (None, 16, (16, 0, 0)),
    ],
)
def test_cached_tokens_are_split_by_tier(match: Match | None, cached: int, expected: tuple[int, ...]) -> None:
    chosen, query = route()
    chosen.matches = {} if match is None else {WorkerId("w:1"): match}
    assert tier_tokens(cached, chosen, query.block_tokens) == expected


def test_requests_are_found_by_both_ids_and_only_the_latest_are_kept() -> None:
    book = Book()
    for number in range(1500):
        book.end(row(number))
    assert len(book.requests(5000)) == 1000
    assert [one.row.request_id for one in book.requests(2)] == ["req_1499", "req_1498"]
    found = book.request("client-1400")
    assert found is not None
    assert found is book.request("req_1400")
    assert found.as_dict(with_candidates=True)["candidates"][0]["worker"] == "w:1"  # type: ignore[index]
    assert book.request("req_3") is None


def test_sessions_have_their_parents_turns_and_costs_and_are_bounded() -> None:
    book = Book()
    for number in range(30):
        book.end(row(number, misses="changed[message 3]=400"))
    [session] = book_sessions(book)
    assert (session["session"], session["parent"], session["requests"]) == ("t:s", "t:p", 30)
    assert len(session["turns"]) == 24
    assert session["turns"][-1]["misses"] == "changed[message 3]=400"
    assert float(session["cost"]) == pytest.approx(30 * (400 * 2 + 600 * 0.5 + 11 * 8) * 1e-6)
    for number in range(600):
        book.end(row(number, session=f"t:{number}"))
    assert len(book_sessions(book)) == 512
    assert book_sessions(book)[0]["session"] == "t:599"


def book_sessions(book: Book) -> list[Any]:
    book.requests(0)
    return book.sessions.report(1000)


def test_requests_without_a_worker_or_route_are_counted() -> None:
    book = Book()
    book.ended(
        row(worker="", status=503, prompt_tokens=0, ttft_ms=None, error="queue_full"), None, None, RequestTimes(0.0), 0
    )
    book.metrics.refusals["queue_full"] += 1
    book.tick(5.0)
    values = book.series(1, 1).columns
    assert (values["requests_per_s"], values["refused_per_s"], values["failed_per_s"]) == ([1], [1], [0])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "No worker is connected"),
        ({"workers": 1}, "The only worker cannot take a request"),
        ({"workers": 2}, "None of the 2 workers can"),
        ({"workers": 2, "usable_workers": 2}, "Idle"),
        ({"workers": 2, "usable_workers": 2, "running_requests": 3}, "3 requests are running"),
        ({"requests_per_s": 8, "refused_per_s": 2}, "20% of the requests are refused"),
        (
            {"requests_per_s": 8, "ttft_queue_ms": 900, "ttft_prefill_ms": 100},
            "The gateway's queue: requests wait 900 ms",
        ),
        ({"requests_per_s": 8, "kv_used_max": 0.99, "running_sequences": 4}, "KV memory"),
        ({"requests_per_s": 8, "backlog_s": 4, "backlog_tokens": 40_000}, "Prefill: 40k prompt tokens wait"),
        ({"requests_per_s": 8, "itl_p95_ms": 300}, "Decode"),
        ({"requests_per_s": 8, "prompt_tokens_per_s": 100, "evicted_tokens_per_s": 50}, "Evictions: 50%"),
        ({"requests_per_s": 8, "ttft_p95_ms": 3000, "ttft_worker_wait_ms": 900}, "mostly the workers' queues"),
        ({"requests_per_s": 8, "ttft_p95_ms": 300, "itl_p95_ms": 20}, "No bottleneck"),
    ],
)
def test_the_bottleneck_is_named(values: dict[str, float], word: str) -> None:
    shown = dict(Book().now().values) | {"workers": 0.0, "usable_workers": 0.0}
    if "requests_per_s" in values:
        shown |= {"workers": 1.0, "usable_workers": 1.0}
    assert word in bottleneck(shown | values, LatencyGoals())
