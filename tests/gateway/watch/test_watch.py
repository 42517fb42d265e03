"""Watching workers over real sockets: Stoker workers with their real app, foreign engines with mocks."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import types
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from mocks import JSON, MockWorker, Script, hangs
from test_event_following import Foreign, stored
from tiny_text import make_folder
from waiting import LONG_S, until

from stoker.base.fleet_key import FleetKey
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet, Member
from stoker.fleet.spec import Role, WorkerSpec
from stoker.gateway.api.client_body import EndpointKind, parse
from stoker.gateway.http import HttpRequest
from stoker.gateway.path.dialects.dialect import DIALECTS
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.prefix.conversation_keys import PrefixKeyMakers
from stoker.gateway.prefix.prefix_keys import root_key, token_keys
from stoker.gateway.prefix.token_prefix_keys import TokenPrefixKeys, TokenText
from stoker.gateway.watch import scrape
from stoker.gateway.watch.watchers import Watchers, WatchSettings
from stoker.gateway.watch.worker_signers import WorkerSigners
from stoker.kv.blocks.keys import block_keys
from stoker.kv.blocks.keys import root_key as engine_root
from stoker.proto.messages import BlocksNamed, EngineInfo, EngineStats, KvEvents
from stoker.routing.router import PrefixIndexes
from stoker.text.folder import text_files
from stoker.worker.app import make_app, make_runner
from stoker.worker.config import HttpConfig
from stoker.worker.context import CONTEXT, ModelText
from stoker.worker.fleet_side import worker_report
from stoker.worker.identity import Identity, new_worker_id
from stoker.worker.report import Reporter
from stoker.worker.state import ServerState

W = WorkerId("w")
BLOCK = 16
QUICK = WatchSettings(probe_s=0.02, connect_s=LONG_S, answer_s=LONG_S, learn_s=0.1)
# One late health check may be this machine's fault; five in a row are not.
HURRIED = replace(QUICK, answer_s=0.3, late_probes=5)

OLD, NEW = "the old secret of this fleet", "the new secret of this fleet"


class World:
    def __init__(self, settings: WatchSettings = QUICK, **more: Any) -> None:
        self.fleet = Fleet()
        self.indexes = PrefixIndexes()
        self.makers = PrefixKeyMakers()
        self.lost: list[WorkerId] = []
        self.moving: list[WorkerId] = []
        self.roles: list[tuple[WorkerId, Role]] = []
        self.watchers = Watchers(
            self.fleet,
            self.indexes,
            self.makers,
            settings,
            on_lost=self.lost.append,
            on_moving=self.moving.append,
            on_role=lambda worker_id, role: self.roles.append((worker_id, role)),
            clock=self.now,
            **more,
        )

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def watch(self, url: str, **more: Any) -> Member:
        spec = WorkerSpec(worker_id=W, url=url, **more)
        member = self.fleet.add(spec, self.now())
        self.watchers.start(spec, DIALECTS.get(spec.dialect).load_probe)
        return member

    @property
    def is_usable(self) -> bool:
        member = self.fleet.member(W)
        return member is not None and member.health.usable(self.now())

    async def close(self) -> None:
        await self.watchers.close()
        self.makers.close()


class Ours:
    """A Stoker worker's real app and reporter, without an engine."""

    def __init__(self, folder: Path, port: int = 0, **identity: Any) -> None:
        self.text = ModelText.from_folder(folder)
        secret = identity.get("secret")
        self.reporter = Reporter("127.0.0.1", key=None if secret is None else FleetKey(secret))
        self.port = port
        info = EngineInfo(
            model_fingerprint="f" * 16,
            device="cpu",
            dtype="float32",
            vocab_size=self.text.tokenizer.vocab_size,
            max_model_tokens=4096,
            block_tokens=BLOCK,
            num_blocks=64,
            max_rows=8,
            load_s=0.0,
        )
        stats = EngineStats(
            waiting_sequences=1,
            waiting_tokens=200,
            running_sequences=3,
            free_blocks=16,
            cached_blocks=0,
            num_blocks=64,
            steps=1,
            step_s=0.1,
            prompt_tokens=1,
            computed_tokens=1,
            cached_tokens=0,
            partial_tokens=0,
            generated_tokens=0,
            preemptions=0,
            prefill_tokens_per_s=1234.0,
        )
        self.service: Any = types.SimpleNamespace(
            info=info, ready=True, stats=stats, num_restarts=0, start=_nothing, stop=_nothing
        )
        ports = {"events_port": self.reporter.events_port, "replay_port": self.reporter.replay_port}
        self.identity = Identity(**ports, **identity)
        self.state = ServerState(1.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Ours:
        config = HttpConfig(served_names=("m", "m-alias"))
        app = make_app(self.service, self.text, config, identity=self.identity, state=self.state)
        self.context = app[CONTEXT]
        self._runner = make_runner(app, shutdown_timeout_s=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.reporter.start(lambda number: worker_report(app[CONTEXT], number))
        return self

    def switch(self, names: tuple[str, ...], folder: Path) -> None:
        """Change the model like `ModelSwitch`: to gateways the worker is then a new process."""
        context = self.context
        self.reporter.all_blocks_lost()
        context.text, context.config = ModelText.from_folder(folder), replace(context.config, served_names=names)
        context.identity = replace(context.identity, worker_id=new_worker_id())
        self.reporter.load_changed()

    def compute(self, token_ids: list[int]) -> None:
        """Publish these blocks as if the engine had filled them."""
        full = token_ids[: len(token_ids) // BLOCK * BLOCK]
        keys = block_keys(full, engine_root("model"), BLOCK)
        self.reporter.blocks_changed(KvEvents(events=[BlocksNamed(keys=keys, parent=None, token_ids=full)]))

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self.reporter.stop()


async def _nothing() -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def run(main: Any) -> None:
    uvloop.run(main)


BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "def add(a, b): " * 60}]}).encode()


