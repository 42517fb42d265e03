"""Drains and roles that change while requests run. Nothing fails, and what cannot work is refused."""

from __future__ import annotations

import asyncio

import pytest
from fake_stoker import FakeStoker
from mocks import answers
from path.test_proxy_resume import BODY, ID, undisturbed
from waiting import until
from world import World

from stoker.base.errors import InvalidRequest, Overloaded, StokerError
from stoker.base.ids import WorkerId
from stoker.fleet.fleet import Member
from stoker.fleet.spec import Role
from stoker.gateway.duties import Duties


def duties_of(world: World) -> Duties:
    return Duties(world.fleet, world.moves, world.clock.now)


def member(world: World, name: str) -> Member:
    found = world.fleet.member(WorkerId(name))
    assert found is not None
    return found


def test_no_request_fails_while_roles_change() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World(policy="cost", prompt_tokens=5000) as world:
            duties = duties_of(world)
            for name in "abcd":
                await world.add(name, FakeStoker(pace_s=0.002), dialect="stoker")
            asked = []
            roles = [Role.PREFILL, Role.DECODE, Role.UNIFIED]
            refusals = set()
            for turn in range(12):
                asked += [asyncio.create_task(world.ask(BODY, headers=ID)) for _ in range(4)]
                await asyncio.sleep(0)
                try:
                    name = "abcd"[turn % 4]
                    await duties.set_role(member(world, name), roles[turn % 3], move=turn % 2 == 0)
                except Overloaded as refused:
                    refusals.add(refused.code)
            assert refusals <= {"last_decode_worker", "no_move_target"}
            got = await asyncio.gather(*asked)
            assert [one.status for one in got] == [200] * len(asked)
            assert {one.body for one in got} == {expected}
            await until(lambda: world.ledger.totals().requests == 0)
            assert all(row.error is None for row in world.rows.rows)

    asyncio.run(main())


def test_a_role_takes_effect_for_the_next_request() -> None:
    async def main() -> None:
        async with World(policy="cost", prompt_tokens=5000) as world:
            duties = duties_of(world)
            a = await world.add("a", FakeStoker(), dialect="stoker")
            b = await world.add("b", FakeStoker(), dialect="stoker", role=Role.DECODE)
            await duties.set_role(member(world, "a"), Role.PREFILL)
            await world.ask(BODY, headers=ID)
            sent = [path for path in a.paths + b.paths if path.startswith("/v1")]
            assert len(sent) == 2  # the prompt went to a, the rest to b
            assert a.jsons[-1]["kv_transfer_params"]["do_remote_decode"]

    asyncio.run(main())


def test_the_last_worker_that_decodes_keeps_its_role() -> None:
    async def main() -> None:
        async with World() as world:
            duties = duties_of(world)
            await world.add("p", FakeStoker(), dialect="stoker", role=Role.PREFILL)
            await world.add("d", FakeStoker(), dialect="stoker", role=Role.DECODE)
            with pytest.raises(Overloaded, match="give another worker the role decode or unified first"):
                await duties.set_role(member(world, "d"), Role.PREFILL)
            assert member(world, "d").spec.role is Role.DECODE
            # The last prefill worker may change: decode workers can compute prompts too.
            await duties.set_role(member(world, "p"), Role.DECODE)
            assert (await world.ask(BODY, headers=ID)).status == 200

    asyncio.run(main())


def test_two_role_changes_at_once_leave_a_worker_that_decodes() -> None:
    """Each waits for its worker's answer, so that both could have found the other one still decoding."""

    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, FakeStoker(), dialect="stoker")
            duties = duties_of(world)
            changes = (duties.set_role(member(world, name), Role.PREFILL) for name in "ab")
            refused = [one for one in await asyncio.gather(*changes, return_exceptions=True) if one is not None]
            assert [getattr(one, "code", one) for one in refused] == ["last_decode_worker"]
            assert (await world.ask(BODY, headers=ID)).status == 200

    asyncio.run(main())


def test_a_drain_waits_for_a_role_change_that_takes_its_target() -> None:
    async def main() -> None:
        async with World() as world:
            held = FakeStoker(holds=asyncio.Event())
            await world.add("a", held, dialect="stoker")
            asked = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: world.moves.num_running(WorkerId("a")) == 1)
            for name in "bc":
                await world.add(name, FakeStoker(), dialect="stoker", role=Role.DECODE if name == "b" else Role.PREFILL)
            duties = duties_of(world)
            flip = asyncio.create_task(duties.set_role(member(world, "b"), Role.PREFILL))
            await asyncio.sleep(0)  # the worker is being told
            with pytest.raises(StokerError) as refused:
                await duties.drain(member(world, "a"), move=True)
            assert refused.value.code == "no_move_target"
            await flip
            assert held.holds is not None
            held.holds.set()
            assert (await asked).status == 200

    asyncio.run(main())


def test_servers_of_other_kinds_keep_their_role() -> None:
    async def main() -> None:
        async with World() as world:
            await world.add("v", answers({}), dialect="vllm")
            await world.add("w", answers({}), dialect="vllm")
            with pytest.raises(InvalidRequest, match="only Stoker workers can"):
                await duties_of(world).set_role(member(world, "v"), Role.PREFILL)
            # They cannot move their requests either, so a drain waits for them.
            await duties_of(world).drain(member(world, "v"), move=True)
            assert member(world, "v").health.draining

    asyncio.run(main())


def test_a_move_without_a_target_is_refused_and_nothing_is_drained() -> None:
    async def main() -> None:
        async with World() as world:
            fake = FakeStoker(holds=asyncio.Event())
            await world.add("a", fake, dialect="stoker")
            asked = asyncio.create_task(world.ask(BODY, headers=ID))
            await until(lambda: world.moves.num_running(WorkerId("a")) == 1)
            with pytest.raises(StokerError, match="add one, or try again without moving") as refused:
                await duties_of(world).drain(member(world, "a"), move=True)
            assert refused.value.code == "no_move_target"
            assert not member(world, "a").health.draining
            assert fake.holds is not None
            fake.holds.set()
            assert (await asked).status == 200

    asyncio.run(main())


def test_two_drains_at_once_leave_the_requests_on_the_third_worker() -> None:
    async def main() -> None:
        expected = await undisturbed(BODY)
        async with World() as world:
            held = {name: FakeStoker(holds=asyncio.Event()) for name in "ab"}
            for name, fake in held.items():
                await world.add(name, fake, dialect="stoker")
            asked = [asyncio.create_task(world.ask(BODY, headers=ID)) for _ in range(6)]
            await until(lambda: sum(world.moves.num_running(WorkerId(name)) for name in "ab") == 6)
            c = await world.add("c", FakeStoker(), dialect="stoker")
            duties = duties_of(world)
            await asyncio.gather(*(duties.drain(member(world, name), move=True) for name in "ab"))
            got = await asyncio.gather(*asked)
            assert {one.body for one in got} == {expected}
            assert sum(path.startswith("/v1") for path in c.paths) == 6

    asyncio.run(main())


def test_a_registered_worker_that_refuses_its_role_keeps_it() -> None:
    """An old version, for example: its next heartbeat would bring the old role back."""

    async def main() -> None:
        async with World() as world:
            for name in "ab":
                await world.add(name, FakeStoker(), dialect="stoker", from_config=False)
            with pytest.raises(Overloaded, match="did not take the role decode: status 403") as refused:
                await duties_of(world).set_role(member(world, "a"), Role.DECODE)
            assert refused.value.code == "role_refused"
            assert member(world, "a").spec.role is Role.UNIFIED

    asyncio.run(main())
