"""What a worker tells gateways about itself, and how it registers with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from fake_engine import BLOCK_TOKENS, MAX_MODEL_TOKENS, FakeService, byte_text
from http_server import Server, run_server
from signing import signed

from stoker.base.errors import ConfigError
from stoker.base.fleet_key import FleetKey
from stoker.base.ids import WorkerId
from stoker.proto.messages import WorkerInfo, WorkerRegistration, WorkerReport
from stoker.proto.signed_http import AUTH_HEADER, CHALLENGE_HEADER, PROOF_HEADER, RequestVerifier
from stoker.text.folder import text_digest
from stoker.worker.config import HttpConfig
from stoker.worker.gateway_file import listed_gateways
from stoker.worker.identity import Identity
from stoker.worker.register import Registrar

ME = Identity(worker_id=WorkerId("w-me"), secret="open sesame", events_port=5557, replay_port=5558)


@pytest.fixture(scope="module")
def worker() -> Iterator[Server]:
    text = byte_text()
    server = Server(FakeService(text.tokenizer), text, HttpConfig(served_names=("tiny", "tiny-alias")), identity=ME)
    stop = run_server(server)
    yield server
    stop()


def test_the_worker_describes_itself(worker: Server) -> None:
    answer = worker.send("/stoker/worker", **signed(worker.url, "open sesame", "/stoker/worker"))
    assert msgspec.json.decode(answer.body, type=WorkerInfo) == WorkerInfo(
        worker_id=WorkerId("w-me"),
        role="unified",
        models=["tiny", "tiny-alias"],
        fingerprint="fedcba9876543210",
        block_tokens=BLOCK_TOKENS,
        num_blocks=64,
        max_model_tokens=MAX_MODEL_TOKENS,
        events="tcp://127.0.0.1:5557",
        replay="tcp://127.0.0.1:5558",
        tokenizer="",
        volatile_lines=["x-anthropic-billing-header:"],
        secret_id=FleetKey("open sesame").key_id,
    )


@pytest.mark.parametrize("path", ["/stoker/worker", "/stoker/tokenizer"])
@pytest.mark.parametrize("headers", [{}, {"x_stoker_auth": "guess"}, {"x_stoker_auth": "öpen"}], ids=str)
def test_a_request_without_the_secret_is_refused(worker: Server, path: str, headers: dict[str, str]) -> None:
    refused = worker.send(path, **headers)
    assert (refused.status, refused.error["code"]) == (401, "invalid_secret")


def test_a_worker_without_a_secret_answers_everyone(server: Server) -> None:
    answer = server.send("/stoker/worker").json
    assert answer["worker_id"].startswith("w-")
    assert (answer["events"], answer["replay"]) == (None, None)


def test_the_worker_reports_its_load(worker: Server) -> None:
    report = msgspec.json.decode(
        worker.send("/load", **signed(worker.url, "open sesame", "/load")).body, type=WorkerReport
    )
    assert (report.waiting_tokens, report.running_sequences, report.free_blocks) == (2, 3, 4)
    assert (report.num_blocks, report.block_tokens, report.ready, report.draining) == (64, 16, True, False)


def test_the_worker_sends_its_tokenizer_files(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    assert server.send("/stoker/tokenizer").status == 404
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("ü")
    (tmp_path / "model.safetensors").write_bytes(b"\xff")
    object.__setattr__(server.text, "folder", tmp_path)
    files = server.send("/stoker/tokenizer").json["files"]
    assert files == {"tokenizer.json": "{}", "additional_chat_templates/tool_use.jinja": "ü"}
    assert text_digest(files) != text_digest({"tokenizer.json": "{}"})


# ---- registration

NEWS = WorkerRegistration(
    worker_id=WorkerId("w-me"),
    url="http://10.0.0.7:8000",
    role="unified",
    models=["tiny"],
    fingerprint="f",
    block_tokens=16,
    num_blocks=64,
    max_model_tokens=2048,
    events=None,
    replay=None,
    tokenizer="",
)


class Gateway:
    def __init__(self) -> None:
        self.heard: list[tuple[str, WorkerRegistration]] = []
        self.has_secret = True
        self._verifier = RequestVerifier(FleetKey("s"))
        self.status = 200
        self.url = ""
        self._runner: web.AppRunner

    async def __aenter__(self) -> Gateway:
        app = web.Application()
        app.router.add_route("*", "/stoker/register", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        data = await request.read()
        sent = request.headers.get(AUTH_HEADER, "").encode()
        signed_head = self._verifier.check(sent, request.method.encode(), b"/stoker/register")
        if signed_head is None:
            return web.Response(status=401, headers={CHALLENGE_HEADER: self._verifier.challenge})
        assert signed_head.has_body(data)
        self.heard.append((request.method, msgspec.json.decode(data, type=WorkerRegistration)))
        proof = signed_head.proof.decode() if self.has_secret else "guess"
        return web.Response(status=self.status, headers={PROOF_HEADER: proof})


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition never held")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout that is long enough for a stalled machine."""
    for name in ("_ANSWER_S", "_LEAVE_S"):
        monkeypatch.setattr(f"stoker.worker.register.{name}", 60.0)


