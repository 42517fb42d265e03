"""Real schemas and tools: the benchmark structured_output, with a tiny model on some cases and the real model on all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def run(data_dir: Path, tmp_path: Path, *argv: str) -> dict[str, Any]:
    out = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "bench", "run", "structured_output", "--data", str(data_dir)]
    command += ["--details", str(out), *argv]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(out.read_text())
    assert isinstance(report, dict)
    return report


def check(report: dict[str, Any]) -> None:
    for outcomes in report.values():
        assert not outcomes["invalid"]
        assert not outcomes["truncated"]
        assert outcomes["valid"] + sum(outcomes["unsupported"].values()) == outcomes["total"]
        assert outcomes["valid"] > 0


def test_some_of_each_set(data_dir: Path, tiny_folder: Path, tmp_path: Path):
    """With a random model, only the grammar makes the output valid."""
    options = ("--limit", "12", "--max-tokens", "96", "--temperature", "1", "--rows", "64")
    check(run(data_dir, tmp_path, "--model", str(tiny_folder), *options))


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_all(data_dir: Path, tmp_path: Path):
    report = run(data_dir, tmp_path)
    check(report)
    assert not report["bfcl"]["unsupported"]
