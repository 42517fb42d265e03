"""Every port of a worker with a secret: strangers get nothing, a bearer key opens generation only, signatures open all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from fake_engine import FakeService, byte_text
from http_server import Server, run_server
from signing import signed, signer_for

from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey
from stoker.cli.serve import check_exposure
from stoker.proto.event_keys import FleetEvents
from stoker.proto.events import replay_request
from stoker.worker.config import HttpConfig
from stoker.worker.identity import Identity
from stoker.worker.report import Reporter

SECRET, KEY = "the secret of this fleet", "a key for foreign routers"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PATHS: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "Hi"},
    "/v1/responses": {"model": "tiny", "input": "Hi"},
    "/v1/models": None,
    "/v1/models/tiny": None,
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/metrics": None,
    "/load": None,
    "/stoker/worker": None,
    "/stoker/tokenizer": None,
    "/stoker/prefetch": {},
    "/stoker/release": {"transfer_id": "x"},
    "/nowhere": None,
}
FOR_KEYS = [path for path in PATHS if path.startswith("/v1/")]


@pytest.fixture(scope="module")
def worker() -> Iterator[Server]:
    text = byte_text()
    identity = Identity(secret=SECRET, api_key=KEY)
    server = Server(FakeService(text.tokenizer), text, HttpConfig(served_names=("tiny",)), identity=identity)
    stop = run_server(server)
    yield server
    stop()


def sign(worker: Server, path: str, body: Any = None) -> dict[str, str]:
    return signed(worker.url, SECRET, path, None if body is None else json.dumps(body).encode())


@pytest.mark.parametrize("path", PATHS)
def test_a_stranger_gets_nothing(worker: Server, path: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer guess"},
        {"x-stoker-secret": SECRET},
        {"Authorization": f"Bearer {SECRET}"},
    ):
        refused = worker.send(path, PATHS[path], **headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_secret")


@pytest.mark.parametrize("path", PATHS)
def test_a_signed_request_is_answered_and_the_worker_proves_itself(worker: Server, path: str) -> None:
    answer = worker.send(path, PATHS[path], **sign(worker, path, PATHS[path]))
    assert answer.status != 401
    assert len(answer.headers["x-stoker-proof"]) == 32


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_the_status_is_open_and_bare(worker: Server, path: str) -> None:
    answer = worker.send(path)
    assert (answer.status, list(answer.json)) == (200, ["status"])
    assert "x-stoker-proof" not in answer.headers


def test_a_captured_request_cannot_be_replayed_or_changed(worker: Server) -> None:
    path = "/v1/chat/completions"
    headers = sign(worker, path, CHAT)
    assert worker.send(path, CHAT | {"max_tokens": 1}, **headers).status == 401
    headers = sign(worker, path, CHAT)
    assert worker.send("/v1/completions", CHAT, **headers).status == 401
    assert worker.send(path, CHAT, **headers).status == 200
    assert worker.send(path, CHAT, **headers).status == 401


def test_a_strangers_body_is_not_read(worker: Server) -> None:
    """The worker refuses a body of 30 MB although only its head was sent."""
    sent = signer_for(worker.url, "a guess").sign(b"POST", b"/v1/chat/completions", b"x").decode()
    with socket.create_connection(("127.0.0.1", int(worker.url.rsplit(":", 1)[1])), timeout=30) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\ncontent-length: 30000000\r\nx-stoker-auth: {sent}\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        assert connection.recv(64).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", PATHS)
def test_the_bearer_key_opens_generation_only(worker: Server, path: str) -> None:
    status = worker.send(path, PATHS[path], Authorization=f"Bearer {KEY}").status
    assert status == (200 if path in FOR_KEYS else 401)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_salt", "another tenant"),
        ("cache_salt", ""),
        ("priority", -5),
        ("tenant_share", {"tenant": "another"}),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("resume", {"created": 1, "choices": [{}]}),
    ],
)
def test_only_a_gateway_may_set_some_fields(worker: Server, name: str, value: Any) -> None:
    refused = worker.send("/v1/chat/completions", CHAT | {name: value}, Authorization=f"Bearer {KEY}")
    assert (refused.status, refused.error["param"]) == (400, name)
    refused = worker.send("/v1/chat/completions", CHAT, Authorization=f"Bearer {KEY}", x_stoker_stream="1")
    assert (refused.status, refused.error["param"].lower()) == (400, "x-stoker-stream")


def test_a_gateway_may_set_a_cache_salt(worker: Server) -> None:
    body = CHAT | {"cache_salt": "tenant"}
    assert worker.send("/v1/chat/completions", body, **sign(worker, "/v1/chat/completions", body)).status == 200


# ---- KV events


async def hears(prepare: Callable[[zmq.Socket[bytes]], None], kind: int) -> bool:
    """Return whether a client with these keys gets anything from a worker with a secret."""
    reporter = Reporter("127.0.0.1", key=FleetKey(SECRET))
    reporter.start(lambda number: None)  # type: ignore[arg-type, return-value]
    context = zmq.Context()
    try:
        client = context.socket(kind)
        prepare(client)
        if kind == zmq.SUB:
            client.subscribe(b"")
        client.connect(f"tcp://127.0.0.1:{reporter.events_port if kind == zmq.SUB else reporter.replay_port}")
        if kind == zmq.DEALER:
            client.send_multipart(replay_request(-1))
        for _ in range(60):
            reporter.all_blocks_lost()
            await asyncio.sleep(0.01)
            if client.poll(0):
                return True
        return False
    finally:
        context.destroy(linger=0)
        await reporter.stop()


def wrong_client_key(socket: zmq.Socket[bytes]) -> None:
    """A stranger that has even learned the server's public key."""
    FleetEvents(FleetKey(SECRET)).secure_client(socket)
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER], ids=["events", "replay"])
@pytest.mark.parametrize(
    ("prepare", "heard"),
    [
        (FleetEvents(FleetKey(SECRET)).secure_client, True),
        (FleetEvents(FleetKey("a guess")).secure_client, False),
        (wrong_client_key, False),
        (lambda socket: None, False),
    ],
    ids=["member", "other-secret", "other-client", "plain"],
)
def test_only_members_of_the_fleet_hear_kv_events(
    prepare: Callable[[zmq.Socket[bytes]], None], heard: bool, kind: int
) -> None:
    assert asyncio.run(hears(prepare, kind)) == heard


# ---- where ports listen


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "worker.example"])
def test_a_port_that_others_reach_needs_a_secret(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--secret-file.*--insecure"):
        check_exposure(host, None, insecure=False)
    check_exposure(host, SECRET, insecure=False)
    check_exposure(host, None, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_a_port_of_this_machine_needs_none(host: str) -> None:
    check_exposure(host, None, insecure=False)