def test_a_conversation_is_found_where_our_worker_computed_it(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder, secret="s").start()
        world = World(signers=WorkerSigners(FleetKey("s")))
        member = world.watch(worker.url)
        await until(lambda: isinstance(world.makers.exact("m"), TokenPrefixKeys))
        assert member.models == {"m", "m-alias"}
        assert world.is_usable
        found = await world.makers.keys("m", parse(EndpointKind.CHAT, BODY), None)
        assert found.block_tokens == BLOCK
        assert len(found.keys) > 5
        text = worker.text
        prompt = text.template.render([{"role": "user", "content": "def add(a, b): " * 60}])
        worker.compute(text.tokenizer.encode(prompt))
        for model in ("m", "m-alias"):
            await until(lambda model=model: bool(world.indexes[model].match(found.keys)))  # type: ignore[misc]
            assert world.indexes[model].match(found.keys)[W].device_blocks == len(found.keys)
        await until(lambda: member.report is not None)
        assert member.report is not None
        assert (member.report.waiting_tokens, member.report.running_sequences) == (200, 3)
        assert (member.report.kv_used, member.report.prefill_tokens_per_s) == (0.75, 1234.0)
        watcher = world.watchers.stop(W)
        assert watcher is not None
        await watcher.close()
        assert not world.indexes["m"].match(found.keys)
        await world.close()
        await worker.stop()

    run(main())


def test_a_draining_worker_gets_no_requests_and_a_restarted_one_is_read_again(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder).start()
        world = World()
        world.watch(worker.url)
        await until(lambda: world.is_usable and "m" in world.fleet.models())
        worker.state.begin_drain()
        await until(lambda: not world.is_usable)
        assert world.lost == []
        tokens = list(range(64))
        keys = token_keys(array("I", tokens), root_key(None), BLOCK)
        worker.compute(tokens)
        await until(lambda: bool(world.indexes["m"].match(keys)))
        await worker.stop()
        await until(lambda: world.lost == [W])
        again = await Ours(folder, port=worker.port).start()
        await until(lambda: world.is_usable)
        await until(lambda: (info := world.watchers.info(W)) is not None and info.worker_id == again.identity.worker_id)
        await until(lambda: not world.indexes["m"].match(keys))  # the new process has none of the old one's blocks
        again.compute(tokens[:BLOCK])  # and its own events are followed
        await until(lambda: list(world.indexes["m"].match(keys)) == [W])
        await world.close()
        await again.stop()

    run(main())


