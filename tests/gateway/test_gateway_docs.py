"""docs/observability.md names every metric. docs/settings.md, which is generated, has every setting."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.gateway.records.metrics import GatewayMetrics

TEXT = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")


def test_every_metric_is_documented() -> None:
    shown = re.findall(r"^# TYPE (\S+)", GatewayMetrics().render().decode(), re.MULTILINE)
    assert [name for name in shown if name not in TEXT] == []
