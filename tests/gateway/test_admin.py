"""/admin/*: disabled without its token; shows and changes the fleet with it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from stoker.base.errors import InvalidRequest, NotFound, Overloaded
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Fleet
from stoker.fleet.load_book import LoadBook
from stoker.fleet.spec import LoadReport, WorkerSpec
from stoker.gateway.admin import AdminEndpoint, AdminView
from stoker.gateway.admission.admission import Admission
from stoker.gateway.admission.admission_settings import AdmissionSettings
from stoker.gateway.admission.api_keys import AdminToken, Caller
from stoker.gateway.admission.capacity import Capacities
from stoker.gateway.admission.prices import PriceList
from stoker.gateway.api.reply import Reply
from stoker.gateway.doctor.miss_parts import MissPart
from stoker.gateway.doctor.miss_totals import MissTotals
from stoker.gateway.duties import Duties
from stoker.gateway.key_settings import PriceSettings
from stoker.gateway.path.dialects.dialect import resuming_dialects
from stoker.gateway.path.moves import Moves
from stoker.gateway.path.upstream import Upstreams
from stoker.gateway.upgrades import UpgradeBoard
from stoker.proto.admin_api import GatewayStatus, ScaleWishes
from stoker.routing.query import RouteQuery
from stoker.routing.router import PrefixIndexes, Router

TOKEN = "the-admin-token-of-tests"


class Asked:
    def __init__(self, method: str, path: str, query: str = "", body: bytes = b"", token: str | None = TOKEN) -> None:
        self.method = method.encode()
        self.path = path.encode()
        self.query = query.encode()
        self.body = body
        self._token = token

    def header(self, name: bytes) -> bytes | None:
        return f"Bearer {self._token}".encode() if self._token and name == b"authorization" else None


class World:
    """Two workers of model "m", with the clock fixed at 100 s."""

    def __init__(self, token: str | None = TOKEN) -> None:
        self.now = 100.0
        self.fleet, self.ledger = Fleet(), LoadBook()
        self.router = Router(self.fleet, self.ledger, PrefixIndexes())
        for name in ("a:1", "b:2"):
            self.add(WorkerSpec(worker_id=WorkerId(name), url=f"http://{name}", models=("m",)))
        capacities = Capacities(self.fleet, AdmissionSettings())
        clock = lambda: self.now  # noqa: E731
        self.admission = Admission(AdmissionSettings(), capacities.capacity, clock=clock, lane=capacities.lane)
        status = lambda: GatewayStatus(version="x")  # noqa: E731
        self.misses = MissTotals(
            PriceList([PriceSettings(model="m", input=2.0, output=8.0, cached_input=0.5)]), "EUR", 50.0
        )
        wishes = lambda: ScaleWishes(mode="off")  # noqa: E731
        duties = Duties(self.fleet, Moves(self.fleet, Upstreams(), clock, resuming_dialects()), clock)
        view = AdminView(
            self.fleet,
            self.ledger,
            self.router,
            self.admission,
            self,
            duties,
            UpgradeBoard(clock, "board"),
            wishes,
            clock,
            status,
            self.misses.report,
        )
        self.admin = AdminEndpoint(AdminToken([] if token is None else [token]), view)

    def add(self, spec: WorkerSpec) -> None:
        self.fleet.add(spec, self.now)

    def remove(self, worker_id: WorkerId, *, moves: bool = False) -> None:
        self.fleet.remove(worker_id, self.now)

    def reply(self, *args: Any, **more: Any) -> Reply:
        return asyncio.run(self.admin.answer(Asked(*args, **more)))

    def ask(self, *args: Any, **more: Any) -> Any:
        reply = self.reply(*args, **more)
        assert reply.status == 200, reply.body
        return msgspec.json.decode(reply.body)


@pytest.mark.parametrize("path", ["/admin/fleet", "/admin/workers", "/admin/nothing"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN.upper()])
def test_every_path_needs_the_token(path: str, token: str | None) -> None:
    reply = World().reply("GET", path, token=token)
    assert reply.status == 401
    assert b"a:1" not in reply.body


def test_without_a_configured_token_there_is_no_admin_api() -> None:
    assert World(token=None).reply("GET", "/admin/fleet").status == 404


def test_wrong_paths_and_methods() -> None:
    world = World()
    assert world.reply("GET", "/admin/nothing").status == 404
    refused = world.reply("GET", "/admin/drain", "worker=a:1")
    assert refused.status == 405
    assert dict(refused.headers)[b"allow"] == b"POST"


def test_the_fleet_is_shown() -> None:
    world = World()
    world.fleet.saw_report(WorkerId("a:1"), LoadReport(waiting_tokens=7, kv_used=0.5, prefill_tokens_per_s=123.0), 99.0)
    workers = {worker["worker"]: worker for worker in world.ask("GET", "/admin/fleet")["workers"]}
    assert set(workers) == {"a:1", "b:2"}
    first = workers["a:1"]
    assert (first["usable"], first["breaker"], first["models"], first["role"]) == (True, "closed", ["m"], "unified")
    assert first["report"]["waiting_tokens"] == 7
    assert first["report_age_s"] == 1.0
    assert first["prefill_tokens_per_s"] == 123.0
    assert workers["b:2"]["report"] is None
    assert world.ask("GET", "/admin/status")["version"] == "x"


def test_routes_come_with_their_reasons_and_reservations_show_until_they_end() -> None:
    world = World()
    query = RouteQuery(model="m", keys=[1, 2], block_tokens=16, num_tokens=40, session="s")
    route = world.router.route(query, world.now)
    world.now += 2
    (shown,) = world.ask("GET", "/admin/routes", "n=5")["routes"]
    assert shown["age_s"] == 2
    assert shown["decode"] == route.decode.worker.worker_id
    assert {reason["worker"] for reason in shown["reasons"]} == {"a:1", "b:2"}
    assert world.ask("GET", "/admin/ledger")["reserved"]["requests"] == 1
    route.end(world.now)
    assert world.ask("GET", "/admin/ledger") == {
        "reserved": {"prefill_tokens": 0, "context_tokens": 0, "output_tokens": 0, "requests": 0},
        "admitted": {"requests": 0, "prefill_tokens": 0},
        "waiting": 0,
    }


def test_queues_are_shown() -> None:
    world = World()
    got = world.admission.claim(Caller("k", "t"))
    asyncio.run(world.admission.enter(got, 50, lane="m"))
    (queue,) = world.ask("GET", "/admin/queues")["queues"]
    assert (queue["lane"], queue["in_flight"], queue["prefill_tokens_in_flight"]) == ("m", 1, 50)
    assert queue["capacity_requests"] == 1024
    assert queue["capacity_prefill_tokens"] is None
    got.done()


def test_a_role_is_changed_and_wrong_ones_are_refused() -> None:
    world = World()
    assert world.ask("POST", "/admin/role", "worker=a:1&role=decode")["role"] == "decode"
    for query, param in (("role=chief", "role"), ("", "role"), ("role=decode&move=yes", "move")):
        with pytest.raises(InvalidRequest) as refused:
            world.reply("POST", "/admin/role", f"worker=a:1&{query}")
        assert refused.value.param == param


def test_a_worker_is_drained_and_comes_back() -> None:
    world = World()
    assert world.ask("POST", "/admin/drain", "worker=a:1")["draining"]
    assert [worker["usable"] for worker in world.ask("GET", "/admin/fleet")["workers"]] == [False, True]
    assert not world.ask("POST", "/admin/undrain", "worker=a:1")["draining"]
    assert all(worker["usable"] for worker in world.ask("GET", "/admin/fleet")["workers"])


def test_workers_are_added_and_removed() -> None:
    world = World()
    body = b'{"url": "http://c:3", "role": "decode", "models": ["m"], "weight": 2, "events": null}'
    added = world.ask("POST", "/admin/workers", body=body)
    assert (added["worker"], added["role"], added["weight"]) == ("c:3", "decode", 2)
    assert world.ask("DELETE", "/admin/workers", "worker=c:3") == {"worker": "c:3", "removed": True}
    assert world.fleet.member(WorkerId("c:3")) is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"url": 3}', b'{"url": "nowhere"}', b'{"url": "http://c:3", "role": "boss"}',
             b'{"url": "http://c:3", "api_key_file": "/etc/passwd"}', b'{"url": "http://c:3", "wieght": 2}']
)  # fmt: skip
def test_a_wrong_worker_is_refused(body: bytes) -> None:
    world = World()
    with pytest.raises(InvalidRequest):
        world.reply("POST", "/admin/workers", body=body)
    assert len(world.fleet.members()) == 2


def test_an_unknown_worker_is_answered_with_the_known_ones() -> None:
    world = World()
    with pytest.raises(NotFound, match="workers are: a:1, b:2"):
        world.reply("POST", "/admin/drain", "worker=z:9")
    with pytest.raises(InvalidRequest):
        world.reply("POST", "/admin/drain")
    with pytest.raises(InvalidRequest):
        world.reply("GET", "/admin/routes", "n=-1")


def test_misses_are_shown_by_key_and_reason_with_their_cost() -> None:
    world = World()
    world.misses.add(
        "key", "tenant", "m", 3_000_000, 1_000_000, [MissPart("new", 500_000), MissPart("evicted", 1_500_000, "3s")]
    )
    world.misses.add("key", "tenant", "m", 1_000_000, 0, [MissPart("changed", 1_000_000, "message 1234")])
    world.misses.add("other", "tenant", "free", 10, 0, [MissPart("first_turn", 10)])
    found = world.ask("GET", "/admin/misses", query="key=key")
    assert (found["since_s"], found["currency"]) == (50.0, "EUR")
    [key] = found["keys"]
    assert (key["key"], key["requests"], key["prompt_tokens"], key["cached_tokens"]) == ("key", 2, 4_000_000, 1_000_000)
    assert [(one["reason"], one["place"], one["tokens"], one["cost"], one["extra_cost"]) for one in key["reasons"]] == [
        ("evicted", "", 1_500_000, "3.00", "2.25"),
        ("changed", "message 100+", 1_000_000, "2.00", "1.5"),
        ("new", "", 500_000, "1.00", "0.75"),
    ]
    assert len(world.ask("GET", "/admin/misses")["keys"]) == 2


def test_the_misses_of_many_keys_are_bounded() -> None:
    totals = MissTotals(PriceList(), "EUR", 0.0)
    for number in range(5000):
        totals.add(f"key {number}", "tenant", "m", 1, 0, [MissPart("new", 1)])
    found = totals.report()
    assert len(found.keys) == 4097
    assert sum(one.prompt_tokens for one in found.keys) == 5000


def test_an_upgrade_is_asked_for_held_and_released() -> None:
    world = World()
    assert world.ask("POST", "/admin/upgrade", "worker=b:2")["workers"] == ["b:2"]
    with pytest.raises(NotFound, match="no worker 'z:9'"):
        world.reply("POST", "/admin/upgrade", "worker=z:9")
    assert world.ask("POST", "/admin/upgrade/hold", "holder=me&line=a%3A1%3A+empty")["running"]
    with pytest.raises(Overloaded, match="Another upgrade"):
        world.reply("POST", "/admin/upgrade/hold", "holder=you")
    for query in ("", "holder=", "holder=" + "x" * 200):
        with pytest.raises(InvalidRequest, match="1 to 128 characters"):
            world.reply("POST", "/admin/upgrade/hold", query)
    seen = world.ask("GET", "/admin/upgrade", "follows=1")
    assert (seen["number"], seen["followed"], seen["lines"]) == (1, True, ["a:1: empty"])
    assert world.ask("POST", "/admin/upgrade/release", "holder=me&outcome=done")["outcome"] == "done"
    assert world.reply("POST", "/admin/upgrade", token="wrong").status == 401
