"""The other way round: vLLM's own router in front of our workers. Runs where `vllm-router` is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
from real_fleet import WORKER_OPTIONS, Exchange, Process
from worker.real import wait_for

ROUTER = shutil.which("vllm-router")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")
def test_vllm_router_drives_two_of_our_workers(tiny_folder: Path, tmp_path: Path) -> None:
    workers = [Process(["serve", str(tiny_folder), *WORKER_OPTIONS], tmp_path / f"worker-{i}.log") for i in range(2)]
    starts = [threading.Thread(target=worker.start) for worker in workers]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    port = free_port()
    assert ROUTER is not None
    command = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "warning"]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *(worker.url for worker in workers)]
    with (tmp_path / "router.log").open("w") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 3}
        direct = Exchange(workers[0].port, body)
        direct.wait()

        def answers() -> bool:
            tried = Exchange(port, body)
            tried.wait()
            return tried.status == 200

        wait_for(answers, 60)
        for stream in (False, True, False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            through = Exchange(port, body | options)
            through.wait()
            assert through.said == direct.said
        assert all(worker.get("/health")["status"] == "ok" for worker in workers)
        assert all('"status": 200' in worker.log_path.read_text() for worker in workers), "one worker did it all"
    finally:
        router.terminate()
        router.wait()
        for worker in workers:
            worker.stop()
