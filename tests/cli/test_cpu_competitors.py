from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripted_server import ScriptedServer

ROOT = Path(__file__).parents[2]
SCRIPTED = f"{sys.executable} {Path(__file__).with_name('scripted_server.py')} {{port}}"


def cpu_competitors(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "run", "cpu_competitors", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)


def test_servers_are_measured_in_turn_and_stopped(server: ScriptedServer, tmp_path: Path):
    load = ["--concurrency", "1", "2", "--requests-per-slot", "2", "--min-requests", "2", "--warmup", "2"]
    ended = cpu_competitors(
        *("--server", f"stoker={SCRIPTED}", "--target", f"other={server.url}"),
        *(*load, "--log-dir", str(tmp_path), "--details", str(tmp_path / "result.json")),
    )
    assert ended.returncode == 0, ended.stderr
    measurements = json.loads((tmp_path / "result.json").read_text())
    assert [(m["round"], m["server"], m["concurrency"]) for m in measurements] == [
        *((0, "other", 1), (0, "stoker", 1), (0, "other", 2), (0, "stoker", 2)),
        *((1, "stoker", 1), (1, "other", 1), (1, "stoker", 2), (1, "other", 2)),
    ]
    assert [m["summary"]["requests"] for m in measurements] == [2, 2, 4, 4] * 2
    assert all(m["start_s"] > 0 and m["cpu_s"] >= 0 for m in measurements if m["server"] == "stoker")
    sent = [seen.body["messages"][0]["content"] for seen in server.seen]
    assert len(set(sent)) == 14  # a warm-up of 2, and two rounds of 2 + 4
    assert all(seen.body["max_tokens"] == 32 and seen.body["ignore_eos"] for seen in server.seen)
    assert "SmolLM2, 2 streams, output throughput" in ended.stdout
    assert "other" in ended.stdout


def test_a_server_that_ends_at_once_is_named(tmp_path: Path):
    ended = cpu_competitors("--server", "broken=false", "--log-dir", str(tmp_path))
    assert ended.returncode == 2
    assert "broken ended with 1 before it was ready" in ended.stderr
