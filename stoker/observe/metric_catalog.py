"""The metrics of a `/metrics` page: name, kind and help of each family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from stoker.base.errors import ConfigError

Kind = Literal["counter", "gauge", "histogram"]

_LINE = re.compile(r"# (HELP|TYPE) (\w+) (.*)")
_NAME = re.compile(r"\bstoker_\w+")
_PARTS: Mapping[str, tuple[str, ...]] = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric of a page. The name of a counter ends in `_total`."""

    name: str
    kind: Kind
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of its time series."""
        return tuple(self.name + part for part in _PARTS[self.kind])


def read_families(page: str) -> list[MetricFamily]:
    """Return the families of a page in Prometheus text format that are Stoker's, in the order of the page."""
    helps: dict[str, str] = {}
    found: list[MetricFamily] = []
    for line in page.splitlines():
        if (match := _LINE.match(line)) is None or not match[2].startswith("stoker_"):
            continue
        if match[1] == "HELP":
            helps[match[2]] = match[3]
        elif match[3] in ("counter", "gauge", "histogram") and not match[2].endswith("_created"):
            found.append(MetricFamily(match[2], match[3], helps.get(match[2], "")))  # type: ignore[arg-type]
    return found


def check_expressions(expressions: Iterable[str], families: Iterable[MetricFamily]) -> None:
    """Raise ConfigError if an expression names a metric that the code does not export."""
    known = {series for family in families for series in family.series}
    for expression in expressions:
        for name in _NAME.findall(expression):
            if name not in known:
                raise ConfigError(f"no metric is called {name}, which is used in: {expression}")
