"""The gateway's metrics: Prometheus can parse them, and they count what happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from stoker.gateway.records.metrics import GatewayMetrics, Histogram
from stoker.gateway.records.usage_row import UsageRow

ROW = UsageRow(
    "r", 1000.0, "key", "tenant", "m", None, "w:1", "chat", 200, 100, 60, 7, 120.0, 800.0, queued_ms=30.0
)  # fmt: skip


def read(metrics: GatewayMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_an_idle_gateway_can_be_scraped() -> None:
    found = read(GatewayMetrics())
    assert found["stoker_gateway_ttft_seconds_count", ()] == 0


def test_what_ended_is_counted() -> None:
    metrics = GatewayMetrics()
    metrics.ended(ROW)
    metrics.ended(ROW)
    found = read(metrics)
    assert found["stoker_gateway_requests_total", (("endpoint", "chat"), ("status", "200"))] == 2
    assert found["stoker_gateway_prompt_tokens_total", (("model", "m"),)] == 200
    assert found["stoker_gateway_cached_tokens_total", (("model", "m"),)] == 120
    assert found["stoker_gateway_completion_tokens_total", (("model", "m"),)] == 14
    assert found["stoker_gateway_ttft_seconds_sum", ()] == 0.24
    assert found["stoker_gateway_ttft_seconds_bucket", (("le", "0.1"),)] == 0
    assert found["stoker_gateway_ttft_seconds_bucket", (("le", "0.15"),)] == 2
    assert found["stoker_gateway_ttft_seconds_bucket", (("le", "+Inf"),)] == 2
    assert found["stoker_gateway_queue_seconds_count", ()] == 2


def test_a_value_on_a_bound_is_in_its_bucket_and_counting_early_changes_nothing() -> None:
    values = [0.5, 1.0, 1.0, 0.01, 2.0, 2.5, 99.0]
    together, one_by_one = Histogram((0.5, 1.0, 2.0)), Histogram((0.5, 1.0, 2.0))
    for value in values:
        together.observe(value)
        one_by_one.observe(value)
        one_by_one.count()
    lines = list(together.lines("h"))
    assert lines[:4] == [f'h_bucket{{le="{bound}"}} {n}' for bound, n in (("0.5", 2), ("1", 4), ("2", 5), ("+Inf", 7))]
    assert lines[4:] == ["h_sum 106.01", "h_count 7"]
    assert list(one_by_one.lines("h")) == lines


def test_names_that_clients_invent_do_not_become_labels() -> None:
    metrics = GatewayMetrics()
    for number in range(100):
        metrics.ended(UsageRow(f"r{number}", 0, "k", "t", f"m{number}", None, "", "chat", 404, 0, 0, 0, None, 1.0))
    assert b'model="m' not in metrics.render()
    assert read(metrics)["stoker_gateway_requests_total", (("endpoint", "chat"), ("status", "404"))] == 100


def test_counters_by_label_and_gauges_of_others() -> None:
    metrics = GatewayMetrics()
    metrics.retries["connect"] += 2
    metrics.upstream["w:1", "lost"] += 1
    metrics.bad_requests['odd "reason"\\\n'] += 1
    waiting = 3
    metrics.gauge("stoker_gateway_waiting_requests", "Waiting", lambda: waiting)
    metrics.gauges("stoker_gateway_worker_usable", "Usable", lambda: [((("worker", "w:1"),), 1.0)])
    found = read(metrics)
    assert found["stoker_gateway_retries_total", (("reason", "connect"),)] == 2
    assert found["stoker_gateway_worker_failures_total", (("kind", "lost"), ("worker", "w:1"))] == 1
    assert found["stoker_gateway_bad_requests_total", (("reason", 'odd "reason"\\\n'),)] == 1
    assert found["stoker_gateway_waiting_requests", ()] == 3
    assert found["stoker_gateway_worker_usable", (("worker", "w:1"),)] == 1


def test_every_metric_family_has_help_and_type() -> None:
    lines = GatewayMetrics().render().decode().splitlines()
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert typed == helped
    assert len(set(typed)) == len(typed)
