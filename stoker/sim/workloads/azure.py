"""Azure's public traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. No prompt shares text with another."""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stoker.base.errors import ConfigError
from stoker.sim.workloads.trace_file import check_order, length_field, output_field
from stoker.sim.workloads.workload import SimSession, SimTurn

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FRACTION = re.compile(r"(\.\d{6})\d*")
_UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)
_FIRST_OUTPUT = 1 << 31


@dataclass(frozen=True, slots=True)
class AzureTrace:
    """One request for each row, from the time of the first row on."""

    path: Path
    max_requests: int | None = None
    speedup: float = 1.0

    def sessions(self) -> Iterator[SimSession]:
        first_s: float | None = None
        last_s = 0.0
        for number, (where, row) in enumerate(self._rows()):
            if self.max_requests is not None and number >= self.max_requests:
                return
            time_s = _seconds(row["TIMESTAMP"], where)
            first_s = time_s if first_s is None else first_s
            check_order(time_s - first_s, last_s, where, "TIMESTAMP")
            last_s = time_s - first_s
            lengths = {name: _number(row[name], name, where) for name in _COLUMNS[1:]}
            num_tokens, output_tokens = (
                length_field(lengths, _COLUMNS[1], where),
                output_field(lengths, _COLUMNS[2], where),
            )
            turn = SimTurn(((1 + number, num_tokens),), output_tokens, _FIRST_OUTPUT + number)
            yield SimSession(last_s / self.speedup, iter((turn,)))

    def _rows(self) -> Iterator[tuple[str, dict[str, str]]]:
        if not os.path.isfile(self.path):
            raise ConfigError(f"no file {self.path}")
        try:
            with gzip.open(self.path, "rb") if self.path.suffix == ".gz" else self.path.open("rb") as raw:
                reader = csv.DictReader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
                missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
                if missing:
                    raise ConfigError(f"{self.path}, line 1: the columns {', '.join(missing)} are missing")
                for row in reader:
                    yield f"{self.path}, line {reader.line_num}", row
        except _UNREADABLE as wrong:
            raise ConfigError(f"{self.path}: cannot be read: {wrong}") from wrong

    def describe(self) -> dict[str, object]:
        return {"workload": "azure", "file": self.path.name, "speedup": self.speedup, "requests": self.max_requests}


def _seconds(text: str | None, where: str) -> float:
    try:
        return datetime.fromisoformat(_FRACTION.sub(r"\1", text or "")).timestamp()
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP={text!r}: must be a date and a time") from None


def _number(text: str | None, name: str, where: str) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{where}: {name}={text!r}: must be a whole number") from None
