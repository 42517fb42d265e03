"""Saved results: bench/results/<benchmark>.json holds a list of records. Standard library only."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.contract import ROOT, BenchmarkError, Better, Comparison, Result, names_by_group

FOLDER = ROOT / "bench" / "results"


@dataclass(frozen=True)
class SavedRecord:
    """One result with the circumstances it was measured under."""

    benchmark: str
    case: str
    metric: str
    unit: str
    better: Better
    value: float
    competitor: str
    competitor_value: float | None
    comparison: Comparison
    ratio: float | None
    machine: str
    date: str
    command: str
    notes: str
    target: float | None = None  # the least ratio that is asked for

    @property
    def margin(self) -> float:
        """The ratio relative to its target: below 1 the target is missed. Infinite without a target."""
        return float("inf") if self.target is None or self.ratio is None else self.ratio / self.target

    @property
    def key(self) -> tuple[str, str, str, str]:
        """A record replaces an older one with the same key."""
        return self.benchmark, self.case, self.metric, self.competitor


def to_record(benchmark: str, result: Result, machine: str, date: str, command: str) -> SavedRecord:
    ratio = None if result.ratio is None else round(result.ratio, 4)
    fields = {name: value for name, value in asdict(result).items() if name != "notes"}
    return SavedRecord(
        benchmark=benchmark, ratio=ratio, machine=machine, date=date, command=command, notes=result.notes, **fields
    )


def path_of(benchmark: str, folder: Path | None = None) -> Path:
    return (folder or FOLDER) / f"{benchmark}.json"


def read(path: Path) -> list[SavedRecord]:
    return [SavedRecord(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def read_file(path: Path) -> list[SavedRecord]:
    """The records of a file that may be missing, or that another program may have written."""
    try:
        return read(path) if path.exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise BenchmarkError(f"{path}: not a file of results, as --save writes it: {error}") from error


def read_all(folder: Path = FOLDER) -> dict[str, list[SavedRecord]]:
    """The records of each benchmark, by its name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}


def write(path: Path, records: Sequence[SavedRecord]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(asdict(record), indent=1) for record in records)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    return path


def save(benchmark: str, found: Sequence[Result], machine: str, command: str, folder: Path | None = None) -> Path:
    """Add the results to the benchmark's file. A record with the same key is replaced in its place."""
    date = datetime.date.today().isoformat()
    return add([to_record(benchmark, result, machine, date, command) for result in found], path_of(benchmark, folder))


def add(new: Sequence[SavedRecord], path: Path) -> Path:
    records = {record.key: record for record in read_file(path)}
    return write(path, list((records | {record.key: record for record in new}).values()))


def merge(files: Sequence[Path]) -> list[Path]:
    """Add the records of result files that were written on another machine; return the files that changed."""
    known = {name for names in names_by_group().values() for name in names}
    changed = {}
    for file in files:
        found = read_file(file)
        if not found:
            raise BenchmarkError(f"{file}: there are no results in it")
        if unknown := {record.benchmark for record in found} - known:
            raise BenchmarkError(f"{file}: there is no benchmark {min(unknown)!r}; `python -m bench` lists them")
        for benchmark in dict.fromkeys(record.benchmark for record in found):
            path = add([record for record in found if record.benchmark == benchmark], path_of(benchmark))
            changed[path] = path
    return list(changed)