@pytest.mark.parametrize(
    ("of_worker", "of_gateway"),
    [
        (OLD, f"{OLD}\n{NEW}"),
        (f"{OLD}\n{NEW}", OLD),
        (f"{NEW}\n{OLD}", f"{OLD}\n{NEW}"),
        (f"{OLD}\n{NEW}", f"{NEW}\n{OLD}"),
        (NEW, f"{NEW}\n{OLD}"),
    ],
    ids=[
        "first gateways",
        "then workers",
        "workers sign with the new one",
        "gateways too",
        "workers forget the old one",
    ],
)
def test_the_secret_is_replaced_one_process_at_a_time(folder: Path, of_worker: str, of_gateway: str) -> None:
    """At each stage, requests are signed and proven, and events are followed."""

    async def main() -> None:
        worker = await Ours(folder, secret=of_worker).start()
        world = World(signers=WorkerSigners(FleetKey(of_gateway)))
        world.watch(worker.url)
        await until(lambda: world.is_usable and "m" in world.fleet.models())
        tokens = list(range(64))
        keys = token_keys(array("I", tokens), root_key(None), BLOCK)
        worker.compute(tokens)
        await until(lambda: bool(world.indexes["m"].match(keys)))
        await world.close()
        await worker.stop()

    run(main())


def test_another_secret_is_not_accepted_while_one_is_replaced(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder, secret=f"{OLD}\n{NEW}").start()
        world = World(signers=WorkerSigners(FleetKey("the secret of another fleet")))
        world.watch(worker.url)
        await until(lambda: world.watchers._watchers[W]._state is not None)
        assert not world.is_usable
        await world.close()
        await worker.stop()

    run(main())


def test_a_gateway_follows_the_role_and_the_drain_that_another_one_ordered(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder, role="decode").start()
        world = World()
        world.watch(worker.url)
        await until(lambda: world.is_usable and "m" in world.fleet.models())
        assert world.roles == []  # the role at its start does not count: the configuration does
        context = worker.context
        context.identity = replace(context.identity, role="prefill", role_assigned=True)
        await until(lambda: world.roles[-1:] == [(W, Role.PREFILL)])
        worker.state.begin_drain("operator")
        await until(lambda: not world.is_usable)
        assert world.moving == []
        worker.state.begin_drain("operator", moves=True)
        await until(lambda: W in world.moving)
        await world.close()
        await worker.stop()

    run(main())


