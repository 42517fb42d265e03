"""The gateway's metrics: Prometheus can read them, and they say what happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from stoker.gateway.records.metrics import GatewayMetrics
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


def test_every_family_says_what_it_is() -> None:
    lines = GatewayMetrics().render().decode().splitlines()
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert typed == helped
    assert len(set(typed)) == len(typed)
