"""Attacks on a real gateway process before mock workers: what a client or a tenant does must not reach another tenant."""

from __future__ import annotations

import json
import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from attack.real_gateway import CHAT, LONG_S, RealGateway, running_gateway

from bench.faults.attacks import KEYS
from bench.support.mock_worker import KILL_MARKER

SEED = 17
NUM_WORKERS = 4


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGateway]:
    with running_gateway(tmp_path_factory.mktemp("attack"), NUM_WORKERS) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [{"timeout_s": 1e-6}, {"messages": [{"role": "user", "content": KILL_MARKER}]}],
    ids=["deadline of the client", "request of death"],
)
def test_requests_that_fail_everywhere_leave_the_workers_to_other_tenants(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]
) -> None:
    with running_gateway(tmp_path_factory.mktemp("death"), NUM_WORKERS) as gateway:
        for _ in range(40):
            assert gateway.chat(KEYS["rival"], **fields) >= 400
        assert [gateway.chat() for _ in range(40)] == [200] * 40


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("path", "key", "statuses"),
    [
        (CHAT, "", {b"401"}),
        (CHAT, "sk-wrong", {b"401"}),
        ("/v1/completions", "sk-wrong", {b"401"}),
        ("/v1/nothing", "", {b"401", b"404", b"413"}),
    ],
)
def test_a_request_without_a_valid_key_is_refused_on_its_head(
    gateway: RealGateway, path: str, key: str, statuses: set[bytes]
) -> None:
    lines = [f"Authorization: Bearer {key}"] if key else []
    begin_s = time.monotonic()
    answer = gateway.raw(head(path, "Content-Length: 20000000", *lines) + b"{")
    assert answer[9:12] in statuses, answer[:200]
    assert time.monotonic() - begin_s < LONG_S / 2, "it waited for the body"


def test_a_key_above_its_rate_limit_is_refused_before_its_body_is_read(gateway: RealGateway) -> None:
    for _ in range(200):
        if gateway.chat(KEYS["limited"]) == 429:
            break
    else:
        pytest.fail("the key was never limited")
    authorization = f"Authorization: Bearer {KEYS['limited']}"
    answer = gateway.raw(head(CHAT, "Content-Length: 20000000", authorization) + b"{" + b" " * 100_000)
    assert answer.startswith(b"HTTP/1.1 429"), answer[:200]
    assert b"retry-after:" in answer.lower()
    assert gateway.chat() == 200


def test_the_log_stays_small_and_readable_whatever_clients_send(gateway: RealGateway) -> None:
    rng = random.Random(SEED)
    size = gateway.log.stat().st_size
    long = "".join(rng.choices('ab\u2028\u202e\x1b\x7f\\"', k=6000))
    num = 0
    for _ in range(20):
        for fields in ({"model": long}, {"user": long}, {"session_id": long}, {"prompt_cache_key": long}, {long: 1}):
            gateway.chat(KEYS["rival"], **fields)
            num += 1
        for name in ("x-request-id", "x-session-id", "traceparent", "user-agent", "x-forwarded-for"):
            gateway.chat(KEYS["rival"], headers={name: "v" * 6000})
            num += 1
        gateway.raw(head("/" + "p" * 6000))
        gateway.raw(rng.randbytes(6000) + b"\r\n\r\n")
        gateway.raw(head(CHAT, "Content-Length: 5", "Content-Length: 6"))
        num += 3
    deadline_s = time.monotonic() + 2.0
    while time.monotonic() < deadline_s and gateway.log.read_bytes()[-1:] != b"\n":
        time.sleep(0.05)
    written = gateway.log.read_bytes()[size:]
    assert len(written) < num * 2048, f"{len(written) // num} bytes of log per request"
    for line in written.decode().split("\n")[1:-1]:
        assert len(line.encode()) <= 8192, line[:300]
        assert isinstance(json.loads(line), dict)
        assert "\x1b" not in line


def test_silent_connections_do_not_lock_out_other_clients(gateway: RealGateway) -> None:
    wanted = 10_500  # more than the gateway keeps
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 500:
        pytest.skip(f"needs {wanted + 500} open files; the limit is {hard}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as held:
            for number in range(wanted):
                wire = held.enter_context(socket.socket())
                wire.settimeout(LONG_S)
                wire.bind((f"127.0.2.{1 + number % 50}", 0))
                wire.connect(("127.0.0.1", gateway.port))
            assert [gateway.health() for _ in range(5)] == [200] * 5
            assert [gateway.chat() for _ in range(5)] == [200] * 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gateway.chat() == 200
