"""The supervisor on a virtual clock: made-up processes that come up, hang, crash and end, in any order."""

from __future__ import annotations

import math
import random

import pytest

from stoker.up.supervisor import PartRule, Phase, RestartPolicy, StartFailure, StartPart, StopMode, StopPart, Supervisor

STORE, GATEWAY, PREFILL, DECODE = (
    PartRule("store", 0, 2, 5.0),
    PartRule("gateway", 1, 0, 100.0),
    PartRule("prefill-0", 2, 1, 20.0),
    PartRule("decode-0", 2, 1, 20.0),
)
RULES = (STORE, GATEWAY, PREFILL, DECODE)


class World:
    """Carries out what it is told, and checks that it makes sense."""

    def __init__(self, restart_policy: RestartPolicy | None = None) -> None:
        self.now = 0.0
        self.supervisor = Supervisor(RULES, restart_policy or RestartPolicy())
        self.running: set[str] = set()
        self.been_ready: set[str] = set()
        self.log: list[tuple[str, str]] = []
        self.told: dict[str, int] = {}

    def look(self) -> list[StartPart | StopPart]:
        actions = self.supervisor.actions(self.now)
        for action in actions:
            if isinstance(action, StartPart):
                assert action.name not in self.running, f"{action.name} was started twice"
                assert not self.supervisor.stopping, "nothing is started while all ends"
                rank = self.supervisor.parts[action.name].rule.start_rank
                assert all(rule.name in self.been_ready for rule in RULES if rule.start_rank < rank)
                self.running.add(action.name)
                self.told[action.name] = 0
                self.log.append(("start", action.name))
            else:
                assert action.name in self.running, f"{action.name} does not run"
                assert action.how > self.told[action.name], "it was told so before"
                self.told[action.name] = action.how
                self.log.append((action.how.name.lower(), action.name))
        return actions

    def ready(self, name: str) -> None:
        self.been_ready.add(name)
        self.supervisor.ready(name, self.now)

    def exit(self, name: str, code: int = -9) -> None:
        self.running.remove(name)
        self.supervisor.exited(name, code, self.now)

    def bring_up(self) -> None:
        while not self.supervisor.all_ready:
            for action in self.look():
                assert isinstance(action, StartPart)
                self.ready(action.name)
        self.log.clear()

    def pass_time(self, seconds: float) -> list[StartPart | StopPart]:
        self.now += seconds
        return self.look()

    @property
    def phases(self) -> dict[str, Phase]:
        return {name: part.phase for name, part in self.supervisor.parts.items()}


@pytest.fixture
def world() -> World:
    return World()


def test_ranks_start_one_after_the_other_and_a_rank_at_once(world: World) -> None:
    assert world.look() == [StartPart("store")]
    assert world.look() == []
    world.ready("store")
    assert world.look() == [StartPart("gateway")]
    world.ready("gateway")
    assert world.look() == [StartPart("prefill-0"), StartPart("decode-0")]
    assert not world.supervisor.all_ready
    world.ready("prefill-0")
    world.ready("decode-0")
    assert world.supervisor.all_ready
    assert world.supervisor.next_timeout_s() == math.inf


def test_the_pause_doubles_and_is_reset_after_healthy_uptime(world: World) -> None:
    world.bring_up()
    # Ready for a moment each time: it is useful between its exits, and waits for at most 5 s.
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0):
        world.exit("gateway")
        assert world.supervisor.next_timeout_s() == pytest.approx(world.now + pause_s)
        assert world.pass_time(pause_s - 0.05) == []
        assert world.pass_time(0.06) == [StartPart("gateway")]
        world.pass_time(59)  # however long it takes to start: it was not ready yet
        world.ready("gateway")
    assert world.supervisor.parts["gateway"].restarts == 9
    world.pass_time(10)
    world.exit("gateway")
    assert world.supervisor.next_timeout_s() == pytest.approx(world.now + 0.1), "it was healthy"
    assert world.supervisor.failure is None


def test_a_part_that_is_not_ready_again_backs_off_up_to_the_longest_pause(world: World) -> None:
    world.bring_up()
    for pause_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0):
        world.exit("decode-0")
        assert world.supervisor.next_timeout_s() == pytest.approx(world.now + pause_s)
        assert world.pass_time(pause_s + 0.01) == [StartPart("decode-0")]
    assert world.supervisor.failure is None


