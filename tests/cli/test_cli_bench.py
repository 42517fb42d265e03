from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from scripted_server import ScriptedServer, Seen, answer, failure

from stoker.cli.main import main
from stoker.loadgen.report import print_report
from stoker.loadgen.stream import Record
from stoker.loadgen.summary import summarize


def bench(server: ScriptedServer, *argv: str) -> int:
    return main(["bench", "serve", "--url", server.url, *argv])


def test_results_and_configuration_are_written(server: ScriptedServer, tmp_path: Path, capsys):
    out = tmp_path / "out.json"
    argv = [
        "--num-requests",
        "6",
        "--concurrency",
        "2",
        "--input-tokens",
        "20",
        "--output-tokens",
        "9",
        "--warmup",
        "2",
    ]
    assert bench(server, *argv, "--header", "authorization: secret", "--json", str(out)) == 0
    whole = json.loads(out.read_text())
    assert whole["config"]["concurrency"] == 2
    assert whole["config"]["model"] == "scripted"
    assert whole["config"]["headers"] == ["authorization"]
    assert "secret" not in out.read_text()
    assert set(whole["environment"]) == {"python", "platform", "date"}
    results = whole["results"]
    assert (results["requests"], results["failed"], results["peak_concurrency"]) == (6, 0, 2)
    assert (results["prompt_tokens"], results["cached_tokens"], results["output_tokens"]) == (60, 24, 18)
    assert results["hit_ratio"] == 0.4
    assert results["ttft_ms"]["count"] == 6
    assert results["itl_ms"]["count"] == 12
    assert "hit ratio" in capsys.readouterr().out
    assert len(server.seen) == 8  # with the warm-up, whose prompts are others
    assert len({seen.body["messages"][0]["content"] for seen in server.seen}) == 8
    assert all(seen.headers["Authorization"] == "secret" for seen in server.seen)
    measured = server.seen[2:]
    assert {(seen.body["max_tokens"], seen.body["ignore_eos"], seen.body["temperature"]) for seen in measured} == {
        (9, True, 0.0)
    }


def test_the_file_is_written_even_if_stdout_is_closed(server: ScriptedServer, tmp_path: Path):
    out = tmp_path / "out.json"
    argv = ["bench", "serve", "--url", server.url, "--num-requests", "1", "--json", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "stoker.cli.main", *argv], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(60)
    assert json.loads(out.read_text())["results"]["requests"] == 1


def test_the_table_is_shown_even_if_the_file_cannot_be_written(server: ScriptedServer, capsys):
    assert bench(server, "--num-requests", "1", "--json", "/dev/full") == 2
    told = capsys.readouterr()
    assert "requests answered" in told.out
    assert told.err == "stoker: /dev/full: cannot be written: No space left on device\n"


def test_results_of_slow_servers_are_not_truncated(capsys):
    slow = Record(started_s=0.0, first_s=314.5, last_s=414.25, ended_s=414.25, completion_tokens=2, has_usage=True)
    print_report(Console(width=80), summarize([slow]))
    shown = capsys.readouterr().out
    assert shown.count("314,500.0") == 6
    assert "…" not in shown


def test_failures_are_reported_and_change_the_exit_code(server: ScriptedServer, capsys):
    def script(seen: Seen):
        return failure(429, "overloaded") if len(server.seen) % 2 else answer("a")

    server.script = script
    assert bench(server, "--num-requests", "4", "--concurrency", "1", "--input-tokens", "3") == 1
    assert "2 x 429 overloaded" in capsys.readouterr().out


