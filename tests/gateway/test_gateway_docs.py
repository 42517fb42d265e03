"""docs/gateway.md names every setting and every metric that there is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from stoker.gateway.config import GatewayConfig
from stoker.gateway.records.metrics import GatewayMetrics

TEXT = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
INTERNAL = {"meter.default_path"}  # the command line's, not the file's


def names() -> list[str]:
    found = []
    for name, kind in get_type_hints(GatewayConfig).items():
        if dataclasses.is_dataclass(kind):
            found += [f"{name}.{field.name}" for field in dataclasses.fields(kind)]
        else:
            found.append(name)
    return [name for name in found if name not in INTERNAL and name != "routing.cost"]


@pytest.mark.parametrize("name", names())
def test_every_setting_is_documented(name: str) -> None:
    assert f"`{name}`" in TEXT or f"`[[{name}]]`" in TEXT


def test_every_metric_is_documented() -> None:
    shown = re.findall(r"^# TYPE (\S+)", GatewayMetrics().render().decode(), re.MULTILINE)
    assert [name for name in shown if name not in TEXT] == []