def probe(world: World, seconds: float, *silent: str) -> list[tuple[str, str]]:
    """Let all parts be probed for a time. Those in `silent` do not answer. Return what was done."""
    policy = world.supervisor.probes.policy
    until = world.now + seconds
    world.log.clear()
    while world.now < until:
        asked_s = world.now + policy.every_s
        world.now = asked_s + policy.answer_s
        for name in world.running:
            at_s = world.now if name in silent else asked_s + 0.001
            world.supervisor.probed(name, answered=name not in silent, asked_s=asked_s, now=at_s)
        world.look()
        for name in [name for name in world.running if world.told[name] == StopMode.KILL]:
            world.exit(name)
            world.pass_time(0.2)
            world.ready(name)
    return world.log


def test_a_part_that_answers_no_health_check_is_killed_and_restarted(world: World) -> None:
    world.bring_up()
    assert probe(world, 1000) == []
    started_s = world.now
    assert probe(world, 15, "gateway") == [("kill", "gateway"), ("start", "gateway")]
    assert world.now - started_s < 20
    assert world.supervisor.parts["gateway"].hangs == 1


def test_parts_of_an_overloaded_machine_are_not_killed_in_a_loop(world: World) -> None:
    world.bring_up()
    done = probe(world, 1200, *(rule.name for rule in RULES))
    kills = [name for what, name in done if what == "kill"]
    assert 4 <= len(kills) <= 20, "at most one in a minute"
    assert max(kills.count(rule.name) for rule in RULES) <= 7, "10, 20, 40, … s: each gets more time"
    assert probe(world, 1000) == []
    assert len(probe(world, 15, "gateway")) == 2, "forgiven"


@pytest.mark.parametrize("late_s", [3.0, 100.0])
def test_a_supervisor_that_did_not_run_itself_kills_no_part(world: World, late_s: float) -> None:
    world.bring_up()
    probes = world.supervisor.probes
    for _ in range(50):
        asked_s = world.now + probes.policy.every_s + late_s
        world.now = asked_s + probes.policy.answer_s
        world.supervisor.probed("gateway", answered=False, asked_s=asked_s, now=world.now)
        assert world.look() == []
        asked_s = world.now + probes.policy.every_s
        world.now = asked_s + probes.policy.answer_s + late_s
        world.supervisor.probed("gateway", answered=False, asked_s=asked_s, now=world.now)
        assert world.look() == []


def test_a_part_that_crashes_leaves_the_others_alone(world: World) -> None:
    world.bring_up()
    world.exit("store")
    world.pass_time(0.5)
    world.ready("store")
    assert world.log == [("start", "store")]
    assert world.supervisor.all_ready


def test_a_part_that_exits_before_it_was_ready_stops_the_fleet(world: World) -> None:
    for name in ("store", "gateway"):
        world.look()
        world.ready(name)
    world.look()
    world.ready("prefill-0")
    world.exit("decode-0", 2)
    assert world.supervisor.failure == StartFailure("decode-0", "it exited with code 2 before it was ready")
    assert {(action.name, action.how) for action in world.look() if isinstance(action, StopPart)} == {
        (name, StopMode.NOW) for name in ("store", "gateway", "prefill-0")
    }
    for name in list(world.running):
        world.exit(name, 0)
    world.look()
    assert world.supervisor.is_over


def test_a_part_that_is_never_ready_stops_the_fleet_but_a_restarted_one_is_killed() -> None:
    world = World(RestartPolicy(start_s=10))
    world.look()
    assert world.pass_time(10) == [StopPart("store", StopMode.NOW)]
    assert world.supervisor.failure == StartFailure("store", "it was not ready after 10 s")
    world = World(RestartPolicy(start_s=10))
    world.bring_up()
    world.exit("gateway")
    assert world.pass_time(1) == [StartPart("gateway")]
    assert world.pass_time(10) == [StopPart("gateway", StopMode.KILL)]
    assert world.pass_time(10) == []
    world.exit("gateway")
    assert world.supervisor.failure is None
    assert world.pass_time(1) == [StartPart("gateway")]


