"""The follower of the autoscaler on a virtual clock: each wish is carried out once, whatever happens to gateway and workers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.proto.admin_api import ScaleWishes, StartWish
from stoker.up.scale_follower import BringWorker, ReleaseWorker, ScaleFollower, SeenWorker, Tell, WorkerSlot
from stoker.up.supervisor import Phase


class Fleet:
    """Slots that do what the follower says, and a gateway that sees those that are ready."""

    def __init__(self, num_decode: int = 1, num_spare: int = 3) -> None:
        self.now = 0.0
        self.follower = ScaleFollower()
        self.slots = {
            f"decode-{i}": WorkerSlot(
                f"decode-{i}", "decode", Phase.READY if i < num_decode else Phase.UNUSED, f"127.0.0.1:{9000 + i}"
            )
            for i in range(num_decode + num_spare)
        }
        self.seen = {slot.worker: SeenWorker() for slot in self.slots.values() if slot.phase is Phase.READY}
        self.counted: list[str] | None = None
        self.board = "a"
        self.starts: list[StartWish] = []
        self.stops: list[str] = []
        self.brought: list[str] = []
        self.released: list[str] = []
        self.told: list[str] = []

    def wish(self, role: str = "decode") -> None:
        number = max((one.number for one in self.starts), default=0) + 1
        self.starts.append(StartWish(number=number, role=role))

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        wishes = ScaleWishes(mode="on", board=self.board, starts=self.starts, stops=self.stops, counted=self.counted)
        for step in self.follower.follow(wishes, list(self.slots.values()), self.seen, self.now):
            match step:
                case BringWorker(name=name):
                    assert self.slots[name].phase is Phase.UNUSED
                    self.set(name, Phase.STARTING)
                    self.brought.append(name)
                case ReleaseWorker(name=name):
                    assert self.slots[name].phase not in (Phase.UNUSED, Phase.STOPPING)
                    self.set(name, Phase.STOPPING)
                    self.released.append(name)
                case Tell(text=text):
                    self.told.append(text)

    def set(self, name: str, phase: Phase) -> None:
        self.slots[name] = replace(self.slots[name], phase=phase)

    def ready(self, name: str) -> None:
        self.set(name, Phase.READY)
        self.seen[self.slots[name].worker] = SeenWorker()

    def fails(self, name: str) -> None:
        slot = self.slots[name]
        self.slots[name] = replace(
            slot, phase=Phase.UNUSED, start_failures=slot.start_failures + 1, start_failure="it exited with code 1"
        )

    def ended(self, name: str) -> None:
        self.set(name, Phase.UNUSED)
        self.seen.pop(self.slots[name].worker, None)

    def restart_gateway(self) -> None:
        self.board += "'"
        self.starts, self.stops = [], []


def test_a_wish_starts_one_worker_once() -> None:
    fleet = Fleet()
    fleet.wish()
    for _ in range(5):
        fleet.step()
    assert fleet.brought == ["decode-1"]
    fleet.ready("decode-1")
    fleet.step()
    assert fleet.brought == ["decode-1"], "the gateway may list the wish for another moment"
    fleet.wish()
    fleet.step()
    assert fleet.brought == ["decode-1", "decode-2"]


def test_a_restarted_gateway_gets_the_worker_that_is_already_on_its_way() -> None:
    fleet = Fleet()
    fleet.wish()
    fleet.step()
    fleet.restart_gateway()
    fleet.wish()
    fleet.step()
    fleet.step()
    assert fleet.brought == ["decode-1"]
    fleet.wish()
    fleet.step()
    assert fleet.brought == ["decode-1", "decode-2"], "a second wish is another worker"


def test_a_wish_made_just_before_a_worker_joined_a_new_gateway_is_not_another_one() -> None:
    """The worker serves already, but the decision that made the wish had not counted it."""
    fleet = Fleet()
    fleet.wish()
    fleet.step()
    fleet.restart_gateway()
    fleet.wish()
    fleet.ready("decode-1")
    fleet.counted = [fleet.slots["decode-0"].worker]
    fleet.step()
    assert fleet.brought == ["decode-1"]
    fleet.counted, fleet.starts = list(fleet.seen), []
    fleet.step()
    fleet.starts = [StartWish(number=2, role="decode")]
    fleet.step()
    assert fleet.brought == ["decode-1", "decode-2"]


def test_a_new_gateway_that_does_not_know_all_running_workers_starts_no_other() -> None:
    """Workers register with it one by one. One that never does is replaced after a time."""
    fleet = Fleet(num_decode=2)
    fleet.counted = list(fleet.seen)
    fleet.step()
    fleet.restart_gateway()
    fleet.counted = [fleet.slots["decode-1"].worker]
    fleet.wish()
    fleet.step()
    assert fleet.brought == []
    fleet.step(60.0)
    fleet.starts = [StartWish(number=2, role="decode")]
    fleet.step()
    assert fleet.brought == ["decode-2"]


def test_a_wish_that_ran_out_while_its_worker_starts_is_not_doubled() -> None:
    fleet = Fleet()
    fleet.wish()
    fleet.step()
    fleet.starts = [StartWish(number=2, role="decode")]
    fleet.step()
    assert fleet.brought == ["decode-1"]


def test_a_worker_that_cannot_start_is_tried_again_after_growing_pauses() -> None:
    fleet = Fleet()
    fleet.wish()
    times = []
    for _ in range(1200):
        before = len(fleet.brought)
        fleet.step()
        if len(fleet.brought) > before:
            times.append(fleet.now)
            fleet.fails(fleet.brought[-1])
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert 4 <= len(times) <= 9
    assert pauses == sorted(pauses)
    assert pauses[0] >= 5.0
    assert pauses[-1] >= 300.0
    assert fleet.told[1] == (
        "decode-1: the autoscaler wanted it, but it exited with code 1; the next try is not before 5 s"
    )


def test_nothing_is_tried_again_when_the_wish_has_gone() -> None:
    fleet = Fleet()
    fleet.wish()
    fleet.step()
    fleet.fails("decode-1")
    fleet.starts = []
    for _ in range(100):
        fleet.step(10.0)
    assert fleet.brought == ["decode-1"]


def test_a_wish_beyond_the_bounds_is_reported_once() -> None:
    fleet = Fleet(num_spare=0)
    fleet.wish()
    fleet.wish("prefill")
    for _ in range(5):
        fleet.step()
    assert fleet.brought == []
    assert len(fleet.told) == 2
    assert 'raise max_count of [[workers]] with role = "decode"' in fleet.told[0]


def test_a_worker_ends_when_it_is_drained_and_empty() -> None:
    fleet = Fleet(num_decode=2)
    worker = fleet.slots["decode-1"].worker
    fleet.stops = [worker]
    fleet.seen[worker] = SeenWorker(3, draining=True)
    fleet.step()
    assert fleet.released == []
    fleet.seen[worker] = SeenWorker(0, draining=True)
    fleet.step()
    fleet.step()
    assert fleet.released == ["decode-1"]
    fleet.ended("decode-1")
    for _ in range(5):  # the gateway lists it until its next decision
        fleet.step()
    assert not [one for one in fleet.told if "no worker of this fleet" in one]
    fleet.stops = []
    fleet.wish()
    fleet.step()
    assert fleet.brought == ["decode-1"], "its place can be used again"
    fleet.ready("decode-1")
    fleet.stops, fleet.starts = [worker], []
    fleet.seen[worker] = SeenWorker(0, draining=True)
    fleet.step()
    assert fleet.released == ["decode-1", "decode-1"]
    assert len([one for one in fleet.told if "ending it" in one]) == 2


def test_a_worker_whose_requests_do_not_move_ends_after_a_while() -> None:
    fleet = Fleet(num_decode=2)
    worker = fleet.slots["decode-1"].worker
    fleet.stops = [worker]
    fleet.seen[worker] = SeenWorker(1, draining=True)
    for _ in range(59):
        fleet.step(10.0)
    assert fleet.released == []
    for _ in range(5):
        fleet.step(10.0)
    assert fleet.released == ["decode-1"]
    assert "although 1 requests run there" in fleet.told[-1]


def test_a_worker_that_the_operator_took_back_is_not_ended() -> None:
    fleet = Fleet(num_decode=2)
    worker = fleet.slots["decode-1"].worker
    fleet.stops = [worker]
    fleet.seen[worker] = SeenWorker(1, draining=True)
    fleet.step()
    fleet.seen[worker] = SeenWorker(0, draining=False)
    for _ in range(100):
        fleet.step(10.0)
    assert fleet.released == []


def test_a_drained_worker_ends_although_its_gateway_was_restarted() -> None:
    fleet = Fleet(num_decode=2)
    worker = fleet.slots["decode-1"].worker
    fleet.stops = [worker]
    fleet.seen[worker] = SeenWorker(2, draining=True)
    fleet.step()
    fleet.restart_gateway()
    fleet.seen[worker] = SeenWorker(0, draining=True)
    fleet.step()
    assert fleet.released == ["decode-1"]


def test_a_worker_of_another_fleet_is_named_once() -> None:
    fleet = Fleet()
    fleet.stops = ["10.0.0.9:8000"]
    for _ in range(3):
        fleet.step()
    assert fleet.released == []
    assert fleet.told == ["the autoscaler wants 10.0.0.9:8000 to end, which is no worker of this fleet"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_fleet_never_gets_more_workers_than_were_wished(seed: int) -> None:
    """Whatever fails, ends or restarts, there are at most as many new workers as one gateway has asked for at a time."""
    rng, fleet = random.Random(seed), Fleet(num_decode=1, num_spare=5)
    for _ in range(80):
        names = list(fleet.slots)
        starting = [name for name in names if fleet.slots[name].phase is Phase.STARTING]
        # A gateway expects one worker for each wish, so at no time are there more on their way.
        match rng.randrange(6):
            case 0 if len(fleet.starts) < 2:
                fleet.wish()
            case 1:
                fleet.restart_gateway()
            case 2 if starting:
                fleet.ready(rng.choice(starting))
                fleet.starts = fleet.starts[1:]
            case 3 if starting:
                fleet.fails(rng.choice(starting))
            case 4:
                for name in names:
                    if fleet.slots[name].phase is Phase.STOPPING:
                        fleet.ended(name)
        fleet.step(rng.choice((1.0, 30.0)))
        assert sum(fleet.slots[name].phase is Phase.STARTING for name in names) <= 2
