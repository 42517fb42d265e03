"""What a benchmark is, and how the runner finds it. Standard library only.

A benchmark is one file in bench/engine, bench/gateway, bench/kv or bench/faults. It defines:

    NAME             the file's name without .py; unique in the project
    HELP             one line that says what is measured
    NEEDS            a Needs: GPU, Python packages, files of the data folder, other programs
    add_arguments    add_arguments(parser) adds the options of this benchmark
    run              run(args) -> Report

The file must be importable without any third-party package, so that `--help` works everywhere: import torch, aiohttp
and the like inside functions. Larger measuring code may live in a module whose name starts with an underscore; the
runner ignores such files, and `run` imports it.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]  # of the repository
GROUPS = ("engine", "gateway", "kv", "faults")

Better = Literal["lower", "higher"]
Comparison = Literal["competitor", "baseline"]


class BenchmarkError(Exception):
    """The benchmark cannot run. The message says what is missing and what to do."""


@dataclass(frozen=True)
class Needs:
    """What must be there before a benchmark can run."""

    gpu: bool = False
    packages: tuple[str, ...] = ()  # modules to import, beyond the standard library
    data: tuple[str, ...] = ()  # files below the data folder
    programs: str = ""  # other programs, in words

    def describe(self) -> str:
        parts = ["one NVIDIA GPU"] if self.gpu else []
        parts += [f"packages {', '.join(self.packages)}"] if self.packages else []
        parts += [f"data {', '.join(self.data)}"] if self.data else []
        parts += [self.programs] if self.programs else []
        return "; ".join(parts) or "nothing beyond Python"


@dataclass(frozen=True)
class Result:
    """One measured number, with the number it is compared with, if any."""

    case: str  # what was measured on: model, batch size, load
    metric: str
    unit: str
    value: float
    better: Better = "lower"
    competitor: str = ""  # name and version of what this is compared with; empty: nothing
    competitor_value: float | None = None
    comparison: Comparison = "competitor"  # baseline: the machine itself, or Stoker in another configuration
    notes: str = ""
    target: float | None = None  # the least ratio to the competitor that is asked for

    @property
    def ratio(self) -> float | None:
        """How many times better Stoker is. Below 1: Stoker is behind."""
        if self.competitor_value is None:
            return None
        ours, theirs = self.value, self.competitor_value
        over, under = (ours, theirs) if self.better == "higher" else (theirs, ours)
        return over / under if under else None


@dataclass
class Report:
    """What a run found. `details` is the raw data for --details; any `problems` make the runner exit with code 1."""

    results: list[Result] = field(default_factory=list)
    details: Any = None
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Benchmark:
    name: str
    group: str
    help: str
    description: str
    needs: Needs
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


def names_by_group() -> dict[str, list[str]]:
    """The benchmarks' names, from the file names alone."""
    return {group: sorted(path.stem for path in (ROOT / "bench" / group).glob("[!_]*.py")) for group in GROUPS}


def load(group: str, name: str) -> Benchmark:
    module = importlib.import_module(f"bench.{group}.{name}")
    if name != module.NAME:
        raise BenchmarkError(f"bench/{group}/{name}.py: NAME is {module.NAME!r}; it must be the file's name")
    return Benchmark(name, group, module.HELP, module.__doc__ or "", module.NEEDS, module.add_arguments, module.run)


def load_all() -> list[Benchmark]:
    return [load(group, name) for group, names in names_by_group().items() for name in names]


def find(name: str) -> Benchmark:
    """Load the benchmark of this name."""
    for group, names in names_by_group().items():
        if name in names:
            return load(group, name)
    raise BenchmarkError(f"there is no benchmark {name!r}; `python -m bench` lists them")