@pytest.mark.parametrize("names", [("n",), ("m", "m-alias")])
def test_a_worker_with_another_model_gets_no_request_before_it_is_known(
    folder: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    other = make_folder(tmp_path)
    (other / "chat_template.jinja").write_text("{{ messages }}")

    async def main() -> None:
        worker = await Ours(folder).start()
        world = World(replace(QUICK, probe_s=0.5, learn_s=1000.0))
        member = world.watch(worker.url)
        tokens = list(range(64))
        keys = token_keys(array("I", tokens), root_key(None), BLOCK)
        await until(lambda: world.is_usable and member.models == {"m", "m-alias"})
        before = world.makers.exact("m")
        assert isinstance(before, TokenPrefixKeys)
        worker.compute(tokens)
        await until(lambda: bool(world.indexes["m"].match(keys)))

        worker.switch(names, other)
        await until(lambda: not world.is_usable)
        await until(lambda: world.is_usable)
        assert member.models == set(names)
        assert not world.indexes["m"].match(keys)
        for name in names:
            after = world.makers.exact(name)
            assert isinstance(after, TokenPrefixKeys)
            assert after.digest == worker.context.text.digest != before.digest
        await world.close()
        await worker.stop()

    run(main())


@pytest.mark.parametrize("secret", ["other", None])
def test_a_worker_without_the_fleets_secret_gets_no_requests(folder: Path, secret: str | None) -> None:
    async def main() -> None:
        worker = await Ours(folder, secret=secret).start()
        world = World(signers=WorkerSigners(FleetKey("s")))
        member = world.watch(worker.url)
        await until(lambda: not world.is_usable)
        await asyncio.sleep(0.1)
        assert not world.is_usable
        assert not member.models
        assert world.makers.exact("m") is None
        await world.close()
        await worker.stop()

    run(main())


def test_without_tokenizing_only_the_load_is_listened_to(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder).start()
        world = World(replace(QUICK, tokenize=False))
        member = world.watch(worker.url)
        await until(lambda: member.report is not None)
        assert world.makers.block_tokens("m") == 256
        worker.compute(list(range(64)))
        reported_at = member.reported_at
        await until(lambda: member.reported_at > reported_at)  # reports still arrive, in order after the KV events
        assert len(world.indexes["m"]) == 0
        await world.close()
        await worker.stop()

    run(main())


# ---- foreign engines

MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}
VLLM = b"""# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",num_cpu_blocks="7"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 4.0
sglang:token_usage{model_name="m"} 0.25
sglang:max_total_num_tokens{model_name="m"} 64000.0
"""
LOADS = {
    "loads": [
        {"dp_rank": 0, "num_running_reqs": 1, "num_waiting_reqs": 2, "token_usage": 0.5, "max_total_num_tokens": 6400},
        {"dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.1, "max_total_num_tokens": 6400},
    ]
}


def paths(answers: dict[str, tuple[int, Any]]) -> Script:
    """Answer each path with its entry; other paths are not found."""

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        status, body = answers.get(request.path.decode(), (404, {"detail": "Not Found"}))
        request.respond(status, JSON, body if isinstance(body, bytes) else json.dumps(body).encode())

    return script


def watched(
    script: Script, check: Callable[[World, MockWorker, Member], Any], settings: WatchSettings = QUICK, **spec: Any
) -> None:
    async def main() -> None:
        worker = MockWorker(script)
        await worker.start()
        world = World(settings)
        member = world.watch(worker.url, **spec)
        await check(world, worker, member)
        await world.close()
        await worker.stop()

    run(main())


def test_vllm() -> None:
    async def check(world: World, worker: MockWorker, member: Member) -> None:
        await until(lambda: member.report is not None and bool(member.models))
        assert member.report is not None
        assert (member.report.running_sequences, member.report.waiting_sequences) == (4, 2)
        assert member.report.kv_used == pytest.approx(0.3)
        assert (member.report.num_blocks, member.report.block_tokens) == (2000, 16)
        assert world.indexes["m"]._holders[W].capacity_blocks == 2000 * 16 // 256

    watched(paths({"/health": (200, b""), "/v1/models": (200, MODELS), "/metrics": (200, VLLM)}), check, dialect="vllm")


@pytest.mark.parametrize("page", ["/v1/loads", "/metrics"])
def test_sglang(page: str) -> None:
    async def check(world: World, worker: MockWorker, member: Member) -> None:
        await until(lambda: member.report is not None and bool(member.models))
        assert member.report is not None
        assert member.report.running_sequences == (4 if page == "/v1/loads" else 5)
        assert member.report.waiting_sequences == (2 if page == "/v1/loads" else 4)
        await until(lambda: member.report is not None and member.report.block_tokens == 64)
        assert member.report.num_blocks == (200 if page == "/v1/loads" else 1000)

    answers = {"/health": (200, b""), "/v1/models": (200, MODELS), "/get_server_info": (200, {"page_size": 64})}
    body = LOADS if page == "/v1/loads" else SGLANG
    watched(paths({**answers, page: (200, body)}), check, dialect="sglang")


def test_any_openai_server_is_usable_once_it_lists_its_models() -> None:
    async def check(world: World, worker: MockWorker, member: Member) -> None:
        await until(lambda: member.models == {"m"})
        assert world.is_usable
        assert set(worker.paths) == {"/health", "/v1/models"}

    watched(paths({"/v1/models": (200, MODELS)}), check, dialect="openai")


def test_a_failed_poll_is_repeated_at_the_next_interval() -> None:
    """A worker whose models are unknown gets no requests, so one lost answer must not delay them by `learn_s`."""
    lists = paths({"/health": (200, b""), "/v1/models": (200, MODELS)})
    num_dropped = 0

    async def script(worker: MockWorker, request: HttpRequest) -> None:
        nonlocal num_dropped
        if request.path == b"/v1/models" and num_dropped < 2:
            num_dropped += 1
            request.abort()
        else:
            await lists(worker, request)

    async def check(world: World, worker: MockWorker, member: Member) -> None:
        await until(lambda: member.models == {"m"})

    watched(script, check, replace(QUICK, learn_s=10 * LONG_S), dialect="openai")


def test_configured_models_are_not_overwritten() -> None:
    async def check(world: World, worker: MockWorker, member: Member) -> None:
        await until(lambda: "/v1/models" in worker.paths)
        await asyncio.sleep(0.05)
        assert member.models == {"mine"}

    watched(paths({"/v1/models": (200, MODELS), "/health": (200, b"")}), check, dialect="openai", models=("mine",))


def test_the_api_key_is_shown_and_odd_answers_change_nothing() -> None:
    async def main() -> None:
        worker = MockWorker(paths({"/health": (200, b""), "/v1/models": (200, b"[]"), "/metrics": (200, b"\xff\x00")}))
        await worker.start()
        world = World(api_keys={worker.url: "k"}, signers=WorkerSigners(FleetKey("ours alone")))
        member = world.watch(worker.url, dialect="vllm")
        await until(lambda: worker.paths.count("/metrics") > 2)
        assert all(headers["authorization"] == "Bearer k" for headers in worker.headers)
        assert all("x-stoker-auth" not in headers for headers in worker.headers)
        assert member.report is None
        assert not member.models
        assert world.is_usable
        await world.close()
        await worker.stop()

    run(main())


def test_one_that_is_sick_hangs_or_is_gone_is_seen_so_and_back_again() -> None:
    async def check(world: World, worker: MockWorker, member: Member) -> None:
        well = worker.script
        await until(lambda: world.is_usable and bool(member.models))
        worker.script = paths({"/health": (503, b"")})
        await until(lambda: not world.is_usable)
        assert world.lost == []
        worker.script = well
        await until(lambda: world.is_usable)
        worker.script = hangs()
        await until(lambda: not world.is_usable)
        assert world.lost == [W]
        worker.script = well
        await until(lambda: world.is_usable)
        world.indexes["m"].routed(W, [1, 2, 3], world.now())
        await worker.stop()
        await until(lambda: not world.is_usable)
        assert world.lost == [W, W]
        assert not world.indexes["m"].match([1, 2, 3])  # its cache was lost with the process
        await worker.start()
        await until(lambda: world.is_usable)

    watched(paths({"/health": (200, b""), "/v1/models": (200, MODELS)}), check, HURRIED, dialect="openai")


def test_a_connection_that_does_not_come_in_time_is_late_as_an_answer_is() -> None:
    """This process may have been slow, so only several late checks in a row mean that the worker is down."""

    async def main() -> None:
        world = World(replace(QUICK, connect_s=0.05))
        with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, socket.socket() as filler:
            filler.connect(deaf.getsockname())  # further handshakes are not answered
            world.watch(f"http://127.0.0.1:{deaf.getsockname()[1]}")
            watcher = world.watchers._watchers[W]
            await until(lambda: watcher._num_late == 1, every_s=0.0)
            assert world.is_usable
            await until(lambda: not world.is_usable)
            assert watcher._num_late >= QUICK.late_probes
            await world.close()

    run(main())


def test_a_gateway_out_of_sockets_marks_no_worker_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tries = 0

    async def refused(*_: Any, **__: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async def main() -> None:
        world = World()
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refused)
        world.watch("http://127.0.0.1:1")
        await until(lambda: num_tries > 2 * QUICK.late_probes)
        assert world.is_usable
        assert world.lost == []
        await world.close()

    asyncio.run(main())


def test_events_of_a_foreign_engine_are_followed_once_its_tokenizer_is_known(folder: Path) -> None:
    async def main() -> None:
        engine = Foreign(100, True)
        engine.publish(stored(1, [5, 6, 7, 8]))
        worker = MockWorker(paths({"/health": (200, b""), "/v1/models": (200, MODELS), "/metrics": (200, VLLM)}))
        await worker.start()
        world = World()
        events_url, replay_url = engine.url()
        world.watch(worker.url, dialect="vllm", events_url=events_url, replay_url=replay_url)
        await until(lambda: worker.paths.count("/metrics") > 2)
        assert len(world.indexes["m"]) == 0
        world.makers.set_exact("m", TokenPrefixKeys(TokenText.from_files(text_files(folder)), 4))
        keys = token_keys(array("I", [5, 6, 7, 8]), root_key(None), 4)
        await until(lambda: bool(world.indexes["m"].match(keys)))
        await world.close()
        await worker.stop()
        await engine.close()

    run(main())


@pytest.mark.parametrize(
    "page", [b"", b"{}", b"vllm:num_requests_running x\n", b'{"loads": []}', b'{"loads": 3}', b"\xff"]
)
def test_pages_that_say_nothing(page: bytes) -> None:
    assert scrape.vllm_load(page) is None
    assert scrape.sglang_load(page, 1) is None
    assert scrape.sglang_loads(page, 1) is None
    assert scrape.page_size(page) is None
    assert scrape.model_names(page) is None


def test_numbers_that_no_engine_can_have_are_left_out() -> None:
    page = b'vllm:num_requests_running 3\nvllm:num_requests_waiting{rank="1"} 1e999\nvllm:kv_cache_usage_perc -1\n'
    config = b'vllm:cache_config_info{num_gpu_blocks="%b",block_size="16"} 1\n' % (b"9" * 5000)
    load = scrape.vllm_load(page + config)
    assert load is not None
    assert (load.running_sequences, load.waiting_sequences, load.kv_used, load.num_blocks) == (3, 0, 0.0, None)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_bad_events_address_does_not_disturb_the_gateway(folder: Path, has_tokenizer: bool) -> None:
    async def main() -> None:
        worker = await Ours(folder).start()
        world = World(replace(QUICK, tokenize=has_tokenizer))
        world.watch(worker.url, events_url="tcp://no port")
        await until(lambda: world.is_usable)
        await until(lambda: bool(world.fleet.members()[0].models))
        world.watchers.stop(W)
        sockets = world.watchers._context.zmq_context.get()._sockets
        assert [socket for socket in sockets if not socket.closed] == []  # one that is left open blocks the shutdown
        await world.close()
        await worker.stop()

    run(main())


def test_a_restarted_worker_gets_the_next_request_signed_for_its_new_challenge(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder, secret="s").start()
        signers = WorkerSigners(FleetKey("s"))
        world, upstreams = World(signers=signers), Upstreams(signers=signers)
        member = world.watch(worker.url)
        await until(lambda: world.is_usable and bool(member.models))

        async def models() -> int:
            answer = await upstreams.of(member).pool.send(
                b"GET", b"/v1/models", (), b"", connect_s=LONG_S, head_s=LONG_S
            )
            await answer.read(1 << 16)
            return answer.status

        assert await models() == 200
        world.watchers.stop(W)  # the request path learns the new challenge by itself
        await worker.stop()
        again = await Ours(folder, port=worker.port, secret="s").start()
        assert [await models() for _ in range(3)] == [200] * 3
        upstreams.close()
        await world.close()
        await again.stop()

    run(main())


def test_an_impostor_at_a_workers_address_gets_no_requests(folder: Path) -> None:
    async def main() -> None:
        worker = await Ours(folder, secret="s").start()
        world = World(signers=WorkerSigners(FleetKey("s")))
        world.watch(worker.url)
        await until(lambda: world.is_usable)
        await worker.stop()
        impostor = await Ours(folder, port=worker.port, secret=None).start()
        await until(lambda: not world.is_usable)
        await asyncio.sleep(0.1)
        assert not world.is_usable
        await world.close()
        await impostor.stop()

    run(main())
