from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from stoker.base.errors import ConfigError, StokerError
from stoker.base.ids import WorkerId
from stoker.cli.main import main
from stoker.fleet.fleet import FleetSettings
from stoker.fleet.spec import LoadReport, Role, WorkerSpec
from stoker.replay.mooncake_export import mooncake_lines
from stoker.replay.recorder import (
    RecordedFleet,
    RecordedIndex,
    RecordedIndexes,
    RecordedLoadBook,
    RecordedRouter,
    Recorder,
)
from stoker.replay.recording_file import RecordingWriter, read_recording
from stoker.replay.replayer import Replayer
from stoker.routing.query import RouteQuery
from stoker.routing.settings import RouterSettings

POLICIES = ["cost", "least_tokens", "round_robin", "random", "consistent_hash"]
BLOCK = 16


class EventList(list[list[Any]]):
    def write(self, event: list[Any]) -> None:
        self.append(json.loads(json.dumps(event)) if event[0] != "keys" else event)


def header(policy: str) -> dict[str, Any]:
    return {"router": {"policy": policy}, "fleet": {}, "index_blocks": 2000}


def record(sink: Any, seed: int, policy: str, num_events: int = 400) -> None:
    """Do everything that a gateway does with these classes, in random order."""
    rng = random.Random(seed)
    recorder = Recorder(sink)
    fleet, book, indexes = (
        RecordedFleet(recorder, FleetSettings()),
        RecordedLoadBook(recorder),
        RecordedIndexes(recorder, 2000),
    )
    router = RecordedRouter(recorder, fleet, book, indexes, RouterSettings(policy=policy))
    names = [WorkerId(f"w{i}") for i in range(6)]
    roles = [Role.UNIFIED] * 6 if rng.random() < 0.5 else [Role.PREFILL, Role.DECODE, Role.DECODE, Role.UNIFIED] * 2
    now, routes, sessions = 100.0, [], {f"s{i}": [rng.getrandbits(60)] for i in range(12)}

    def add(name: WorkerId) -> None:
        role = roles[names.index(name)]
        fleet.add(WorkerSpec(worker_id=name, url=f"http://{name}", role=role, models=("m",), from_config=False), now)
        fleet.saw_probe(name, live=True, ready=True, now=now)

    def change(what: int, name: WorkerId) -> None:
        if what == 0:
            add(name)
        elif what == 1:
            fleet.drain(name, now, rng.random() < 0.5)
        elif what == 2:
            fleet.remove(name, now)
            indexes.forget(name)
            book.forget(name)
        elif what == 3:
            fleet.expire(now, 15.0)
        elif what == 4:
            indexes["m"].cleared(name)
        elif what == 5:
            indexes["m"].set_capacity(name, rng.randrange(50, 500))
        elif what == 6:
            indexes["m"].share(name, {"CPU": "store"})
        elif what == 7:
            fleet.set_role(name, rng.choice(list(Role)), now)
        else:
            book.reserve(name, prefill_tokens=9, context_tokens=9, output_tokens=9, now=now)

    for name in names[:4]:
        add(name)
    for _ in range(num_events):
        now += rng.expovariate(20.0)
        name = rng.choice(names)
        kind = rng.random()
        if kind < 0.45:
            session = rng.choice(list(sessions))
            keys = sessions[session]
            keys.extend(rng.getrandbits(60) for _ in range(rng.randrange(4)))
            query = RouteQuery(
                model="m",
                keys=list(keys),
                block_tokens=BLOCK,
                num_tokens=len(keys) * BLOCK + rng.randrange(1, BLOCK),
                max_output_tokens=rng.choice([None, 5, 5000]),
                session=session if rng.random() < 0.5 else None,
                excluded=frozenset(rng.sample(names, rng.randrange(2))),
            )
            if rng.random() < 0.5:
                query.matches = indexes["m"].match(query.keys)
            try:
                routes.append(router.route(query, now))
            except StokerError:
                continue
            recorder_counts = (query.num_tokens, 0, rng.randrange(1, 50))
            recorder.answered(routes[-1], now, *recorder_counts, 0.1)
        elif kind < 0.6 and routes:
            route = rng.choice(routes)
            worker = route.decode.worker.worker_id
            if rng.random() < 0.5:
                route.first_token(now)
                fleet.saw_first_token(worker, now)
                fleet.saw_prefill(worker, rng.randrange(500, 5000), rng.uniform(0.01, 1))
            else:
                route.end(now)
                routes.remove(route)
                fleet.saw_success(worker, now)
        elif kind < 0.75:
            stored = rng.choice(list(sessions.values()))
            part = stored[: rng.randrange(len(stored) + 1)]
            (indexes["m"].stored if rng.random() < 0.7 else indexes["m"].removed)(
                name, part, rng.choice(["GPU", "CPU"])
            )
        elif kind < 0.85:
            fleet.saw_report(name, LoadReport(kv_used=rng.random(), waiting_tokens=rng.randrange(9000)), now)
        elif kind < 0.9:
            fleet.saw_failure(name, now, rng.choice(["connect", "busy", "timeout"]))
        elif kind < 0.93:
            book.load(name, now, 5000.0)  # as /metrics does
            fleet.pool("m", now)
        else:
            change(rng.randrange(9), name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_decision_is_made_again(seed: int, policy: str) -> None:
    events = EventList()
    record(events, seed, policy)
    replayer = Replayer(header(policy))
    replayer.run(events)
    assert replayer.summary.num_decisions > 50
    assert replayer.summary.first_different == ""
    assert replayer.summary.num_different == 0


READERS = {
    *(
        "candidates",
        "in_service",
        "member",
        "members",
        "models",
        "prefill_rate",
        "step_s",
        "usable_in_s",
    ),  # of the fleet
    *("changes_by_reading", "totals"),  # of the load book
    *("branches", "evicting", "num_confirmed"),  # of an index
}
ONLY_THE_ROUTER_CALLS = {"begin_request", "loads", "routed", "take_changed"}


@pytest.mark.parametrize("recorded", [RecordedFleet, RecordedLoadBook, RecordedIndex], ids=lambda one: one.__name__)
def test_every_method_that_changes_something_is_recorded(recorded: type) -> None:
    (plain,) = recorded.__bases__
    public = {name for name in vars(plain) if not name.startswith("_")}
    assert public - set(vars(recorded)) - READERS - ONLY_THE_ROUTER_CALLS == set()


def test_a_missing_event_is_noticed() -> None:
    events = EventList()
    record(events, 1, "cost")
    without = [event for event in events if event[0] not in ("stored", "report")]
    replayer = Replayer(header("cost"))
    replayer.run(without)
    assert replayer.summary.num_different > 0
    assert "was recorded" in replayer.summary.first_different


def test_a_file_has_no_text_and_gives_the_same_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    writer = RecordingWriter(path, 1 << 24, header("cost"))
    record(writer, 3, "cost")
    writer.close()
    assert not writer.stopped
    _, events = read_recording(path)
    assert not any("s11" in str(event) for event in events), "a session's name was recorded"
    assert main(["trace", "replay", str(path)]) == 0
    assert "(100.00%) as recorded" in capsys.readouterr().out
    assert main(["trace", "replay", str(path), "--policy", "round_robin"]) == 0
    assert "first different" in capsys.readouterr().out
    exported = tmp_path / "trace.jsonl"
    assert main(["trace", "export", str(path), "--output", str(exported)]) == 0
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    assert rows[0]["timestamp"] == 0
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 512) for row in rows)


