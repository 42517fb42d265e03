"""`stoker serve` with several ranks: the answers of one rank, and one clean error when a rank is killed or stopped."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway.real_fleet import Process
from real import COMPLETIONS, RealServer, children, is_alive, serving, serving_together, wait_for

FAST = ("--threads", "1", "--dtype", "float64", "--kv-blocks", "400", "--spare-engine", "off")
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "seed": 1}
BODIES: list[dict[str, Any]] = [
    {"prompt": "The capital of France", "max_tokens": 12, "temperature": 0},
    {"prompt": "A list of numbers: 1 2 3 1 2 3 1 2", "max_tokens": 24, "temperature": 0, "logprobs": 2},
    {"prompt": "Dice", "max_tokens": 12, "temperature": 0.9, "seed": 4, "n": 2, "presence_penalty": 0.5},
    {
        "prompt": "JSON:",
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
        },
    },
]


def texts(server: RealServer) -> list[Any]:
    found = []
    for body in BODIES:
        answer = server.send(COMPLETIONS, {"model": server.model} | body)
        assert answer.status == 200, answer.body
        found.append([(one["text"], one["finish_reason"]) for one in answer.json["choices"]])
    return found


def processes_of(server: RealServer) -> dict[str, list[int]]:
    engines = children(server.process.pid)
    return {"engine": engines, "rank": [pid for engine in engines for pid in children(engine)]}


@contextmanager
def gateway(work: Path, prefill: RealServer, decode: RealServer) -> Iterator[Process]:
    """A gateway that hands off every prompt."""
    (work / "gateway.toml").write_text("[routing]\nlocal_prefill_tokens = 0\nlocal_prefill_share = 1000.0\n")
    workers = ["--worker", f"{prefill.url},role=prefill", "--worker", f"{decode.url},role=decode"]
    process = Process(["gateway", "--config", str(work / "gateway.toml"), *workers], work / "gateway")
    try:
        process.start()
        wait_for(lambda: process.is_ready, 60.0)
        yield process
    finally:
        process.stop()


def handed_over(work: Path, prefill: RealServer, decode: RealServer) -> list[Any]:
    """Return the answers of a gateway. All prompts are computed by `prefill`, and pulled by `decode`."""
    before = decode.metrics()["stoker_kv_pulled_tokens_total"]
    with gateway(work, prefill, decode) as process:
        found = texts(replace(decode, url=process.url))
    # Blocks that this worker computed for an earlier answer are not pulled again.
    assert decode.metrics()["stoker_kv_pulled_tokens_total"] > before
    wait_for(lambda: prefill.is_idle and decode.is_idle, 60.0)
    assert not prefill.metrics()["stoker_kv_leases"]
    return found


def test_ranks_serve_the_same_answers(tiny_folder: Path, tmp_path: Path) -> None:
    """With drafts and a grammar, directly and by hand-offs from two ranks to one and to two stages."""
    layouts = {
        "one": ("--role", "decode"),
        "tp2": ("--tp", "2", "--role", "prefill"),
        "pp2": ("--pp", "2", "--role", "decode"),
    }
    starts = [(tmp_path / name, (*FAST, "--drafter", "auto", *more)) for name, more in layouts.items()]
    with serving_together(tiny_folder, *starts) as servers:
        one, tp2, pp2 = servers
        by_gateways = [handed_over(tmp_path, tp2, decode) for decode in (one, pp2)]
        wanted, *others = [texts(server) for server in servers]
        assert [*others, *by_gateways] == [wanted] * 4
        pids = [pid for server in servers for found in processes_of(server).values() for pid in found]
        assert len(pids) == 3 + 1 + 1
    wait_for(lambda: not any(map(is_alive, pids)), 5.0)
    for name in (*layouts, "gateway"):
        assert "Traceback" not in (tmp_path / name).read_text()


def lose(server: RealServer, pid: int, number: signal.Signals) -> float:
    """Send a signal to a process of a server that answers a stream. Return the seconds until the client has its error."""
    stream = server.stream(COMPLETIONS, {"model": server.model} | LONG)
    wait_for(lambda: len(stream.events) > 3)
    os.kill(pid, number)
    lost_s = time.monotonic()
    stream.wait_end(30.0)
    assert stream.last_error["code"] == "engine_died"
    assert not stream.is_done
    return time.monotonic() - lost_s


@pytest.mark.parametrize("layout", [("--tp", "2")])
def test_a_lost_rank_is_one_clean_error_and_a_restart(
    tiny_folder: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    with serving(tiny_folder, tmp_path / "log", *FAST, *layout) as server:
        wanted = server.complete("The capital", max_tokens=8, temperature=0).text
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = processes_of(server)
            assert lose(server, before["rank"][0], number) < 6.0
            wait_for(lambda: server.is_ready and server.is_idle)
            assert server.complete("The capital", max_tokens=8, temperature=0).text == wanted
            assert not any(is_alive(pid) for found in before.values() for pid in found)
        assert "rank 1 is lost" in server.log
        assert "Traceback" not in server.log
        last = processes_of(server)
        server.process.kill()
        wait_for(lambda: not any(is_alive(pid) for found in last.values() for pid in found), 5.0)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_any_process_is_killed_or_stopped_many_times(tiny_folder: Path, tmp_path: Path) -> None:
    """Slow: 100 restarts of an engine with four processes and tiers in RAM and on disk."""
    rng, before = random.Random(0), set(os.listdir("/dev/shm"))
    tiers = ("--kv-host-gib", "0.05", "--kv-disk", str(tmp_path / "disk"))
    with serving(tiny_folder, tmp_path / "log", *FAST, *tiers, "--tp", "2", "--pp", "2") as server:
        wanted = server.complete("The capital", max_tokens=8, temperature=0).text
        for _ in range(100):
            wait_for(lambda: server.is_ready, 120.0)
            found = processes_of(server)
            assert len(found["rank"]) == 3
            pid = rng.choice([*found["rank"], *found["engine"]])
            assert lose(server, pid, rng.choice([signal.SIGKILL, signal.SIGSTOP])) < 10.0
            wait_for(lambda: server.is_ready and server.is_idle, 120.0)
            assert server.complete("The capital", max_tokens=8, temperature=0).text == wanted
            assert not any(is_alive(pid) for pids in found.values() for pid in pids)
        assert "Traceback" not in server.log
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("stoker")}
