"""The autoscaler in the gateway: it samples the real fleet, and changes it through duties and a placement engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fake_stoker import FakeStoker
from world import World

from stoker.autoscale.decision import Flip, Keep, Start, Stop
from stoker.autoscale.settings import AutoscaleSettings
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.spec import LoadReport, Role
from stoker.gateway.duties import Duties
from stoker.gateway.scaling import FleetSampler, ScaleBoard, Scaling

SETTINGS = AutoscaleSettings(mode="on", confirm=1, hold_s=10.0, reverse_s=60.0, warm_s=5.0, start_s=100.0)


def scaling_of(world: World, settings: AutoscaleSettings = SETTINGS) -> Scaling:
    board = ScaleBoard(world.clock.now, "board")
    sampler = FleetSampler(world.fleet, world.ledger, world.admission, world.metrics.ttft_s)
    duties = Duties(world.fleet, world.moves, world.clock.now)
    return Scaling(settings, sampler, duties, board, board, world.clock.now)


def member(world: World, name: str) -> Member:
    found = world.fleet.member(WorkerId(name))
    assert found is not None
    return found


async def add_pair(world: World, num_decode: int) -> None:
    await world.add("p", FakeStoker(), dialect="stoker", role=Role.PREFILL)
    for i in range(num_decode):
        await world.add(f"d{i}", FakeStoker(), dialect="stoker", role=Role.DECODE)
    world.clock.advance(100.0)
    report(world)


def report(world: World, running: int = 0) -> None:
    for one in world.fleet.members():
        load = LoadReport(running_sequences=running, prefill_tokens_per_s=1000.0, step_s=0.2 if running else 0.001)
        world.fleet.saw_report(one.worker_id, load, world.clock.now())


def queue(world: World, name: str, tokens: int) -> None:
    now = world.clock.now()
    world.ledger.reserve(WorkerId(name), prefill_tokens=tokens, context_tokens=1, output_tokens=1, now=now)


def test_a_backlog_of_prompts_makes_a_decode_worker_prefill() -> None:
    async def main() -> None:
        async with World() as world:
            await add_pair(world, 3)
            scaling = scaling_of(world)
            assert isinstance((await scaling.step()).action, Keep)
            queue(world, "p", 50_000)
            decision = await scaling.step()
            assert decision.action == Flip(WorkerId("d0"), Role.PREFILL)
            assert member(world, "d0").spec.role is Role.PREFILL
            assert decision.numbers["queued_tokens"] == 50_000
            newest = scaling.wishes().decisions[0]
            assert (newest.action, newest.numbers) == ("flip d0 to prefill", decision.numbers)
            assert isinstance((await scaling.step()).action, Keep)  # hold_s

    asyncio.run(main())


def test_a_worker_stays_warm_when_its_role_changes() -> None:
    async def main() -> None:
        async with World() as world:
            await add_pair(world, 3)
            scaling = scaling_of(world, replace(SETTINGS, warm_s=90.0))
            queue(world, "p", 3_000)
            assert (await scaling.step()).action == Flip(WorkerId("d0"), Role.PREFILL)
            world.clock.advance(SETTINGS.hold_s)
            report(world)
            queue(world, "p", 9_000)
            assert (await scaling.step()).action == Flip(WorkerId("d1"), Role.PREFILL)

    asyncio.run(main())


def test_a_dry_run_changes_nothing() -> None:
    async def main() -> None:
        async with World() as world:
            await add_pair(world, 3)
            queue(world, "p", 50_000)
            scaling = scaling_of(world, replace(SETTINGS, mode="dry_run"))
            assert isinstance((await scaling.step()).action, Flip)
            assert member(world, "d0").spec.role is Role.DECODE

    asyncio.run(main())


def test_a_wanted_worker_is_listed_until_it_joins() -> None:
    async def main() -> None:
        async with World() as world:
            await add_pair(world, 1)
            scaling = scaling_of(world, replace(SETTINGS, max_workers=3))
            queue(world, "p", 50_000)
            assert (await scaling.step()).action == Start(Role.PREFILL)
            assert [(one.number, one.role) for one in scaling.wishes().starts] == [(1, "prefill")]
            world.clock.advance(20.0)
            assert isinstance((await scaling.step()).action, Keep)
            await world.add("p2", FakeStoker(), dialect="stoker", role=Role.PREFILL)
            await scaling.step()
            assert scaling.wishes().starts == []

    asyncio.run(main())


def test_a_worker_that_is_not_needed_is_drained_and_listed_for_its_end() -> None:
    async def main() -> None:
        async with World() as world:
            await add_pair(world, 3)
            scaling = scaling_of(world, replace(SETTINGS, max_workers=8))
            assert (await scaling.step()).action == Stop(WorkerId("d0"))
            assert member(world, "d0").health.draining
            assert scaling.wishes().stops == ["d0"]
            world.fleet.remove(WorkerId("d0"), world.clock.now())
            world.clock.advance(20.0)
            await scaling.step()
            assert "d0" not in scaling.wishes().stops

    asyncio.run(main())


def test_a_refused_change_is_tried_again() -> None:
    """The fleet may have changed since the sample."""

    async def main() -> None:
        async with World() as world:
            await add_pair(world, 2)
            scaling = scaling_of(world)
            queue(world, "p", 50_000)
            await world.workers["d0"].stop()
            for name in ("d0", "d1"):
                world.register(name, role=Role.DECODE, dialect="vllm")  # its role is fixed
            await scaling.step()
            assert member(world, "d0").spec.role is Role.DECODE
            for name in ("d0", "d1"):
                world.register(name, role=Role.DECODE, dialect="stoker")
            await scaling.step()
            assert {member(world, name).spec.role for name in ("d0", "d1")} == {Role.DECODE, Role.PREFILL}

    asyncio.run(main())
