"""The metrics of tiers: `stoker status` reads every value that a worker writes."""

from __future__ import annotations

import msgspec

from stoker.proto.messages import EngineStats, TierReport
from stoker.proto.tier_metrics import TIER_METRICS, read_tier_metrics
from stoker.worker.metrics import WorkerMetrics


def numbered(kind: type[msgspec.Struct]) -> dict[str, int]:
    """Return a different number for each field that has no default."""
    fields = [field.name for field in msgspec.structs.fields(kind) if field.required]
    return {name: number for number, name in enumerate(fields, 1)}


def test_every_value_that_a_worker_writes_is_read() -> None:
    tier = msgspec.convert(numbered(TierReport) | {"name": "disk", "medium": "DISK"}, TierReport)
    stats = msgspec.convert(numbered(EngineStats) | {"tiers": [tier]}, EngineStats)
    metrics = WorkerMetrics(lambda: "m", lambda: stats, lambda: True, lambda: 0, lambda: 0)
    read = read_tier_metrics(metrics.render().decode())
    assert read == {"disk": {metric.name: getattr(tier, metric.field) for metric in TIER_METRICS}}


def test_a_value_that_is_not_known_is_left_out() -> None:
    tier = msgspec.convert(numbered(TierReport) | {"name": "disk", "medium": "DISK", "bytes_per_s": None}, TierReport)
    stats = msgspec.convert(numbered(EngineStats) | {"tiers": [tier]}, EngineStats)
    metrics = WorkerMetrics(lambda: "m", lambda: stats, lambda: True, lambda: 0, lambda: 0)
    assert "read_bytes_per_second" not in read_tier_metrics(metrics.render().decode())["disk"]


def test_what_is_no_number_is_left_out() -> None:
    page = "".join(
        f'stoker_kv_tier_{name}{{tier="disk"}} {value}\n'
        for name, value in (("blocks", "many"), ("hits_total", "NaN"), ("misses_total", "+Inf"), ("errors_total", "2"))
    )
    assert read_tier_metrics(page) == {"disk": {"errors": 2.0}}