def test_equal_prompts_have_equal_block_ids_and_others_have_not() -> None:
    events = EventList()
    record(events, 5, "cost", 800)
    replayer = Replayer(header("cost"))
    requests = replayer.run(events)
    answered = [one for one in requests if one.output_tokens is not None and not one.is_retry]
    rows = [json.loads(line) for line in mooncake_lines(requests)]
    other, other_row = answered[0], rows[0]
    for one, row in zip(answered, rows, strict=True):
        same = one.query.keys[:32] == other.query.keys[:32] and min(one.query.num_tokens, other.query.num_tokens) >= 512
        if same:
            assert row["hash_ids"][0] == other_row["hash_ids"][0]
        elif one.query.keys[:1] != other.query.keys[:1]:
            assert row["hash_ids"][0] != other_row["hash_ids"][0]


def test_a_cut_file_is_read_up_to_its_last_frame(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    writer = RecordingWriter(path, 1 << 24, header("cost"))
    writer.write(["remove", 1.0, "w1"])
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole + (100).to_bytes(4, "big") + whole[-20:])
    assert list(read_recording(path)[1]) == [["remove", 1.0, "w1"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a recording"),
        (b"something else entirely", "is not a recording"),
        (b"stoker-recording\n", "version no header"),
        (b"stoker-recording\n\xff\xff\xff\xff", "is damaged"),
        (b"stoker-recording\n\x00\x00\x00\x02ab", "is damaged"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_recording(path)


def test_a_full_file_stops_the_recording_and_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    writer = RecordingWriter(path, 20_000, header("cost"))
    for seed in range(12):
        record(writer, seed, "cost")
    writer.close()
    assert writer.stopped == "the file has reached its maximum size"
    assert path.stat().st_size < 21_000
    list(read_recording(path)[1])


def test_an_existing_file_and_an_unknown_policy_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="give it a new file"):
        RecordingWriter(path, 1000, {})
    assert path.read_text() == "mine"
    assert main(["trace", "replay", str(path), "--policy", "best"]) == 2
    assert "choose one of consistent_hash, cost" in capsys.readouterr().err
