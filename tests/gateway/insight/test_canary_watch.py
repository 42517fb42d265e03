"""The gateway stops a canary that is worse than the rest: it gets no more requests, and the numbers are kept."""

from __future__ import annotations

from stoker.base.canary import CanaryLimits
from stoker.gateway.insight.canary_watch import CanaryShare, CanaryWatch
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.records.usage_row import UsageRow


def row(
    model: str,
    status: int = 200,
    ttft_ms: float | None = 100.0,
    e2e_ms: float | None = None,
    time_s: float = 0.0,
    worker: str = "w:1",
    error: str | None = None,
) -> UsageRow:
    return UsageRow(
        request_id="r",
        time_s=time_s,
        key_id="",
        tenant="",
        model=model,
        session=None,
        worker=worker,
        endpoint="chat",
        status=status,
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=11,
        ttft_ms=ttft_ms,
        e2e_ms=(ttft_ms or 0.0) + 200.0 if e2e_ms is None else e2e_ms,
        error=error,
    )


def watched() -> tuple[ModelAliases, CanaryWatch]:
    aliases = ModelAliases({"chat": "old"}, {"chat": ("new", 0.5)})
    shares = {"chat": CanaryShare("new", aliases.without_canary("chat"), 0.5)}
    return aliases, CanaryWatch(shares, CanaryLimits(), aliases.stop_canary)


def test_the_rest_of_a_name_is_what_it_stands_for_otherwise() -> None:
    assert ModelAliases({"chat": "old"}, {"chat": ("new", 0.5)}).without_canary("chat") == "old"
    assert ModelAliases({}, {"old": ("new", 0.5)}).without_canary("old") == "old"


def test_a_canary_whose_requests_fail_gets_no_more() -> None:
    aliases, watch = watched()
    served = {"old", "new"}
    assert aliases.resolve("chat", served, place=0.1) == "new"
    for number in range(100):
        watch.ended("chat", row("old"))
        watch.ended("chat", row("new", status=502 if number % 3 == 0 else 200))
        watch.judge()
    assert aliases.resolve("chat", served, place=0.1) == "old"
    (shown,) = watch.report().canaries
    assert shown.stopped
    assert shown.numbers["canary_failed"] >= 15
    assert shown.numbers["rest_failed"] == 0


def test_a_good_canary_keeps_its_share() -> None:
    aliases, watch = watched()
    for number in range(200):
        watch.ended("chat", row("old", ttft_ms=100.0 + number % 7))
        watch.ended("chat", row("new", ttft_ms=104.0 + number % 5))
        watch.ended("chat", row("other", status=500))
        watch.judge()
    assert aliases.resolve("chat", {"old", "new"}, place=0.1) == "new"
    (shown,) = watch.report().canaries
    assert (shown.stopped, shown.reason) == (False, "as good as the rest")


def test_refusals_of_clients_do_not_count_as_failures() -> None:
    _, watch = watched()
    for _ in range(200):
        watch.ended("chat", row("old"))
        watch.ended("chat", row("new", status=400))
        watch.ended("chat", row("new", status=499))
        watch.judge()
    assert not watch.report().canaries[0].stopped


def test_a_canary_whose_streams_break_or_hang_is_stopped() -> None:
    broken = row("new", error="worker_lost")  # its status was sent before
    hanging = row("new", status=499, ttft_ms=None, e2e_ms=30_000.0)  # the client gave up
    for bad, reason in ((broken, "requests failed"), (hanging, "time to the first token")):
        _, watch = watched()
        for number in range(200):
            watch.ended("chat", row("old"))
            watch.ended("chat", bad if number % 4 == 0 else row("new"))
            watch.judge()
        (shown,) = watch.report().canaries
        assert shown.stopped
        assert reason in shown.reason


def test_only_requests_of_the_name_that_reached_a_worker_count() -> None:
    """Otherwise a client could stop a canary: by naming its model, or by filling a queue."""
    _, watch = watched()
    for _ in range(200):
        watch.ended("chat", row("old"))
        watch.ended("chat", row("new"))
        watch.ended("new", row("new", status=500))
        watch.ended("chat", row("new", status=503, worker=""))
        watch.ended(None, row("new", status=500))
        watch.judge()
    (shown,) = watch.report().canaries
    assert (shown.stopped, shown.reason) == (False, "as good as the rest")


def test_an_incident_that_both_had_stops_no_canary() -> None:
    """The canary's requests reach further back than those of the rest, which has many more."""
    shares = {"chat": CanaryShare("new", "old", 0.05)}
    stopped: list[str] = []
    watch = CanaryWatch(shares, CanaryLimits(), stopped.append)
    for number in range(60_000):  # 10 per second, and an outage of both from 1,000 s to 1,100 s
        time_s = number / 10
        status = 500 if 1000 <= time_s < 1100 and number % 2 else 200
        watch.ended("chat", row("new" if number % 20 in (0, 7) and number % 40 < 20 else "old", status, time_s=time_s))
        if number % 10 == 0:
            watch.judge()
    assert stopped == []
    (shown,) = watch.report().canaries
    assert shown.reason == "as good as the rest"


def test_a_bad_canary_with_a_small_share_is_stopped() -> None:
    shares = {"chat": CanaryShare("new", "old", 0.01)}
    stopped: list[str] = []
    watch = CanaryWatch(shares, CanaryLimits(), stopped.append)
    for number in range(60_000):
        is_new = number % 100 == 0
        watch.ended(
            "chat", row("new" if is_new else "old", 500 if is_new and number % 300 == 0 else 200, time_s=number / 10)
        )
        if number % 10 == 0:
            watch.judge()
    assert stopped == ["chat"]
