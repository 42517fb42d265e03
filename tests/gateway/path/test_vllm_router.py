"""vLLM's router in front of Stoker workers. Runs where `vllm-router` is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_fleet import WORKER_OPTIONS, Exchange, Process
from worker.real import wait_for

ROUTER = shutil.which("vllm-router")
PULLED, COMPUTED = "stoker_kv_pulled_tokens_total", "stoker_computed_tokens_total"
BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 24,
    "seed": 3,
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ROUTER is None, reason="vllm-router is not installed")]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(folder: Path, work: Path, options: Sequence[Sequence[str]]) -> Iterator[list[Process]]:
    """One worker per role."""
    workers = [
        Process(["serve", str(folder), *WORKER_OPTIONS, *more], work / f"worker-{i}.log")
        for i, more in enumerate(options)
    ]
    starts = [threading.Thread(target=worker.start) for worker in workers]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


@contextmanager
def routing(work: Path, *options: str) -> Iterator[int]:
    """Start the router and return its port once it answers."""
    assert ROUTER is not None
    port = free_port()
    command = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "warning"]
    with (work / "router.log").open("w") as log:
        router = subprocess.Popen([*command, "--prometheus-port", str(free_port()), *options], stdout=log, stderr=log)

    def answers() -> bool:
        tried = Exchange(port, BODY)
        tried.wait()
        return tried.status == 200

    try:
        wait_for(answers)
        yield port
    finally:
        router.terminate()
        router.wait()


def test_vllm_router_drives_two_of_our_workers(tiny_folder: Path, tmp_path: Path) -> None:
    with (
        serving(tiny_folder, tmp_path, [(), ()]) as workers,
        routing(tmp_path, "--worker-urls", *(worker.url for worker in workers)) as port,
    ):
        direct = Exchange(workers[0].port, BODY)
        direct.wait()
        for stream in (False, True, False, True):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            through = Exchange(port, BODY | options)
            through.wait()
            assert through.said == direct.said
        assert all(worker.get("/health")["status"] == "ok" for worker in workers)
        assert all('"status": 200' in worker.log_path.read_text() for worker in workers), "one worker did it all"


def test_vllm_router_hands_over_from_our_prefill_to_our_decode_worker(tiny_folder: Path, tmp_path: Path) -> None:
    roles = [("--role", "prefill"), ("--role", "decode"), ()]
    pair = ("--vllm-pd-disaggregation", "--prefill", "{0}", "--decode", "{1}")
    with serving(tiny_folder, tmp_path, roles) as (prefill, decode, unified):
        options = [part.format(prefill.url, decode.url) for part in pair]
        with routing(tmp_path, *options) as port:
            for number, stream in enumerate((False, True, False, True)):
                content = f"{number} " + "river stone lamp garden " * 20
                body = BODY | {"messages": [{"role": "user", "content": content}], "ignore_eos": True}
                if stream:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                pulled, computed = (decode.metrics()[name] for name in (PULLED, COMPUTED))
                through, direct = Exchange(port, body), Exchange(unified.port, body)
                for one in (through, direct):
                    one.wait()
                assert through.said == direct.said
                wait_for(lambda: decode.is_idle and prefill.is_idle)
                prompt_tokens = direct.usage["prompt_tokens"]
                assert decode.metrics()[PULLED] - pulled > prompt_tokens // 2, "decode computed the prompt itself"
                assert decode.metrics()[COMPUTED] - computed < prompt_tokens
