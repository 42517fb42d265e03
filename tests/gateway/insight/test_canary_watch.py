"""The gateway stops a canary that is worse than the rest: it gets no more requests, and the numbers are kept."""

from __future__ import annotations

from stoker.base.canary import CanaryLimits
from stoker.gateway.insight.canary_watch import CanaryShare, CanaryWatch
from stoker.gateway.path.model_aliases import ModelAliases
from stoker.gateway.records.usage_row import UsageRow


def row(model: str, status: int = 200, ttft_ms: float = 100.0) -> UsageRow:
    return UsageRow(
        request_id="r",
        time_s=0.0,
        key_id="",
        tenant="",
        model=model,
        session=None,
        worker="w:1",
        endpoint="chat",
        status=status,
        prompt_tokens=10,
        cached_tokens=0,
        completion_tokens=11,
        ttft_ms=ttft_ms,
        e2e_ms=ttft_ms + 200.0,
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
        watch.ended(row("old"))
        watch.ended(row("new", status=502 if number % 3 == 0 else 200))
        watch.judge()
    assert aliases.resolve("chat", served, place=0.1) == "old"
    (shown,) = watch.report().canaries
    assert shown.stopped
    assert shown.numbers["canary_failed"] >= 15
    assert shown.numbers["rest_failed"] == 0


def test_a_good_canary_keeps_its_share() -> None:
    aliases, watch = watched()
    for number in range(200):
        watch.ended(row("old", ttft_ms=100.0 + number % 7))
        watch.ended(row("new", ttft_ms=104.0 + number % 5))
        watch.ended(row("other", status=500))
        watch.judge()
    assert aliases.resolve("chat", {"old", "new"}, place=0.1) == "new"
    (shown,) = watch.report().canaries
    assert (shown.stopped, shown.reason) == (False, "as good as the rest")


def test_refusals_of_clients_do_not_count_as_failures() -> None:
    _, watch = watched()
    for _ in range(200):
        watch.ended(row("old"))
        watch.ended(row("new", status=400))
        watch.ended(row("new", status=499))
        watch.judge()
    assert not watch.report().canaries[0].stopped