def test_the_gateway_drains_before_workers_end_and_the_store_is_last(world: World) -> None:
    world.bring_up()
    world.supervisor.stop()
    assert world.look() == [StopPart("gateway", StopMode.DRAIN)]
    assert world.pass_time(50) == []  # it is still finishing requests
    world.exit("gateway", 0)
    assert world.look() == [StopPart("prefill-0", StopMode.DRAIN), StopPart("decode-0", StopMode.DRAIN)]
    world.exit("decode-0", 0)
    assert world.look() == []
    world.exit("prefill-0", 0)
    assert world.look() == [StopPart("store", StopMode.DRAIN)]
    world.exit("store", 0)
    assert world.look() == []
    assert world.supervisor.is_over
    assert world.supervisor.failure is None


def test_a_part_that_does_not_stop_in_time_is_killed(world: World) -> None:
    world.bring_up()
    world.supervisor.stop()
    world.look()
    assert world.supervisor.next_timeout_s() == 100
    assert world.pass_time(100) == [StopPart("gateway", StopMode.KILL)]


def test_no_timeouts_of_workers_are_due_while_the_gateway_drains() -> None:
    """Else whoever carries this out would look again and again, without a pause, for as long as that takes."""
    world = World(RestartPolicy(start_s=10.0))
    world.bring_up()
    world.exit("prefill-0")
    world.exit("decode-0")
    world.pass_time(0.5)  # both start again, and one of them ends again
    world.exit("decode-0")
    world.supervisor.stop()
    assert world.look() == [StopPart("gateway", StopMode.DRAIN)]
    assert world.pass_time(50) == []
    assert world.supervisor.next_timeout_s() == 100.5
    world.exit("gateway", 0)
    assert world.look() == [StopPart("prefill-0", StopMode.DRAIN)]


def test_a_second_and_a_third_stop_are_stronger(world: World) -> None:
    world.bring_up()
    world.exit("decode-0")
    for how, names in ((StopMode.DRAIN, ["gateway"]), (StopMode.NOW, ["gateway", "prefill-0", "store"])):
        world.supervisor.stop()
        assert sorted(world.look(), key=str) == sorted((StopPart(name, how) for name in names), key=str)
    assert world.phases["decode-0"] is Phase.STOPPED
    world.supervisor.stop()
    assert {action.how for action in world.look() if isinstance(action, StopPart)} == {StopMode.KILL}
    world.supervisor.stop()
    assert world.look() == []
    for name in list(world.running):
        world.exit(name)
    assert world.supervisor.is_over


def test_nothing_is_left_after_stopping_in_the_middle_of_a_start(world: World) -> None:
    world.look()
    world.ready("store")
    world.look()
    world.supervisor.stop()
    assert world.look() == [StopPart("gateway", StopMode.DRAIN)]
    world.exit("gateway", 130)
    assert world.look() == [StopPart("store", StopMode.DRAIN)]
    world.exit("store", 0)
    world.look()
    assert world.supervisor.is_over
    assert [name for kind, name in world.log if kind == "start"] == ["store", "gateway"]


def test_the_fleet_survives_any_sequence_of_crashes() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for number in range(300):
        one_life(random.Random(seed + number))


def one_life(draw: random.Random) -> None:
    """Processes start slowly, crash or hang; at some time all is to end. World checks every action."""
    world = World(RestartPolicy(start_s=30))
    supervisor = world.supervisor
    stops_at = draw.uniform(0, 300)
    pauses: dict[str, float] = {}
    while not supervisor.is_over:
        for action in world.look():
            if isinstance(action, StartPart) and action.name in pauses:
                assert world.now >= pauses[action.name]
        name = draw.choice([rule.name for rule in RULES])
        part = supervisor.parts[name]
        first = not part.was_ready
        event = draw.random()
        if name in world.running:
            if world.told[name] == StopMode.KILL or (part.phase is Phase.STOPPING and event < 0.3):
                world.exit(name, 0)
            elif part.phase is Phase.STARTING and event < 0.5:
                world.ready(name)
            elif event > (0.995 if first else 0.9):
                world.exit(name, draw.choice([-9, -11, 0, 1, 2]))
                pauses[name] = part.timeout_at_s if part.phase is Phase.PAUSED else math.inf
                assert part.phase is not Phase.PAUSED or 0.099 < part.timeout_at_s - world.now < 30.001
        if world.now >= stops_at and (not supervisor.stopping or draw.random() < 0.05):
            supervisor.stop()
        world.now += draw.uniform(0, 2)
        assert world.now < 3000, "it never ends"
    assert not world.running
    assert set(world.phases.values()) == {Phase.STOPPED}
    if supervisor.failure is not None:
        assert supervisor.failure.name not in world.been_ready