@pytest.mark.usefixtures("patient")
def test_the_worker_sends_heartbeats_to_every_gateway_and_unregisters() -> None:
    async def main() -> None:
        async with Gateway() as first, Gateway() as second:
            registrar = Registrar([first.url, second.url + "/"], lambda: NEWS, "s", heartbeat_s=0.02)
            registrar.start()
            await until(lambda: len(first.heard) > 2 and len(second.heard) > 2)
            await registrar.leave()
            for gateway in (first, second):
                *posts, last = gateway.heard
                assert {method for method, _ in posts} == {"POST"}
                assert last[0] == "DELETE"
                assert all(body == NEWS for _, body in gateway.heard)
            await registrar.leave()
            await asyncio.sleep(0.1)
            assert [heard[0] for heard in first.heard].count("DELETE") == 1

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_registration_is_retried_after_a_failure() -> None:
    async def main() -> None:
        async with Gateway() as gateway:
            gateway.status = 503
            registrar = Registrar([gateway.url, "http://127.0.0.1:1"], lambda: NEWS, "s", heartbeat_s=0.01)
            registrar.start()
            await until(lambda: len(gateway.heard) > 2)
            gateway.status = 200
            count = len(gateway.heard)
            await until(lambda: len(gateway.heard) > count + 3)
            await registrar.leave()

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_the_worker_follows_its_file_of_gateways(tmp_path: Path) -> None:
    file = tmp_path / "gateways"

    async def main() -> None:
        async with Gateway() as fixed, Gateway() as old, Gateway() as new:
            file.write_text(f"{old.url}\n")
            registrar = Registrar([fixed.url], lambda: NEWS, "s", heartbeat_s=0.01, gateway_file=file)
            registrar.start()
            await until(lambda: len(old.heard) > 1)
            file.write_text("no URL\n")  # the gateways that are known stay
            count = len(old.heard)
            await until(lambda: len(old.heard) > count + 2)
            file.write_text(f"{new.url}/\n")
            await until(lambda: len(new.heard) > 1 and old.heard[-1][0] == "DELETE")
            count = len(old.heard)
            await registrar.leave()
            assert len(old.heard) == count
            assert new.heard[-1][0] == fixed.heard[-1][0] == "DELETE"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "cannot be read"), ("10.0.0.7:8000", "expected a URL such as http://")]
)
def test_a_wrong_file_of_gateways_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    file = tmp_path / "gateways"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"--gateway-file {file}.*{complaint}"):
        listed_gateways(file)


def test_without_gateways_nothing_happens() -> None:
    async def main() -> None:
        registrar = Registrar([], lambda: NEWS)
        registrar.start()
        await registrar.leave()

    asyncio.run(main())
