"""A gateway of several processes is shown as one: by the admin API, the stream of the dashboard, and `stoker top`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from scripted_server import Reply, ScriptedServer, Seen, answer
from test_gateway_cli import Running, curl, started
from test_gateway_processes import ADMIN, TOKEN, children, options, until_answering

from stoker.cli.main import main

NUM_PROCESSES = 2
SESSION = "agent-7"


@pytest.fixture
def gateway(tmp_path: Path, server: ScriptedServer) -> Iterator[Running]:
    with started(tmp_path, *options(tmp_path, server)) as running:
        for number in range(NUM_PROCESSES):
            until_answering(running, number)
        yield running


def own_urls(running: Running) -> dict[int, tuple[int, str]]:
    """Return the process id and the own address of each process, by number."""
    found = {}
    for pid in children(running):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        number, _, ports = words[words.index("--process") + 1].partition(":")
        found[int(number)] = (pid, f"http://127.0.0.1:{ports.split(',')[int(number)]}")
    return found


def get(url: str, path: str) -> Any:
    return json.loads(curl(f"{url}/admin/{path}", *ADMIN))


def chat(url: str) -> None:
    body = {"model": "scripted", "stream": True, "user": SESSION, "messages": [{"role": "user", "content": "hi"}]}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().read().rstrip().endswith(b"data: [DONE]")


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_answers_of_all_processes_are_joined(gateway: Running, server: ScriptedServer) -> None:
    is_open = threading.Event()

    def held(seen: Seen) -> Reply:
        return answer("one", " two", pause=is_open.is_set, prompt_tokens=10, cached_tokens=4)

    server.script = held
    urls = {number: url for number, (_, url) in own_urls(gateway).items()}
    counts = {0: 3, 1: 2}
    threads = [threading.Thread(target=chat, args=(urls[number],)) for number in counts for _ in range(counts[number])]
    for thread in threads:
        thread.start()
    try:
        # What runs: every process shows the requests of both.
        for url in urls.values():
            until(lambda url=url: get(url, "fleet")["workers"][0]["reserved"]["requests"] == 5)  # type: ignore[misc]
            assert get(url, "status")["running_requests"] == 5
        for number, count in counts.items():
            [worker] = get(urls[0], f"fleet?process={number}")["workers"]
            assert worker["reserved"]["requests"] == count
        until(lambda: get(gateway.url, "now")["point"]["running_requests"] == 5)
    finally:
        is_open.set()
        for thread in threads:
            thread.join(60)
    # What has ended: the rates, the requests, and one session whose turns were sent to both.
    until(lambda: round(60 * (get(gateway.url, "now")["values"]["requests_per_s"] or 0)) == 5)
    now = get(gateway.url, "now")
    assert now["values"]["hit_ratio"] == 0.4
    assert now["values"]["workers"] == now["values"]["usable_workers"] == 1
    assert now["values"]["ttft_p95_ms"] > 0
    assert now["silent"] == []
    series = get(gateway.url, "series?step=300&n=2")
    assert round(300 * sum(value or 0 for value in series["columns"]["requests_per_s"])) == 5
    requests = get(gateway.url, "requests?n=10")["requests"]
    times = [one["time_s"] + 1e-3 * one["e2e_ms"] for one in requests]
    assert len({one["request_id"] for one in requests}) == 5
    assert times == sorted(times, reverse=True)
    assert len(get(gateway.url, "requests?n=2")["requests"]) == 2
    for one in requests:  # both answer for a request that only one of them had
        for url in urls.values():
            assert get(url, f"requests?request={one['request_id']}")["candidates"]
    assert get(gateway.url, "requests?request=unknown")["error"]["code"] == "not_found"
    assert get(gateway.url, "requests?n=0")["error"]["param"] == "n"
    assert len(get(gateway.url, "requests?n=1000")["requests"]) == 5, "the page of the dashboard names its own limit"
    [session] = get(gateway.url, "sessions?n=200")["sessions"]
    assert (session["session"], session["requests"], session["prompt_tokens"]) == (f"default:{SESSION}", 5, 50)
    assert len(session["turns"]) == 5
    assert [len(get(urls[0], f"sessions?process={n}")["sessions"][0]["turns"]) for n in counts] == [3, 2]
    assert json.loads(curl(f"{gateway.url}/admin/now"))["error"]["code"] == "invalid_admin_token"


def test_a_process_that_does_not_answer_is_named_and_the_rest_is_shown(
    gateway: Running, server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = own_urls(gateway)
    stopped, _ = processes[0]
    _, url = processes[1]
    chat(url)
    os.kill(stopped, signal.SIGSTOP)
    try:
        until(lambda: round(60 * (get(url, "now")["values"]["requests_per_s"] or 0)) == 1)
        for path in ("now", "series?step=1&n=5", "status", "fleet", "requests", "sessions"):
            assert get(url, path)["silent"] == [0], path
        assert main(["top", "--once", "--url", url, "--admin-token-file", str(tmp_path / "token")]) == 0
        assert "Process 0 of 2 does not answer" in capsys.readouterr().out
        request = urllib.request.Request(f"{url}/admin/stream", headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as stream:
            states = [json.loads(line[6:]) for line in (stream.readline() for _ in range(6)) if line[:5] == b"data:"]
        assert len(states) == 3
        assert all(one["silent"] == [0] for one in states)
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: get(url, "now")["silent"] == [])