def test_a_trace_is_sent_as_token_ids(server: ScriptedServer, tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 128, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 1536, "output_length": 128, "hash_ids": [0, 1, 2]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset", "trace", "--trace", str(trace), "--block-tokens-scale", "8", "--speedup", "100"]
    assert bench(server, *argv, "--vocab-size", "500", "--session-header") == 0
    first, second = sorted(server.seen, key=lambda seen: len(seen.body["prompt"]))
    assert second.body["prompt"][:16] == first.body["prompt"]
    assert len(second.body["prompt"]) == 24
    assert max(second.body["prompt"]) < 500
    assert first.body["max_tokens"] == 2
    assert first.headers["x-session-affinity"] == "mooncake-0"


def test_agent_sessions_without_times_of_their_own_do_not_start_all_at_once(server: ScriptedServer, tmp_path: Path):
    trace, out = tmp_path / "sessions.jsonl", tmp_path / "out.json"
    request = {"in": 128, "out": 64, "think_time": 0.0, "runs": [[1, 2]]}
    agent = {"block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": [request, request]}
    trace.write_text("".join(json.dumps({"id": f"s{n}", **agent}) + "\n" for n in range(20)))
    server.script = lambda seen: answer("a", pause=0.01)
    argv = ["--dataset", "trace", "--trace", str(trace), "--block-tokens-scale", "4", "--json", str(out)]
    assert bench(server, *argv) == 0
    whole = json.loads(out.read_text())
    assert whole["results"]["requests"] == 40
    assert whole["results"]["peak_concurrency"] == whole["config"]["load"]["slots"] == 8


@pytest.mark.parametrize("name", ["mtbench", "tau", "mint"])
def test_public_sets_are_played(server: ScriptedServer, data_dir: Path, name: str):
    argv = ["--dataset", name, "--data-dir", str(data_dir), "--num-requests", "12", "--max-tokens", "7"]
    assert bench(server, *argv) == 0
    assert len(server.seen) == 12
    assert all(seen.body["max_tokens"] == 7 and "ignore_eos" not in seen.body for seen in server.seen)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--concurrency", "0"], "--concurrency 0: must be at least 1"),
        (["--dataset", "trace"], "needs --trace FILE"),
        (["--dataset", "sharegpt"], "needs --dataset-file FILE"),
        (["--dataset", "arena", "--data-dir", "absent"], "there is no data folder at"),
        (["--header", "nonsense"], "NAME:VALUE"),
        (["--range-ratio", "2"], "--range-ratio 2"),
        (["--num-requests", "0"], "--num-requests 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--vocab-size", "0"], "--vocab-size 0: must be above 0"),
        (["--max-tokens", "0"], "--max-tokens 0: must be above 0"),
        (["--max-turns", "-1"], "--max-turns -1: must be above 0"),
        (["--timeout-s", "0"], "--timeout-s 0: must be above 0"),
        (["--timeout-s", "nan"], "--timeout-s nan: must be above 0"),
        (["--timeout-s", "inf"], "--timeout-s inf: must be above 0 and finite"),
        (["--burstiness", "inf"], "--burstiness inf"),
        (["--url", "localhost:8000"], "--url localhost:8000: expected a URL such as http://"),
        (["--json", f"/{'x' * 300}/out.json"], "there is no folder"),
        (["--dataset", "trace", "--trace", "x" * 300], "no file xxx"),
        (["--json", "/tmp"], "--json /tmp: this is a folder; give the name of a file"),
        (["--json", "/not/there/out.json"], "--json /not/there/out.json: there is no folder /not/there"),
    ],
)
def test_invalid_settings_are_named(server: ScriptedServer, capsys, argv: list[str], message: str):
    assert bench(server, *argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("stoker: ")
    assert message in shown
    assert not server.seen


def test_a_server_that_is_not_there(unused_url: str, capsys):
    assert main(["bench", "serve", "--url", unused_url]) == 2
    assert f"stoker: no server answers at {unused_url} (Connection refused): check --url" in capsys.readouterr().err


def test_ctrl_c_prints_the_results_so_far(server: ScriptedServer, tmp_path: Path):
    server.script = lambda seen: answer("a", "b") if len(server.seen) <= 5 else answer("a", pause=600.0)
    out = tmp_path / "out.json"
    argv = ["bench", "serve", "--url", server.url, "--concurrency", "1", "--num-requests", "50", "--json", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli.main", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 60
    while len(server.seen) < 6 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == ""
    assert "Interrupted" in shown
    whole = json.loads(out.read_text())
    assert whole["config"]["interrupted"] is True
    assert (whole["results"]["requests"], whole["results"]["failed"]) == (5, 0)
