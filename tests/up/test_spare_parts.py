"""Parts that come and go while the fleet runs, on the supervisor's virtual clock."""

from __future__ import annotations

from test_supervisor import GATEWAY, World

from stoker.up.supervisor import PartRule, Phase, RestartPolicy, StartPart, StopMode, StopPart, Supervisor

SPARE = PartRule("decode-1", 2, 1, 20.0, spare=True)


def world_with_spare() -> World:
    world = World()
    world.supervisor = Supervisor([GATEWAY, PartRule("decode-0", 2, 1, 20.0), SPARE], RestartPolicy(start_s=50.0))
    world.been_ready.add("store")
    world.bring_up()
    return world


def brought(world: World) -> World:
    world.supervisor.bring("decode-1", world.now)
    assert world.look() == [StartPart("decode-1")]
    world.ready("decode-1")
    return world


def test_a_spare_part_runs_only_when_it_is_brought_in() -> None:
    world = world_with_spare()
    assert world.supervisor.all_ready
    assert world.running == {"gateway", "decode-0"}
    brought(world)
    assert world.phases["decode-1"] is Phase.READY
    world.exit("decode-1")
    assert world.phases["decode-1"] is Phase.PAUSED, "a part that worked is restarted, like any other"


def test_a_spare_part_that_cannot_start_does_not_end_the_fleet() -> None:
    world = world_with_spare()
    world.supervisor.bring("decode-1", world.now)
    world.look()
    world.exit("decode-1", 1)
    part = world.supervisor.parts["decode-1"]
    assert (part.phase, part.start_failures) == (Phase.UNUSED, 1)
    assert part.start_failure == "it exited with code 1 before it was ready"
    assert world.pass_time(3600.0) == [], "the supervisor itself does not try again"
    assert not world.supervisor.stopping


def test_a_spare_part_that_does_not_get_ready_is_killed() -> None:
    world = world_with_spare()
    world.supervisor.bring("decode-1", world.now)
    world.look()
    assert world.pass_time(50.0) == [StopPart("decode-1", StopMode.KILL)]
    world.exit("decode-1")
    assert world.phases["decode-1"] is Phase.UNUSED
    assert not world.supervisor.stopping


def test_a_released_part_is_drained_and_not_restarted_and_may_come_back() -> None:
    world = brought(world_with_spare())
    world.supervisor.release("decode-0", world.now)
    assert world.look() == [StopPart("decode-0", StopMode.DRAIN)]
    assert world.look() == []
    world.exit("decode-0", 0)
    assert world.phases["decode-0"] is Phase.UNUSED
    assert world.pass_time(100.0) == []
    assert world.supervisor.all_ready
    world.supervisor.bring("decode-0", world.now)
    assert world.look() == [StartPart("decode-0")]
    world.exit("decode-0", 1)
    assert not world.supervisor.stopping, "the fleet ran without it"


def test_a_released_part_that_does_not_end_is_killed() -> None:
    world = brought(world_with_spare())
    world.supervisor.release("decode-1", world.now)
    world.look()
    assert world.pass_time(19.0) == []
    assert world.supervisor.next_timeout_s() == 20.0
    assert world.pass_time(1.0) == [StopPart("decode-1", StopMode.KILL)]
    assert world.pass_time(1.0) == []


def test_a_part_that_waits_for_its_restart_can_be_released() -> None:
    world = brought(world_with_spare())
    world.exit("decode-1")
    world.supervisor.release("decode-1", world.now)
    assert world.pass_time(100.0) == []
    assert world.phases["decode-1"] is Phase.UNUSED


def test_a_fleet_ends_while_a_part_leaves() -> None:
    world = brought(world_with_spare())
    world.supervisor.release("decode-1", world.now)
    world.look()
    world.supervisor.stop()
    assert world.look() == [StopPart("gateway", StopMode.DRAIN)]
    world.exit("gateway", 0)
    assert world.look() == [StopPart("decode-0", StopMode.DRAIN)], "the other one was told already"
    world.exit("decode-0", 0)
    world.exit("decode-1", 0)
    assert world.look() == []
    assert world.supervisor.is_over


def test_unused_parts_do_not_keep_a_fleet_from_ending() -> None:
    world = world_with_spare()
    world.supervisor.stop()
    world.look()
    for name in ("gateway", "decode-0"):
        world.exit(name, 0)
        world.look()
    assert world.supervisor.is_over


# ---- parts with outdated settings


def test_outdated_parts_are_drained_and_started_again_one_after_the_other() -> None:
    world = World()
    world.bring_up()
    for name in ("prefill-0", "decode-0"):
        world.supervisor.renew(name)
    assert world.look() == [StopPart("prefill-0", StopMode.DRAIN)]
    world.exit("prefill-0", 0)
    assert world.pass_time(0.2) == [StartPart("prefill-0")]
    assert world.pass_time(5) == [], "the fleet does without one part at a time"
    world.ready("prefill-0")
    assert world.look() == [StopPart("decode-0", StopMode.DRAIN)]
    assert world.pass_time(20.1) == [StopPart("decode-0", StopMode.KILL)], "it takes longer than its stop_s"
    world.exit("decode-0")
    assert world.pass_time(0.3) == [StartPart("decode-0")]
    world.ready("decode-0")
    assert world.look() == []
    assert world.supervisor.all_ready


def test_a_part_that_exits_is_not_outdated_any_more() -> None:
    world = World()
    world.bring_up()
    world.exit("gateway")
    world.supervisor.renew("gateway")  # it does not run: its next start has the new settings
    world.supervisor.renew("prefill-0")
    assert world.look() == []
    world.exit("prefill-0")
    for name in ("gateway", "prefill-0"):
        world.pass_time(0.2)
        world.ready(name)
    assert world.pass_time(1) == []


def test_a_fleet_stops_while_a_part_is_renewed() -> None:
    world = World()
    world.bring_up()
    world.supervisor.renew("prefill-0")
    world.look()
    world.supervisor.stop()
    assert world.look() == [StopPart("gateway", StopMode.DRAIN)]
    world.exit("prefill-0", 0)
    world.exit("gateway", 0)
    assert world.look() == [StopPart("decode-0", StopMode.DRAIN)]
    world.exit("decode-0", 0)
    assert world.look() == [StopPart("store", StopMode.DRAIN)]
    world.exit("store", 0)
    world.look()
    assert world.supervisor.is_over
